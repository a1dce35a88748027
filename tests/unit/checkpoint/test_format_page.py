"""The page on the format: its reader, which shares nothing with ours, reads what we write."""

from __future__ import annotations

import re
import tempfile
from math import prod
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.layers.spec import ParameterSpec
from tests.unit.checkpoint.cuts import cut
from tests.unit.checkpoint.test_reshard import save

PAGE = Path(__file__).resolve().parents[3] / "ppfleetx/checkpoint/README.md"
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def reader():
    """The function `read` of the page."""
    names = {}
    exec(CODE, names)
    return names["read"]


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=30)
def test_the_reader_of_the_page_reads_any_parts(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    held = data.draw(cut(ParameterSpec(name="a.weight", shape=shape)))
    values = np.arange(1, 1 + prod(shape), dtype=np.float32).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), held, values)
        assert np.array_equal(reader()(folder, "a.weight"), values)
        assert np.array_equal(reader()(folder, "a.weight", "moment1"), values + 0.5)
