"""`configs/README.md` is generated from the schema."""

from __future__ import annotations

from ppfleetx.config.coerce import key_paths
from ppfleetx.config.elsewhere import ELSEWHERE
from ppfleetx.config.reference import page
from tests.unit.config.helpers import ROOT


def test_the_page_is_not_stale():
    text = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    assert text == page(), "run: python -m ppfleetx.config.reference > configs/README.md"


def test_every_key_stands_in_it_once():
    text = page()
    for path in key_paths():
        section, _, name = path.rpartition(".")
        if section and not path.startswith(("Data.Eval.", "Data.Test.")):
            rows = text.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()
            assert len([row for row in rows if row.split(" | ")[0].strip("| *") == name]) == 1, path
    assert all(f"| {path} |" in text for path in ELSEWHERE)


def test_every_row_has_as_many_cells_as_its_head():
    width = 0
    for line in page().splitlines():
        if line.startswith("|---"):
            width = line.count("|")
        elif line.startswith("| ") and not line.startswith(("| key", "| value")):
            assert line.count("|") == width, line
