"""A checkpoint knows no layout: what one layout wrote another reads, bit by bit, and goes on with the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from ppfleetx.checkpoint.manifest import verify
from ppfleetx.data import CorpusWriter
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


def run_all(
    folder: Path,
    runs: dict[str, dict[str, tuple[str, ...]]],
    all_layouts: dict[int, dict[str, tuple[str, ...]]] = LAYOUTS,
) -> dict[str, Outcome]:
    """Runs by layout and name, in one set of processes for each number of them."""
    outcomes: dict[str, Outcome] = {}
    for nproc, layouts in all_layouts.items():
        own = {name: (*layout, *more) for key, layout in layouts.items() for name, more in runs[key].items()}
        if nproc == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Engine, "fit", save_and_fit)
                outcomes |= {name: train(folder / name, *overrides) for name, overrides in own.items()}
        else:
            outcomes |= train_many_on(nproc, own, folder, timeout=1200, worker="tests/resume/worker.py")
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


@pytest.fixture(scope="module")
def writers(request) -> dict[str, list[str]]:
    """Every layout reads what two others wrote, those some places before it in the list; with --full what each wrote."""
    distances = range(len(NAMES)) if request.config.getoption("--full") else (1, 4)
    return {name: [NAMES[number - distance] for distance in distances] for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def resumed(folder, written, writers) -> dict[str, Outcome]:
    """Step 4 under every layout from step 3 of others; and the other half of the 6 with dropout."""
    runs = {}
    for name in NAMES:
        runs[name] = {f"{name}-parts": (*DROPOUT, "Engine.max_steps=6", "Engine.save_load.ckpt_dir=auto")}
        for writer in writers[name]:
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
    """Every rank writes about its share, whether it holds a part of its own or a copy: at most one tensor more."""
    for nproc, layouts in LAYOUTS.items():
        for name in layouts:
            sizes = dict.fromkeys(range(nproc), 0)
            entries = written[name].checkpoint(3).manifest.entries
            for entry in entries:
                sizes[int(entry.file[6:11])] += entry.region.size
            largest = 3 * max(entry.region.size for entry in entries)  # with its two moments
            if "pp" not in name:  # stages are not equal
                assert max(sizes.values()) <= sum(sizes.values()) / nproc + largest, (name, sizes)
            assert min(sizes.values()) > sum(sizes.values()) / nproc / 3, (name, sizes)


@pytest.mark.parametrize("name", NAMES)
def test_c70_any_layout_reads_any(written, resumed, writers, name):
    """Weights, moments and scalars to the bit; the next step's loss and gradient norm are those of one process."""
    expected = written["one"].records()[3]
    for writer in writers[name]:
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


def test_c67_the_interleaved_schedule_goes_on_to_the_bit_and_is_read_by_others(tmp_path):
    """pp4 with two chunks a stage, eight blocks."""
    layout = (*degrees(pp=4), "Model.virtual_pp_degree=2")
    eight = (*DROPOUT, "Model.num_layers=8", "Global.micro_batch_size=2")
    auto = "Engine.save_load.ckpt_dir=auto"
    runs = {"straight": (*eight, *layout, "Engine.max_steps=6"), "parts": (*eight, *layout, "Engine.max_steps=3")}
    written = train_many_on(4, runs, tmp_path)
    resumed = train_many_on(4, {"parts": (*eight, *layout, "Engine.max_steps=6", auto)}, tmp_path)
    assert resumed["parts"].code == 0 and resumed["parts"].losses() == written["straight"].losses()
    assert same_weights(resumed["parts"].tensors(6), written["straight"].tensors(6))
    path = written["straight"].checkpoint(3).path
    alone = (*eight, *NO_DROPOUT, "Engine.max_steps=4", f"Engine.save_load.ckpt_dir={path}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "fit", save_and_fit)
        one = train(tmp_path / "one", *alone)
    assert one.code == 0
    copy = Outcome(0, one.output / "previous-1")
    assert same_weights(copy.tensors(3), written["straight"].tensors(3))


def test_c109_one_file_instead_of_one_a_rank(tmp_path):
    """mp2·pp2 saves one plain file; it holds what shards hold, is read by the safetensors package, and is gone on with."""
    layout = degrees(mp=2, pp=2)
    keys = (*RUN, *NO_DROPOUT, *layout, "Engine.max_steps=3")
    runs = {"shards": keys, "one": (*keys, "Engine.save_load.consolidate=true")}
    saved = train_many_on(4, runs, tmp_path)
    path = saved["one"].checkpoint(3).path
    assert verify(path) == []
    assert {entry.name for entry in path.iterdir()} == {
        "manifest.json", "model.safetensors", *(f"rank_{rank:05d}.json" for rank in range(4)),
    }  # fmt: skip
    tensors = saved["shards"].tensors(3)
    assert same_weights(saved["one"].tensors(3), tensors)
    assert same_weights(load_file(path / "model.safetensors"), tensors)
    resumed = train(tmp_path / "alone", *RUN, *NO_DROPOUT, "Engine.max_steps=4", f"Engine.save_load.ckpt_dir={path}")
    sharded = train(tmp_path / "same", *RUN, *NO_DROPOUT, "Engine.max_steps=4",
                    f"Engine.save_load.ckpt_dir={saved['shards'].checkpoint(3).path}")  # fmt: skip
    assert resumed.code == 0 and same_weights(resumed.tensors(4), sharded.tensors(4))


def test_vocabulary_of_100_padded_to_128_to_512_and_back(tmp_path):
    """One process, then mp4, then one process: bit by bit, whatever stood in the padding."""
    with CorpusWriter(tmp_path / "small", "megatron", 100) as writer:
        for document in np.random.default_rng(0).integers(0, 100, (100, 50)):
            writer.append(document)
        writer.finish()
    common = ("Model.num_layers=1", "Model.vocab_size=100", f"Data.Train.dataset.input_dir={tmp_path / 'small'}")
    first = train(tmp_path / "first", *common, "Engine.max_steps=2")
    copies, path = [], first.checkpoint(2).path
    for nproc in (4, 1):
        name = f"on{nproc}"
        run = (*common, *degrees(mp=nproc), "Engine.max_steps=3", f"Engine.save_load.ckpt_dir={path}")
        if nproc == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Engine, "fit", save_and_fit)
                outcome = train(tmp_path / name, *run)
        else:
            outcome = train_many_on(nproc, {name: run}, tmp_path, worker="tests/resume/worker.py")[name]
        assert outcome.code == 0
        padded = yaml.safe_load((outcome.output / "config.yaml").read_text())["_derived"]["padded_vocab_size"]
        assert padded == 128 * nproc
        copies.append(Outcome(0, outcome.output / "previous-1"))
        path = copies[-1].checkpoint(2).path
    assert first.tensors(2)["embedding.word.weight"].shape == (100, 64)
    assert all(same_weights(copy.tensors(2), first.tensors(2)) for copy in copies)
