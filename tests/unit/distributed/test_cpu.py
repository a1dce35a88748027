"""Threads and kernels on a CPU: what the machine offers, what a user wants, what is said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from paddle.base import core

from ppfleetx.config import UserError, load_config, local_size_of_launch
from ppfleetx.config.schema import GlobalConfig
from ppfleetx.distributed import cpu
from ppfleetx.distributed.cpu import KERNELS, OMP_THREADS, CpuUse

REPO = Path(__file__).resolve().parents[3]
QUICKSTART, TINY = "projects/gpt/quickstart.yaml", "configs/debug/tiny_gpt.yaml"


def config(file, *overrides, world_size=1):
    return load_config([str(REPO / file)], list(overrides), world_size).config


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 cores without anybody's wishes."""
    for name in [name for name in os.environ if name.startswith("PADDLE_")] + [OMP_THREADS, KERNELS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "cores", lambda: 8)
    monkeypatch.setattr(cpu, "best_kernels", lambda: "5")
    threads = []
    monkeypatch.setattr(core, "set_num_threads", threads.append)
    return threads


class TestCores:
    @pytest.fixture(autouse=True)
    def eight_allowed(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def test_the_affinity_counts(self, tmp_path, monkeypatch):
        assert cpu.cores(tmp_path) == 8  # no control groups at all
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
        assert cpu.cores(tmp_path) == 1

    @pytest.mark.parametrize(
        ("limit", "found"),
        [
            ("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8),
            ("", 8), ("junk", 8), ("100000 0", 8),
        ],
    )  # fmt: skip
    def test_version_2(self, tmp_path, limit, found):
        write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": limit})
        assert cpu.cores(tmp_path) == found

    def test_the_tightest_of_the_groups_around_counts(self, tmp_path):
        limits = {"a/b": "600000 100000", "a": "300000 100000"}
        write(tmp_path, {f"sys/fs/cgroup/{name}/cpu.max": text for name, text in limits.items()})
        write(tmp_path, {"proc/self/cgroup": "0::/a/b\n"})
        assert cpu.cores(tmp_path) == 3

    @pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
    @pytest.mark.parametrize("path", ["/job", "/docker/0123/of-the-host"])
    @pytest.mark.parametrize(("quota", "found"), [("200000", 2), ("-1", 8)])
    def test_version_1(self, tmp_path, controllers, path, quota, found):
        """A container sees its own group at the top, while its path is that of the host."""
        place = f"sys/fs/cgroup/{controllers}{'/job' if path == '/job' else ''}"
        write(tmp_path, {f"{place}/cpu.cfs_quota_us": quota, f"{place}/cpu.cfs_period_us": "100000\n"})
        write(tmp_path, {"proc/self/cgroup": f"5:memory:/else\n4:{controllers}:{path}\n3:cpuset:/\n0::/\n"})
        assert cpu.cores(tmp_path) == found


class TestKernels:
    @pytest.mark.parametrize(
        ("vendor", "flags", "found"),
        [
            ("AuthenticAMD", "fpu avx avx2 avx512f avx512dq avx512bw", "7"),
            ("AuthenticAMD", "fpu avx avx2 fma", "5"),
            ("HygonGenuine", "avx avx2", "5"),
            ("AuthenticAMD", "fpu avx", None),
            ("GenuineIntel", "avx avx2 avx512f avx512dq", None),
        ],
    )
    def test_by_processor(self, tmp_path, vendor, flags, found):
        core_lines = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n"
        (tmp_path / "cpuinfo").write_text(core_lines * 2)
        assert cpu.best_kernels(tmp_path / "cpuinfo") == found

    def test_elsewhere(self, tmp_path):
        assert cpu.best_kernels(tmp_path / "none") is None
        (tmp_path / "arm").write_text("processor\t: 0\nCPU implementer\t: 0x41\nFeatures\t: fp asimd\n")
        assert cpu.best_kernels(tmp_path / "arm") is None


class TestThreads:
    def threads(self, *overrides, file=QUICKSTART, world_size=1):
        return cpu.in_use(config(file, *overrides, world_size=world_size)).threads

    def test_the_cores_are_shared_by_the_processes_of_this_machine(self, machine, monkeypatch):
        assert self.threads() == 8
        for size, found in (("2", 4), ("3", 2), ("8", 1), ("16", 1)):
            monkeypatch.setenv("PADDLE_LOCAL_SIZE", size)
            assert self.threads() == found

    def test_very_small_models_keep_one(self, machine):
        """Quickstart: 8 · 128 tokens · 128 · 128 = 2^24; tiny_gpt: 2 · 32 tokens · 64 · 64 = 2^18; the limit is 2^22."""
        assert cpu.work_of(config(QUICKSTART)) == 2**24 and cpu.work_of(config(TINY)) == 2**18
        assert self.threads(file=TINY) == self.threads(file="configs/debug/tiny_llama.yaml") == 1
        batch = "Global.global_batch_size=64", "Global.micro_batch_size={}"
        assert self.threads(batch[0], batch[1].format(32), file=TINY) == 8
        assert self.threads(batch[0], batch[1].format(16), file=TINY) == 1

    def test_a_cut_model_is_smaller(self, machine):
        assert cpu.work_of(config(QUICKSTART, "Distributed.mp_degree=4", world_size=4)) == 2**22
        assert cpu.work_of(config(QUICKSTART, "Distributed.sep_degree=2", world_size=2)) == 2**23

    def test_a_wish_in_the_environment(self, machine, monkeypatch):
        """Paddle sets 1 where nothing was set, so 1 tells nothing."""
        for text, found in {"3": 3, "12": 12, "1": 8, "0": 8, "-2": 8, "2,1": 8, "two": 8, "²": 8, "": 8}.items():
            monkeypatch.setenv(OMP_THREADS, text)
            assert self.threads() == found
        monkeypatch.setenv(OMP_THREADS, "3")
        assert self.threads(file=TINY) == 3  # what a user says holds for any model
        assert self.threads("Global.cpu_threads=5") == 5

    def test_the_key(self, machine):
        assert self.threads("Global.cpu_threads=1") == 1
        assert self.threads("Global.cpu_threads=3", file=TINY) == 3
        with pytest.raises(UserError) as caught:
            config(TINY, "Global.cpu_threads=0")
        assert caught.value.problems[0].key == "Global.cpu_threads"

    def test_paddle_without_mkl_keeps_one(self, machine, monkeypatch):
        monkeypatch.setattr("paddle.version.mkl", lambda: "OFF")
        assert self.threads() == 1 and self.threads("Global.cpu_threads=2") == 2

    def test_processes_of_this_machine(self):
        assert local_size_of_launch({}) == 1
        assert local_size_of_launch({"PADDLE_TRAINERS_NUM": "8", "PADDLE_NNODES": "2"}) == 4
        assert local_size_of_launch({"PADDLE_TRAINERS_NUM": "8", "PADDLE_LOCAL_SIZE": "6", "PADDLE_NNODES": "2"}) == 6


class TestWhatIsSaid:
    def lines(self, *overrides, file=QUICKSTART):
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:  # not caplog: earlier tests may have set the logger up
            patch.setattr(cpu.logger, "info", lambda text, *values: said.append(text % values))
            cpu.set_threads(config(file, *overrides))
        return said

    def test_lines(self, machine, monkeypatch):
        monkeypatch.setenv(KERNELS, "5")
        kernels = "MKL kernels for AVX2 on AMD (MKL_DEBUG_CPU_TYPE=5)"
        assert self.lines() == [f"CPU: 8 threads a process (8 cores, 1 process), {kernels}"]
        (line,) = self.lines(file=TINY)
        assert line == f"CPU: 1 thread a process (a very small model; 8 cores, 1 process), {kernels}"
        said, warned = self.lines("Global.cpu_threads=9")
        assert said == f"CPU: 9 threads a process (Global.cpu_threads; 8 cores, 1 process), {kernels}"
        assert warned == "warning: 9 threads for 8 cores: they wait for each other"
        monkeypatch.setenv(OMP_THREADS, "2")
        monkeypatch.setenv("PADDLE_LOCAL_SIZE", "5")
        said, warned = self.lines()
        assert "CPU: 2 threads a process (OMP_NUM_THREADS; 8 cores, 5 processes)" in said and "10 threads" in warned
        assert machine == [8, 1, 9, 2], "what is said is what is set"

    def test_kernels_that_are_not_as_wanted(self, machine, monkeypatch):
        """Paddle is imported already here."""
        late = "MKL's own kernels (Paddle was imported first: set MKL_DEBUG_CPU_TYPE=5 before, for faster ones)"
        assert self.lines()[0].endswith(f"), {late}")
        assert self.lines("Global.cpu_kernels=off")[0].endswith("), MKL's own kernels")
        monkeypatch.setenv(KERNELS, "4")
        for choice in ("auto", "off"):
            assert self.lines(f"Global.cpu_kernels={choice}")[0].endswith("MKL kernels (MKL_DEBUG_CPU_TYPE=4)")

    def test_other_devices_are_left_alone(self, machine):
        other = config(TINY)
        assert cpu.set_threads(replace(other, Global=replace(other.Global, device="gpu"))) is None and machine == []

    def test_in_a_checkpoint(self):
        use = CpuUse(2, "7")
        assert CpuUse.read({"threads": 2, "kernels": "7"}) == use and str(use) == "2 threads, MKL_DEBUG_CPU_TYPE=7"
        assert str(CpuUse(1, "")) == "1 thread, MKL's own kernels"
        for junk in (
            None,
            {},
            [],
            "text",
            {"threads": 2},
            {"threads": "2", "kernels": "7"},
            {"threads": 2, "kernels": 7},
        ):
            assert CpuUse.read(junk) is None


@pytest.mark.parametrize(
    ("section", "environment", "kernels"),
    [
        ({"device": "cpu"}, {}, "7"),
        ({"device": "cpu"}, {KERNELS: "4"}, "4"),
        ({"device": "cpu"}, {KERNELS: ""}, ""),
        ({"device": "cpu", "cpu_kernels": "off"}, {}, None),
        ({"device": "gpu"}, {}, None),
    ],
)
def test_the_environment_when_paddle_is_imported(section, environment, kernels, tmp_path, monkeypatch):
    """A stand-in for Paddle notes what it finds; afterwards the user's wish is there again, for what is started from here."""
    note = "import os\nfound = {name: os.environ.get(name) for name in ('MKL_DEBUG_CPU_TYPE', 'OMP_NUM_THREADS')}\n"
    (tmp_path / "paddle.py").write_text(note)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "paddle")
    monkeypatch.setattr(cpu, "best_kernels", lambda: "7")
    monkeypatch.delenv(KERNELS, raising=False)
    for name, value in {OMP_THREADS: "6", **environment}.items():
        monkeypatch.setenv(name, value)
    cpu.import_paddle(GlobalConfig(**section))
    assert os.environ.get(KERNELS) == kernels and os.environ[OMP_THREADS] == "6"
    if section["device"] == "cpu":
        assert sys.modules["paddle"].found == {KERNELS: kernels, OMP_THREADS: "1"}  # Paddle warns of any other number
    else:
        assert "paddle" not in sys.modules
    monkeypatch.delenv(KERNELS, raising=False)


def test_a_missing_paddle_is_somebody_elses_report(monkeypatch):
    monkeypatch.delitem(sys.modules, "paddle")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    cpu.import_paddle(GlobalConfig(device="cpu"))


def test_no_paddle_is_needed_to_look():
    script = "import sys; sys.modules['paddle'] = None; from ppfleetx.distributed import cpu; print(cpu.cores() >= 1)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO)
    assert shown.stdout == "True\n", shown.stderr
