"""What the guide of Llama says of shapes is what the model has."""

from __future__ import annotations

import math
import re

import pytest

from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.config import load_config
from ppfleetx.models import registry
from tests.unit.models.test_gpt import ROOT

GUIDE = (ROOT / "projects/llama/README.md").read_text(encoding="utf-8")
RECIPES = ROOT / "configs/nlp/llama"


def rows(heading):
    """The cells of the table under a heading, without its head."""
    lines = GUIDE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


@pytest.fixture(scope="module")
def specs():
    config = load_config([str(RECIPES / "pretrain_llama3_8B_mp4_sharding2.yaml")], [], 8).config
    return registry.parameters(config)


def test_what_mp_cuts(specs):
    dims = {}
    for spec in specs.values():
        for name, shape in stored_shapes(spec).items():
            dims[name.removesuffix(".weight").removeprefix("blocks.0.")] = (shape, spec.mp_dim)
    table = {cells[1].strip("`"): cells[2:5] for cells in rows("What mp cuts")}
    assert table.keys() == {name for name in dims if not name.startswith("blocks.")} - {"norm2"}
    for name, (whole, of_4, cut_by) in table.items():
        shape, dim = dims[name]
        local = [length // 4 if number == dim else length for number, length in enumerate(shape)]
        assert (whole, of_4) == (str(list(shape)), str(local)), name
        assert cut_by == {None: "–", 0: "rows", 1: "columns"}[dim], name


def test_what_stage_3_cuts(specs):
    table = {cells[0].strip("`"): cells[1:] for cells in rows("What stage 3 cuts")}
    assert list(table) == ["embedding", "blocks.0", "head"]
    for unit, (whole, part) in table.items():
        inside = [one for name, one in specs.items() if name.startswith(f"{unit}.")]
        inside += [specs["norm.weight"]] if unit == "head" else []
        local = sum(math.prod(stop - start for start, stop in one.box(0, 4)) for one in inside)
        assert (whole, part) == (f"{sum(one.size for one in inside):,}", f"{local // 2:,}"), unit


def test_every_recipe_has_a_script_and_a_row():
    recipes = {path.stem for path in RECIPES.glob("pretrain_llama3_*.yaml")} - {"pretrain_llama3_base"}
    assert recipes == {path.stem for path in (ROOT / "projects/llama").glob("*.sh")}
    assert recipes == set(re.findall(r"^\| (pretrain_\w+) \|", GUIDE, re.MULTILINE))
    for recipe in recipes:
        script = (ROOT / f"projects/llama/{recipe}.sh").read_text()
        assert f"launch ./configs/nlp/llama/{recipe}.yaml 8 " in script
