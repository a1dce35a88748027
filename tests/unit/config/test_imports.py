"""The configuration never needs Paddle."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.config.helpers import RECIPES, ROOT

SCRIPT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("paddle", "torch"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import importlib, pkgutil, time, warnings
warnings.simplefilter("error")
import ppfleetx.config
for module in pkgutil.iter_modules(ppfleetx.config.__path__):
    importlib.import_module("ppfleetx.config." + module.name)
start = time.perf_counter()
loaded = ppfleetx.config.load_config([sys.argv[1]], ["Data.Train.dataset.split.0=900"], world_size=16)
assert loaded.config.derived.padded_vocab_size == 50432
assert time.perf_counter() - start < 0.5, time.perf_counter() - start
"""


def test_every_module_and_a_recipe_load_with_paddle_blocked_and_without_a_warning():
    command = [sys.executable, "-c", SCRIPT, str(RECIPES / "pretrain_gpt_13B_dp8.yaml")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
