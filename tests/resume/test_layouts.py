"""A checkpoint knows no layout: what one layout wrote another reads, bit by bit, and goes on with the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.manifest import verify
from ppfleetx.engine import Engine
from tests.resume.worker import save_and_fit
from tests.training import NO_DROPOUT, Outcome, same_weights, train, train_many_on


def degrees(**axes: int) -> tuple[str, ...]:
    return tuple(f"Distributed.{axis}_degree={degree}" for axis, degree in axes.items())


def sharding(stage: int) -> tuple[str, ...]:
    keys = ("sharding_degree=2", f"sharding_stage={stage}")
    return tuple(f"Distributed.sharding.{key}" for key in keys)


LAYOUTS = {
    1: {"one": ()},
    2: {
        "dp2": (),
        "mp2": degrees(mp=2),
        "pp2": degrees(pp=2),
        "sep2": degrees(sep=2),
        "sharding2s1": sharding(1),
        "sharding2s2": (*sharding(2), "Distributed.sharding.sharding_offload=true"),
        "sharding2s3": sharding(3),
    },
    4: {
        "dp2mp2": degrees(mp=2),
        "mp2pp2": degrees(mp=2, pp=2),
        "mp2sharding2s3": (*degrees(mp=2), *sharding(3)),
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
#: a vocabulary of 300 is padded to 384, and under mp2 to 512
RUN = ("Model.num_layers=2", "Model.vocab_size=300", "Engine.save_load.save_steps=3")
DROPOUT, PLAIN = RUN, (*RUN, *NO_DROPOUT)


def run_all(folder: Path, runs: dict[str, dict[str, tuple[str, ...]]]) -> dict[str, Outcome]:
    """Runs by layout and name, in one set of processes for each number of them."""
    outcomes: dict[str, Outcome] = {}
    for nproc, layouts in LAYOUTS.items():
        own = {name: (*layout, *more) for key, layout in layouts.items() for name, more in runs[key].items()}
        if nproc == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Engine, "fit", save_and_fit)
                outcomes |= {name: train(folder / name, *overrides) for name, overrides in own.items()}
        else:
            outcomes |= train_many_on(nproc, own, folder, worker="tests/resume/worker.py")
        last = outcomes[next(iter(own))]
        assert last.code == 0, last.launched and last.launched.logs[0][-3000:]
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def written(folder) -> dict[str, Outcome]:
    """Under every layout 4 updates, saved after 3 and 4; and with dropout 6, and 3 of 6."""
    return run_all(
        folder,
        {
            name: {
                name: (*PLAIN, "Engine.max_steps=4"),
                f"{name}-straight": (*DROPOUT, "Engine.max_steps=6"),
                f"{name}-parts": (*DROPOUT, "Engine.max_steps=3"),
            }
            for name in NAMES
        },
    )


def writers_of(name: str) -> list[str]:
    """Every layout reads what two others wrote: those some places before it in the list."""
    return [NAMES[NAMES.index(name) - distance] for distance in (1, 4)]


@pytest.fixture(scope="module")
def resumed(folder, written) -> dict[str, Outcome]:
    """Step 4 under every layout from step 3 of others; and the other half of the 6 with dropout."""
    runs = {}
    for name in NAMES:
        runs[name] = {f"{name}-parts": (*DROPOUT, "Engine.max_steps=6", "Engine.save_load.ckpt_dir=auto")}
        for writer in writers_of(name):
            path = written[writer].checkpoint(3).path
            runs[name][f"{writer}-to-{name}"] = (*PLAIN, "Engine.max_steps=4", f"Engine.save_load.ckpt_dir={path}")
    return run_all(folder, runs)


def test_every_layout_writes_the_same_tensors_whole_and_once(written):
    one = written["one"].tensors(3)
    assert one["embedding.word.weight"].shape == (300, 64)
    for name in NAMES:
        assert verify(written[name].checkpoint(3).path) == []
        tensors = written[name].tensors(3)
        assert {key: value.shape for key, value in tensors.items()} == {key: value.shape for key, value in one.items()}
        for key, value in tensors.items():
            np.testing.assert_allclose(value, one[key], rtol=1e-4, atol=1e-6, err_msg=f"{name} {key}")


def test_work_is_shared(written):
    """Ranks that hold different parts write them; copies write nothing."""
    files = {name: len({entry.file for entry in written[name].checkpoint(3).manifest.entries}) for name in NAMES}
    expected = {"one": 1, "dp2": 1, "sep2": 1, "mp2pp2": 4, "mp2sharding2s3": 4}
    assert files == {name: expected.get(name, 2) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_c70_any_layout_reads_any(written, resumed, name):
    """Weights, moments and scalars to the bit; the next step's loss and gradient norm are those of one process."""
    expected = written["one"].records()[3]
    for writer in writers_of(name):
        outcome = resumed[f"{writer}-to-{name}"]
        copy = Outcome(0, outcome.output / "previous-1")
        assert same_weights(copy.tensors(3), written[writer].tensors(3)), writer
        found = outcome.records()[-1]
        assert found["step"] == 4
        assert [found["loss"], found["grad_norm"]] == pytest.approx([expected["loss"], expected["grad_norm"]], rel=1e-5)
        if outcome.launched is not None:
            assert f"layout {layout_name(writer)} → {layout_name(name)}" in outcome.launched.logs[0]


def layout_name(name: str) -> str:
    return {"one": "one process", "mp2sharding2s3": "sharding2s3mp2", "mp2pp2": "pp2mp2"}.get(name, name)


@pytest.mark.parametrize("name", NAMES)
def test_c67_the_same_layout_goes_on_to_the_bit(written, resumed, name):
    """Dropout on, several micro-batches; three updates and three equal six."""
    straight, parts = written[f"{name}-straight"], resumed[f"{name}-parts"]
    assert len(straight.losses()) == 6
    assert parts.losses() == straight.losses()
    assert same_weights(parts.tensors(6), straight.tensors(6))
