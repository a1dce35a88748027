"""What must work without Paddle, and what a single process must not touch (case C82)."""

from __future__ import annotations

import subprocess
import sys


def run(script):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_topology_and_init_streams_import_no_paddle():
    script = """
import sys
sys.modules["paddle"] = None  # any import of it raises
from ppfleetx.distributed import AXES, GroupInfo, InitStream, Seeds, Topology, rank_seeds
print(rank_seeds(Topology(0, 1), 1024).global_seed, InitStream(1, "w").normal([2]).shape)
import ppfleetx.distributed
assert "ParallelContext" in dir(ppfleetx.distributed)
try:
    ppfleetx.distributed.nothing
except AttributeError as error:
    print(error)
"""
    shown = run(script)
    assert shown.splitlines() == ["2049 (2,)", "module 'ppfleetx.distributed' has no attribute 'nothing'"]


def test_every_public_name_exists():
    run("import ppfleetx.distributed as d; [getattr(d, name) for name in d.__all__]")


def test_one_process_needs_no_distributed_stack_c82():
    """Also under a launcher's environment with one process, whose address nobody serves."""
    script = """
import os, stat, sys
os.environ.update(PADDLE_TRAINER_ID="0", PADDLE_TRAINERS_NUM="1", PADDLE_MASTER="127.0.0.1:9")
import paddle.distributed as dist
from ppfleetx.config.errors import Problem, UserError
from ppfleetx.distributed import ParallelContext, Topology
with ParallelContext.create(Topology(0, 1)) as context:
    assert [context.group(axis) for axis in ("dp", "pp", "sharding", "mp", "sep")] == [None] * 5
    assert context.data_group is None and context.is_main and context.device == "cpu"
    assert context.rank0_first("work", lambda: 5) == 5
    assert context.together(lambda: 6) == 6
    context.agree(None)
    try:
        context.agree(UserError(Problem("a.b", 1, "r")))
    except UserError as error:
        print(error.problems[0].key)
assert not dist.is_initialized()
assert "ppfleetx.distributed.gloo" not in sys.modules
sockets = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
assert not [fd for fd in map(int, sockets) if stat.S_ISSOCK(os.fstat(fd).st_mode)]
"""
    assert run(script) == "a.b"
