"""`tools/eval.py`: a checkpoint on Data.Eval or Data.Test, whether or not training evaluated."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from ppfleetx.data import CorpusWriter
from tests.launch import launch
from tests.training import NO_DROPOUT, REPO, Outcome, arguments, rewrite, train
from tools.eval import main as evaluate

SMALL = ("Model.num_layers=2", "Engine.max_steps=2")
LINE = re.compile(r"\[(\w+)\] step: (\d+), loss: ([\d.]+), ppl: ([\d.]+), batches: (\d+), avg_batch_cost")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Outcome:
    """2 updates; training has neither evaluation nor test data."""
    run = train(tmp_path_factory.mktemp("trained"), *SMALL, "Engine.eval_iters=0", "Data.Eval=null")
    assert run.code == 0
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """17 documents of 40 tokens; 16 and 1 of them make 20 and 1 samples of 32 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    with CorpusWriter(folder / "part", "megatron", 256) as writer:
        for document in np.random.default_rng(1).integers(1, 256, (17, 40)):
            writer.append(document)
        writer.finish(eos_id=0)
    return folder


def data(mode, folder, split, length=32):
    pairs = (f"input_dir={folder}", f"split={split}", f"max_seq_len={length}")
    return tuple(f"Data.{mode}.dataset.{pair}" for pair in pairs)


def command(run: Outcome, *overrides: str, split: str | None = None) -> list[str]:
    """Training's evaluation is off (eval_freq 0)."""
    line = arguments(run.output, *SMALL, "Engine.save_load.ckpt_dir=auto", *overrides)
    return line if split is None else [*line, "--split", split]


def results(text: str) -> list[tuple[str, int, float, int]]:
    """(kind, step, loss, batches) of each line."""
    return [(kind, int(step), float(loss), int(batches)) for kind, step, loss, _, batches in LINE.findall(text)]


def test_both_splits_of_a_run_that_did_not_evaluate(trained, corpus, capsys):
    """All documents, as Data.Eval and as Data.Test: the same 21 samples in another order, 3 batches of 8, the last padded."""
    capsys.readouterr()
    before = sorted(path.name for path in trained.output.iterdir())
    assert evaluate(command(trained, *data("Eval", corpus, "[0,1,0]"), "Engine.eval_iters=5")) == 0
    test = command(trained, *data("Test", corpus, "[0,0,1]"), "Engine.test_iters=5", split="test")
    assert evaluate(test) == 0
    first, second = results(capsys.readouterr().out)
    assert (first[0], second[0]) == ("eval", "test") and first[1] == second[1] == 2 and first[3] == second[3] == 3
    assert second[2] == pytest.approx(first[2], rel=1e-6) and 5 < first[2] < 6
    assert sorted(path.name for path in trained.output.iterdir()) == before


@pytest.mark.parametrize(("keys", "batches"), [(("Engine.test_iters=2",), 2), (("Engine.eval_iters=1",), 3), ((), 3)])
def test_batches_of_the_test_data(trained, corpus, capsys, keys, batches):
    """`test_iters`, or 10 × eval_iters (1; 4 in the file), as far as there are data: 21 samples."""
    capsys.readouterr()
    assert evaluate(command(trained, *data("Test", corpus, "[0,0,1]"), *keys, split="test")) == 0
    assert [found[3] for found in results(capsys.readouterr().out)] == [batches]


def test_zero_weights_give_perplexity_256_on_the_share_of_the_test(tmp_path, corpus, capsys):
    """The last of 17 documents: one sample."""
    run = train(tmp_path, *SMALL)
    rewrite(run.checkpoint(2), {name: np.zeros_like(weight) for name, weight in run.weights(2).items()})
    capsys.readouterr()
    assert evaluate(command(run, *data("Test", corpus, "[15,1,1]"), split="test")) == 0
    text = capsys.readouterr().out
    assert results(text) == [("test", 2, pytest.approx(math.log(256), abs=1e-6), 1)] and "ppl: 256.000" in text


