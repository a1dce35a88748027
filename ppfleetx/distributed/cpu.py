"""How a run uses this machine's CPU: threads a process, and the kernels of the MKL that Paddle brings.

Both decide the last bits of what is computed. Importing this file imports no Paddle.

Very small models keep one thread: sharing a product costs more than it saves, and many times more where another program uses
the core that is waited for. Measured on an AMD EPYC (Zen 4, 2 cores, kernels for AVX-512, Paddle 3.3.1): GPT of 4 blocks
without dropout, one micro-batch a step; milliseconds a step on 1 → 2 threads, medians of alternated rounds; work as in
`work_of`, in units of 2^20:

    hidden  tokens  work   1 → 2        hidden  tokens  work   1 → 2
    64      256     1      18 → 17      128     512     8      62 → 48
    128     64      1      15 → 12      64      2048    8      102 → 79
    64      512     2      28 → 28      256     256     16     114 → 87
    128     128     2      25 → 21      128     1024    16     146 → 116 (quickstart)
    256     32      2      26 → 19      tiny_gpt        0.25   30 → 28

(tiny_gpt has 4 micro-batches and dropout.) A second time, with others on the machine, work 1 took 15 → 32 and
work 2 27 → 54; with more of them tiny_llama (0.25) 40 → 142, work 1 34 → 376, the quickstart 380 → 627.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ppfleetx.config import Config, local_size_of_launch
from ppfleetx.config.schema import GlobalConfig

logger = logging.getLogger("ppfleetx")

#: what Paddle's MKL reads at its first product; without it, it takes its slowest kernels on processors that are not Intel's
KERNELS = "MKL_DEBUG_CPU_TYPE"
#: Paddle sets it to 1 where it is unset, and the launcher hands that on: 1 tells nothing of what a user wants
OMP_THREADS = "OMP_NUM_THREADS"
#: least work of a product that is shared among threads, see `work_of`
LEAST_WORK = 2**22

#: values of KERNELS, best first: the flag of /proc/cpuinfo that each needs, and its name for people
_KINDS = {"7": ("avx512dq", "AVX-512"), "5": ("avx2", "AVX2")}
_AMD = ("AuthenticAMD", "HygonGenuine")


@dataclass(frozen=True)
class CpuUse:
    """What a process computes with.

    Attributes:
        threads: of Paddle's kernels.
        kernels: the value of KERNELS in force; "": MKL chooses.
    """

    threads: int
    kernels: str

    def __str__(self) -> str:
        kernels = f"{KERNELS}={self.kernels}" if self.kernels else "MKL's own kernels"
        return f"{_count(self.threads, 'thread')}, {kernels}"

    @classmethod
    def read(cls, saved: Any) -> CpuUse | None:
        """From what a checkpoint says; None if it says nothing of the kind."""
        try:
            threads, kernels = saved["threads"], saved["kernels"]
        except (TypeError, KeyError):
            return None
        return cls(threads, kernels) if type(threads) is int and isinstance(kernels, str) else None


def choose_kernels() -> None:
    """Sets KERNELS to what suits this processor, unless it is set. To be called before Paddle is imported."""
    if (kernels := best_kernels()) is not None:
        os.environ.setdefault(KERNELS, kernels)


def import_paddle(section: GlobalConfig) -> None:
    """Imports Paddle, if it is there and this is the first time, with the kernels that `section` wants and without its warning
    about OMP_NUM_THREADS. Does nothing for other devices than the CPU, whose hosts multiply nothing."""
    if section.device != "cpu" or "paddle" in sys.modules:
        return
    if section.cpu_kernels == "auto":
        choose_kernels()
    wish = os.environ.get(OMP_THREADS)
    os.environ[OMP_THREADS] = "1"
    try:
        import paddle  # noqa: F401
    except ModuleNotFoundError:
        pass  # `check_paddle_version` reports it
    finally:
        if wish is not None:
            os.environ[OMP_THREADS] = wish


def set_threads(config: Config) -> CpuUse | None:
    """Gives Paddle's kernels the threads that the configuration wants, and logs what is in force; None on other devices."""
    if config.Global.device != "cpu":
        return None
    from paddle.base import core

    processes, own = local_size_of_launch(), cores()
    threads, why = _threads(config, own, os.environ)
    core.set_num_threads(threads)
    there = f"{_count(own, 'core')}, {_count(processes, 'process', 'es')}"
    logger.info("CPU: %s a process (%s%s), %s", _count(threads, "thread"), why, there, _kernels_line(config.Global))
    if threads * processes > own and threads > 1:
        logger.info("warning: %d threads for %s: they wait for each other", threads * processes, _count(own, "core"))
    return CpuUse(threads, os.environ.get(KERNELS, ""))


