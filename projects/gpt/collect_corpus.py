"""Gathers text that every Python machine has: the sources of the standard library, one JSON line a file.

    python projects/gpt/collect_corpus.py --output output/quickstart/corpus.jsonl

The same Python version gives the same file. Tests, generated tables, bundled tools and installed packages are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tokenize
from pathlib import Path

#: folders that hold tests, tables, bundled programs, or packages that are not the standard library's
LEFT_OUT = {
    "__pycache__", "distutils", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "lib-dynload",
    "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip


def sources(root: Path) -> list[Path]:
    """The source files below `root`, as sorted relative paths."""
    found = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file() and not path.is_symlink())
    return sorted(
        path
        for path in found
        if not LEFT_OUT.intersection(path.parts)
        and not path.name.startswith("_sysconfigdata")  # differs between machines
    )


def collect(root: Path, output: Path) -> tuple[int, int]:
    """Writes `output` and gives (files, characters). It appears whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    num_files = num_characters = 0
    with open(aside, "w", encoding="utf-8") as lines:
        for path in sources(root):
            with tokenize.open(root / path) as source:  # obeys the file's own coding line
                text = source.read()
            if text.strip():
                lines.write(json.dumps({"path": path.as_posix(), "text": text}, ensure_ascii=False) + "\n")
                num_files, num_characters = num_files + 1, num_characters + len(text)
    os.replace(aside, output)
    return num_files, num_characters


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSON lines file; replaced")
    output = parser.parse_args().output
    root = Path(sysconfig.get_paths()["stdlib"])
    num_files, num_characters = collect(root, output)
    if num_characters < 1_000_000:
        print(f"error: {root} holds {num_files} source files: too few to train on", file=sys.stderr)
        return 2
    print(f"wrote {output}: {num_files} files, {num_characters / 1e6:.1f} million characters of {root}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
