"""The pretend device itself: its operators, its build, and what is said where there is no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.device import build
from tests.device.precisions import ROUNDOFF
from tests.device.run import environment
from tests.training import REPO


@pytest.fixture(scope="module")
def computed():
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.device.operators"],
        env=os.environ | quiet | environment(), cwd=REPO, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def distances(computed):
    return computed["distances"]


def test_attention_takes_the_fused_softmax_where_it_fits(computed):
    """In blocks 0 and 5; not below 32, and not for lengths that no block of 8 rows divides."""
    assert computed["fused"] == [32, 40, 32, 40]


class TestOperators:
    def test_float32_is_the_cpus(self, distances):
        assert {name: far for name, far in distances.items() if name.startswith("float32") and far > 1e-6} == {}

    @pytest.mark.parametrize("dtype", ROUNDOFF)
    def test_half_is_float32_rounded(self, distances, dtype):
        """A result is rounded once, its gradient twice (as the weighted result, and as the gradient), and up to twice more
        where an operator is two: 4 roundoffs."""
        found = {name: far for name, far in distances.items() if name.startswith(f"{dtype} ")}
        assert len(found) > 25 and max(found.values()) > 0
        assert {name: far for name, far in found.items() if far > 4 * ROUNDOFF[dtype]} == {}


class TestBuild:
    def test_it_is_built_once(self, device):
        before = (device / "libpretend_device.so").stat().st_mtime_ns
        assert build.device_folder() == device
        assert (device / "libpretend_device.so").stat().st_mtime_ns == before

    def test_another_process_may_be_first(self, device, monkeypatch, tmp_path):
        """Both compile; the one that comes second takes the first one's, and leaves nothing behind."""
        folder = tmp_path / "cache/device"

        def compile_(command):
            folder.mkdir(exist_ok=True)  # the other process, meanwhile
            (folder / "libpretend_device.so").touch()

        monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
        monkeypatch.setattr(build, "_call", compile_)
        build._build("g++", "", [build.SOURCES / "device.cc"], folder)
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["device"]

    def test_without_a_compiler_it_says_so(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(build.NoDevice, match=r"compiled by g\+\+, which is not installed"):
            build.device_folder()

    def test_a_changed_header_is_told(self, monkeypatch, tmp_path):
        (tmp_path / "fake_cpu_device.h").write_text("// another one")
        monkeypatch.setattr(build, "HEADER", tmp_path / "fake_cpu_device.h")
        with pytest.raises(RuntimeError, match="has changed"):
            build.device_folder()