def in_use(config: Config) -> CpuUse:
    """What a run of this configuration computes with, once `set_threads` was called. Local."""
    return CpuUse(_threads(config, cores(), os.environ)[0], os.environ.get(KERNELS, ""))


def _threads(config: Config, own: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """(threads of this process, why, for the log: empty or ending in "; "), with `own` cores."""
    if config.Global.cpu_threads is not None:
        return config.Global.cpu_threads, "Global.cpu_threads; "
    wish = environ.get(OMP_THREADS, "").strip()
    if wish.isascii() and wish.isdigit() and int(wish) > 1:
        return int(wish), f"{OMP_THREADS}; "
    share = max(own // local_size_of_launch(environ), 1)
    if share > 1 and work_of(config) < LEAST_WORK:
        return 1, "a very small model; "
    if share > 1 and not _has_mkl():
        return 1, "Paddle without MKL; "
    return share, ""


def _has_mkl() -> bool:
    """Whether this Paddle multiplies with MKL; with OpenBLAS it wants one thread (its own warning, 3.3.1)."""
    from paddle import version

    return version.mkl() == "ON"


def work_of(config: Config) -> int:
    """Multiplications and additions of one of the model's smaller products: a micro-batch times a matrix [hidden, hidden], of
    which this process has its part."""
    layout, model, data = config.Distributed, config.Model, config.Data.Train or config.Data.Eval
    length = data.dataset.max_seq_len if data is not None else model.max_position_embeddings
    tokens = config.Global.micro_batch_size * length // layout.sep_degree
    return tokens * model.hidden_size * (model.hidden_size // layout.mp_degree)


def _kernels_line(section: GlobalConfig) -> str:
    """For people."""
    if not (kernels := os.environ.get(KERNELS, "")):
        best = best_kernels() if section.cpu_kernels == "auto" and KERNELS not in os.environ else None
        late = f" (Paddle was imported first: set {KERNELS}={best} before, for faster ones)" if best else ""
        return f"MKL's own kernels{late}"
    name = f"kernels for {_KINDS[kernels][1]} on AMD" if kernels == best_kernels() else "kernels"
    return f"MKL {name} ({KERNELS}={kernels})"


def best_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The value of KERNELS for this processor; None where MKL chooses well by itself, or nothing is known."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())  # of the first core
    if found.get("vendor_id") not in _AMD:
        return None
    flags = set(found.get("flags", "").split())
    return next((value for value, (flag, _) in _KINDS.items() if flag in flags), None)


def cores(root: Path = Path("/")) -> int:
    """Processors that this process may use: its affinity, or the container's quota of time where that is less; at least 1.

    Args:
        root: where /proc and /sys are.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(int(min([allowed, *_quotas(root)])), 1)


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that each control group around this process may use; versions 1 and 2. Inside a container the
    path may be that of the host, of which only the top is visible."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup"
        tops = [top / controllers, top / "cpu"] if controllers else [top, top / "unified"]
        inside = PurePosixPath(path.strip().lstrip("/"))
        for folder in (place / part for place in tops for part in (inside, *inside.parents)):
            limit = _read(folder / "cpu.max").split()
            if controllers:
                limit = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            if len(limit) == 2 and all(word.isdigit() and int(word) > 0 for word in limit):  # no limit: "max", or -1
                yield int(limit[0]) / int(limit[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
