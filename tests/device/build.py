"""Builds the pretend device from `plugin/` and Paddle's own headers, once for each Paddle, compiler and source text."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paddle

SOURCES = Path(__file__).with_name("plugin")
CACHE = Path(__file__).resolve().parents[2] / "build/pretend_device"

PADDLE = Path(paddle.__file__).parent
#: a device for Paddle's own tests, whose memory is the host's
HEADER = PADDLE / "include/paddle/phi/backends/custom/fake_cpu_device.h"
#: what a training needs otherwise in it: a kind that `Global.device` may name, and more than 1 MiB
CHANGES = {
    '#define DEVICE_TYPE "FakeCPU"': '#define DEVICE_TYPE "npu"',
    "global_total_memory = 1024 * 1024UL;": "global_total_memory = 8UL * 1024 * 1024 * 1024;",
}

COMPILE = ["-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DPADDLE_WITH_CUSTOM_DEVICE"]
LIBRARIES = ["phi_core", "phi", "common"]


class NoDevice(Exception):
    """The device cannot be built here; the text says why, in a sentence."""


def device_folder() -> Path:
    """The folder that holds the built device, for CUSTOM_DEVICE_ROOT; builds it where it is not there yet (10 s).

    Raises:
        NoDevice: there is no g++, or this Paddle carries no header to build from.
        RuntimeError: the build failed, with what g++ said.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoDevice("the pretend device is compiled by g++, which is not installed")
    if not HEADER.exists():
        raise NoDevice(f"Paddle {paddle.__version__} does not carry {HEADER.name}, which the pretend device is made of")
    header, sources = _header(), sorted(SOURCES.iterdir())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [header, paddle.version.full_version, paddle.version.commit, version, *COMPILE]
    parts += [f"{source.name}\n{source.read_text()}" for source in sources]
    folder = CACHE / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if not folder.exists():
        _build(compiler, header, [source for source in sources if source.suffix == ".cc"], folder)
    return folder


def _header() -> str:
    """Paddle's header with our changes."""
    text = HEADER.read_text()
    for old, new in CHANGES.items():
        if text.count(old) != 1:
            raise RuntimeError(f"{HEADER} has changed: {old!r} is not in it once; see {Path(__file__).name}")
        text = text.replace(old, new)
    return text


def _build(compiler: str, header: str, sources: list[Path], folder: Path) -> None:
    """Builds aside and renames, so that several processes may build at once and none sees half a library."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as aside:
        made = Path(aside, "device")
        made.mkdir()
        Path(aside, "device.h").write_text(header)
        includes = [f"-I{path}" for path in (aside, SOURCES, PADDLE / "include", PADDLE / "include/third_party")]
        objects = [f"{aside}/{source.stem}.o" for source in sources]
        compiled = [
            [compiler, *COMPILE, *includes, "-c", str(source), "-o", target]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_call, compiled))
        libraries = [f"-L{PADDLE / 'libs'}", *(f"-l:lib{name}.so" for name in LIBRARIES)]
        search = f"-Wl,-rpath,{PADDLE / 'libs'}"
        _call([compiler, "-shared", *objects, *libraries, search, "-o", str(made / "libpretend_device.so")])
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise


def _call(command: list[str]) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}")
