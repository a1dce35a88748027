"""Llama's checkpoints: every layout reads what every other wrote, weights and moments to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from ppfleetx.checkpoint.manifest import verify
from ppfleetx.config.layouts import parse_layout
from tests.resume.test_layouts import run_all
from tests.training import NO_DROPOUT, Outcome, train

LAYOUTS = {
    nproc: {name: parse_layout(name).overrides if nproc > 1 else () for name in names}
    for nproc, names in {
        1: ["one"],
        2: ["mp2", "sharding2s3", "sep2", "mp2sp"],
        4: ["mp2sharding2s3", "mp2pp2"],
    }.items()
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
#: a vocabulary of 300 is padded to 384, and under mp2 to 512; query, key and value, and gate and up, are one matrix each
RUN = (
    *NO_DROPOUT, "Model.name=Llama", "Model.num_layers=2", "Model.hidden_size=32", "Model.num_attention_heads=8",
    "Model.num_key_value_heads=2", "Model.ffn_hidden_size=44", "Model.vocab_size=300", "Engine.max_steps=2",
)  # fmt: skip
#: parameters of a block in the files: 2 norms, q, k, v, out, gate, up, down
STORED = 2 * 9 + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def written(folder) -> dict[str, Outcome]:
    """Two updates under every layout."""
    return run_all(folder, {name: {name: RUN} for name in NAMES}, LAYOUTS)


@pytest.fixture(scope="module")
def read(folder, written) -> dict[str, Outcome]:
    """What every layout restored of what every other wrote, saved at once; no further update."""
    runs: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in NAMES:
        others = [writer for writer in NAMES if writer != name]
        path = {writer: written[writer].checkpoint(2).path for writer in others}
        runs[name] = {f"{one}-to-{name}": (*RUN, f"Engine.save_load.ckpt_dir={path[one]}") for one in others}
    return run_all(folder, runs, LAYOUTS)


def test_every_layout_writes_the_same_tensors(written):
    one = written["one"].tensors(2)
    assert len(written["one"].weights(2)) == STORED and one["head.weight"].shape == (300, 32)
    assert one["blocks.1.attention.k.weight"].shape == (32, 8) and one["blocks.1.mlp.gate.weight.moment1"].any()
    for name in NAMES:
        assert verify(written[name].checkpoint(2).path) == []
        tensors = written[name].tensors(2)
        assert tensors.keys() == one.keys()
        for key, value in tensors.items():
            np.testing.assert_allclose(value, one[key], rtol=1e-3, atol=1e-6, err_msg=f"{name} {key}")


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_reads_every_other_to_the_bit(written, read, name):
    for writer in NAMES:
        if writer == name:
            continue
        right = written[writer].tensors(2)
        copy = Outcome(0, read[f"{writer}-to-{name}"].output / "previous-1").tensors(2)
        assert copy.keys() == right.keys() and len(right) >= 3 * STORED
        assert all(np.array_equal(copy[key], value) for key, value in right.items()), writer


def test_rotary_settings_may_change_and_the_ledger_says_what_that_means(written, tmp_path, capsys):
    use = (f"Engine.save_load.ckpt_dir={written['one'].checkpoint(2).path}", "Engine.save_load.weights_only=true")
    assert train(tmp_path, *RUN, *use, "Model.rope_theta=77.0").code == 0
    changed = "config changed     Model.rope_theta: 10000.0 → 77.0: the same weights compute something else"
    assert changed in capsys.readouterr().out
