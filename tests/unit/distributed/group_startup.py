"""How fast and how surely groups come up: `python tests/unit/distributed/group_startup.py [COUNT]`, by hand.

Launches COUNT (50) times 4 processes that set up all groups of mp2·pp2, and prints how many came up, and min, median
and max of the seconds from the arrival of the last process (Paddle imported) to the last one's having all groups.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.launch import launch

NUM_PROCESSES = 4


def start_once() -> float | None:
    """Seconds from the last arrival to the last process's having its groups; None if the start failed."""
    result = launch([__file__, "worker"], NUM_PROCESSES, timeout=90)
    times = re.findall(r"arrived ([\d.]+) grouped ([\d.]+)", "\n".join(result.logs))
    if result.returncode != 0 or result.orphans or len(times) != NUM_PROCESSES:
        print(result.returncode, result.stdout[-3000:], *result.logs, sep="\n")
        return None
    return max(float(grouped) for _, grouped in times) - max(float(arrived) for arrived, _ in times)


def worker() -> None:
    import os
    import time

    import paddle
    import paddle.distributed as dist

    from ppfleetx.distributed import ParallelContext, Topology

    topology = Topology(int(os.environ["PADDLE_TRAINER_ID"]), NUM_PROCESSES, mp_degree=2, pp_degree=2)
    arrived = time.time()
    with ParallelContext.create(topology) as context:
        grouped = time.time()
        total = paddle.ones([1])
        dist.all_reduce(total, group=context.group("mp"))
        dist.all_reduce(total, group=context.group("pp"))
        assert total.item() == NUM_PROCESSES
    print(f"arrived {arrived:.4f} grouped {grouped:.4f}", flush=True)


def main(count: int) -> int:
    times = []
    for _ in range(count):
        seconds = start_once()
        if seconds is not None:
            times.append(seconds)
    figures = f"{min(times):.3f} / {statistics.median(times):.3f} / {max(times):.3f} s" if times else "-"
    print(f"{len(times)} of {count} starts came up; min / median / max {figures}")
    return 0 if len(times) == count and max(times) < 1.0 else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        worker()
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