def test_the_same_numbers_on_two_processes(trained, corpus, capsys):
    """Test sequences are of another length than those of Data.Train and Data.Eval, which decides what pipeline stages send."""
    common = (*NO_DROPOUT, *data("Eval", corpus, "[0,1,0]"), *data("Test", corpus, "[0,0,1]", length=16))
    lines = {split: command(trained, *common, split=split) for split in ("eval", "test")}
    capsys.readouterr()
    for line in lines.values():
        assert evaluate(line) == 0
    alone = results(capsys.readouterr().out)
    assert [found[0] for found in alone] == ["eval", "test"] and alone[0][2] != alone[1][2]
    layouts = ((), ("Distributed.mp_degree=2",), ("Distributed.pp_degree=2",))
    many = [[*line[:-2], *layout, *line[-2:]] for layout in layouts for line in lines.values()]
    done = launch([REPO / "tests/cli/eval_worker.py", json.dumps(many)], 2, cwd=REPO)
    assert done.returncode == 0 and done.orphans == 0, done.logs[0][-3000:]
    found = results(done.logs[0])
    assert found == [
        (kind, step, pytest.approx(loss, rel=1e-6), batches) for kind, step, loss, batches in alone * len(layouts)
    ]


class TestRefused:
    """A user's mistakes, each with a way out."""

    def refused(self, capsys, line: list[str]) -> str:
        capsys.readouterr()
        assert evaluate(line) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return captured.err

    @pytest.mark.parametrize(("mode", "share"), [("Eval", "[0,1,0]"), ("Test", "[0,0,1]")])
    def test_no_such_section(self, trained, capsys, mode, share):
        text = self.refused(capsys, command(trained, "Data.Eval=null", split=mode.lower()))
        assert f"Data.{mode} = None" in text and f"tools/eval.py --split {mode.lower()} evaluates these data" in text
        fix = f"-o Data.{mode}.dataset.input_dir=… Data.{mode}.dataset.max_seq_len=32 Data.{mode}.dataset.split={share}"
        assert fix in text

    def test_the_way_out_works(self, trained, corpus, capsys):
        text = self.refused(capsys, command(trained, split="test"))
        pairs = re.search(r"-o (Data.*)", text)[1].replace("…", str(corpus)).split()
        assert evaluate(command(trained, *pairs, split="test")) == 0

    @pytest.mark.parametrize(
        ("split", "keys", "key"),
        [("eval", ("Engine.eval_iters=0",), "eval_iters"), ("test", ("Engine.eval_iters=0",), "test_iters"),
         ("test", ("Engine.test_iters=0",), "test_iters")],
    )  # fmt: skip
    def test_no_batches(self, trained, corpus, capsys, split, keys, key):
        given = (*data("Eval", corpus, "[0,1,0]"), *data("Test", corpus, "[0,0,1]"), *keys)
        text = self.refused(capsys, command(trained, *given, split=split))
        assert f"Engine.{key} = 0" in text and f"-o Engine.{key}=10" in text

    def test_no_such_folder(self, trained, tmp_path, capsys):
        text = self.refused(capsys, command(trained, *data("Test", tmp_path / "gone", "[0,0,1]"), split="test"))
        assert "Data.Test.dataset.input_dir" in text and "there is no folder" in text

    def test_no_such_folder_at_the_start_of_training(self, tmp_path, capsys):
        """Not after weeks, when the test is wanted."""
        run = train(tmp_path / "run", *SMALL, *data("Test", tmp_path / "gone", "[0,0,1]"))
        assert run.code == 2 and "Data.Test.dataset.input_dir" in capsys.readouterr().err
        assert not run.output.exists()

    def test_a_share_without_documents_stops_the_test_but_not_the_training(self, tmp_path, corpus, capsys):
        empty = data("Test", corpus, "[1,1,0]")
        run = train(tmp_path, *SMALL, *empty)
        assert run.code == 0
        text = self.refused(capsys, command(run, *empty, split="test"))
        assert "Data.Test.dataset.split" in text and "Test gets no document" in text
