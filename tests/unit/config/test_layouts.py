"""Layout strings, and the table of what goes together in the guide."""

from __future__ import annotations

import pytest

from ppfleetx.config import UserError, load_config
from ppfleetx.config.layouts import parse_layout
from tests.unit.config.helpers import ROOT


@pytest.mark.parametrize(
    ("text", "world_size", "pairs"),
    [
        ("dp2", 2, {"Distributed.dp_degree=2"}),
        ("mp2pp4", 8, {"Distributed.mp_degree=2", "Distributed.pp_degree=4"}),
        ("sharding2s3", 2, {"Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3"}),
        ("mp2sp", 2, {"Distributed.mp_degree=2", "Model.sequence_parallel=true"}),
        ("pp4vpp2rc", 4, {"Model.virtual_pp_degree=2", "Model.use_recompute=true", "Distributed.pp_degree=4"}),
        ("sep2mp2", 4, {"Distributed.sep_degree=2", "Distributed.mp_degree=2"}),
        ("rc", 1, {"Model.use_recompute=true"}),
    ],
)
def test_layout_strings(text, world_size, pairs):
    layout = parse_layout(text)
    assert layout.world_size == world_size and pairs <= set(layout.overrides)
    named = {pair.partition("=")[0] for pair in pairs}
    degrees = [pair for pair in layout.overrides if "degree" in pair and pair.partition("=")[0] not in named]
    assert all(pair.endswith("=1") for pair in degrees)  # what is not named is 1, whatever the file says


@pytest.mark.parametrize("text", ["mp", "2mp", "mp2mp4", "tp2", "mp2 pp2", "sharding2s4", "dp2x"])
def test_bad_layout_strings(text):
    with pytest.raises(UserError, match="--layouts"):
        parse_layout(text)


COLUMNS = {
    "dp": "dp2", "mp": "mp2", "pp": "pp2", "pp interleaved": "pp4vpp2", "sep": "sep2", "sequence parallel": "mp2sp",
    "recompute": "rc",
}  # fmt: skip
ROWS = {"no sharding": "", **{f"sharding stage {stage}": f"sharding2s{stage}" for stage in (1, 2, 3)}}


def accepted(layout):
    overrides = ["Model.num_layers=8", "Global.global_batch_size=16", "Global.micro_batch_size=1", *layout.overrides]
    try:
        load_config([str(ROOT / "configs/debug/tiny_gpt.yaml")], overrides, layout.world_size)
    except UserError:
        return False
    return True


def test_the_guides_table_says_what_is_accepted():
    text = (ROOT / "projects/gpt/README.md").read_text(encoding="utf-8")
    lines = text.partition("## What goes together")[2].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head, rows = cells[0][1:], {row[0]: row[1:] for row in cells[2:]}
    assert head == list(COLUMNS) and list(rows) == list(ROWS)
    for name, row in rows.items():
        for column, said in zip(head, row, strict=True):
            assert (said == "yes") == accepted(parse_layout(ROWS[name] + COLUMNS[column])), (name, column)
