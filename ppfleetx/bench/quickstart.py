"""A step of the quickstart's training beside the same at another commit: two clones, each at its own defaults.

Every round starts a process of either; each decides by itself about threads and kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ppfleetx.bench import LOGGING_FREQ
from ppfleetx.config import Problem, UserError, load_config
from ppfleetx.data import CorpusWriter
from ppfleetx.distributed.cpu import KERNELS, OMP_THREADS, best_kernels

_ROOT = Path(__file__).resolve().parents[2]
_CONFIG = "projects/gpt/quickstart.yaml"
#: untimed updates at a start
WARM_UP = 2 * LOGGING_FREQ
#: how many times as fast as commit 94b6fee a step must be, on two cores
LIMIT_AMD, LIMIT = 2.5, 1.5

#: what is not measured: saves, evaluations
SETTINGS = (
    f"Engine.logging_freq={LOGGING_FREQ}", "Engine.eval_freq=0", "Engine.save_load.save_steps=-1", "Data.Eval=null",
    "Data.Train.dataset.split=[1, 0, 0]",
)  # fmt: skip


def measure_quickstart(
    folder: Path, against: str, rounds: int, steps: int, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs both, `rounds` times `steps` updates; the result as JSON values.

    Args:
        folder: empty; gets the corpus (random ids), the other clone and all runs.
        against: a commit of this clone's history, or a folder that holds another clone.
        steps: a multiple of LOGGING_FREQ.
        overrides: `Key.sub=value` for both.

    Raises:
        UserError: there is no such commit, or the configuration cannot be used.
    """
    other = _clone(against, folder / "against")
    num_updates = WARM_UP + steps
    paths = [f"Data.Train.dataset.input_dir={folder / 'data'}", f"Engine.max_steps={num_updates}"]
    pairs = [*SETTINGS, *overrides, *paths]
    _write_corpus(folder / "data/corpus", pairs, num_updates)
    sides = [("now", _ROOT), ("against", other)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in sides}
    for number in range(rounds):
        for name, root in sides:
            seconds[name].append(_step_s(root, folder / f"{name}-{number}", pairs))
        sides.reverse()  # who goes first in a round goes second in the next
    ratios = [before / now for now, before in zip(seconds["now"], seconds["against"], strict=True)]
    limit = LIMIT_AMD if best_kernels() else LIMIT
    return {"against": against, "seconds": seconds, "ratios": ratios, "ratio": median(ratios), "limit": limit}


def quickstart_lines(result: dict[str, Any]) -> list[str]:
    """The result for a reader."""
    rows = zip(result["seconds"]["now"], result["seconds"]["against"], result["ratios"], strict=True)
    return [
        "       seconds a step (median)",
        f"round  now       {result['against']:<10}  times as fast",
        *(
            f"{number:5}  {now:<8.4f}  {before:<10.4f}  {ratio:.2f}"
            for number, (now, before, ratio) in enumerate(rows, 1)
        ),
        f"quickstart step {result['ratio']:.2f} times as fast as {result['against']} "
        f"(on two cores at least {result['limit']} beside 94b6fee)",
    ]


def _clone(against: str, folder: Path) -> Path:
    """The other clone: `against` itself if it is a folder, else what git has of that commit, put into `folder`."""
    if Path(against).is_dir():
        return Path(against).resolve()
    folder.mkdir()
    # whatever option its name looks like, it is a commit
    archive = ["git", "archive", "--format=tar", "--end-of-options", against]
    try:
        packed = subprocess.run(archive, cwd=_ROOT, capture_output=True)
    except OSError as error:
        raise _refused(against, str(error)) from None
    if packed.returncode != 0:
        raise _refused(against, packed.stderr.decode(errors="replace").strip())
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    return folder


def _refused(against: str, why: str) -> UserError:
    return UserError(Problem("--against", against, f"it must be a folder or a commit of this clone: {why}"))


def _step_s(root: Path, output: Path, pairs: Sequence[str]) -> float:
    """Seconds of a step once it runs steadily, in a process of its own at the defaults of `root`."""
    environment = {
        name: value for name, value in os.environ.items() if name not in (KERNELS, OMP_THREADS, "PYTHONPATH")
    }
    command = [sys.executable, str(root / "tools/train.py"), "-c", str(root / _CONFIG), "-o", *pairs]
    run = subprocess.run(
        [*command, f"Engine.save_load.output_dir={output}"], cwd=root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return median(record["avg_batch_cost_s"] for record in records if record["step"] > WARM_UP)


def _write_corpus(prefix: Path, pairs: Sequence[str], num_updates: int) -> None:
    """Random ids, enough for one epoch of a run."""
    config = load_config([str(_ROOT / _CONFIG)], pairs).config
    assert config.Data.Train is not None
    num_tokens = num_updates * config.derived.global_batch_size * config.Data.Train.dataset.max_seq_len + 1
    ids = np.random.default_rng(0).integers(0, config.Model.vocab_size, num_tokens)
    with CorpusWriter(prefix, "megatron", config.Model.vocab_size) as writer:
        writer.append(ids)
