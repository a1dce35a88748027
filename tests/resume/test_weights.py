"""What else a checkpoint can be for: the weights alone, a model that differs in some parameters, the same data."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.training import Outcome, same_weights, train

RUN = ("Model.num_layers=2", "Engine.max_steps=3")
AUTO = "Engine.save_load.ckpt_dir=auto"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Outcome:
    """3 updates."""
    run = train(tmp_path_factory.mktemp("source"), *RUN)
    assert run.code == 0
    return run


def of(source: Outcome) -> str:
    return f"Engine.save_load.ckpt_dir={source.output / 'step_00000003'}"


class TestWeightsOnly:
    def test_starts_a_new_run_from_them(self, source, tmp_path, capsys):
        """A rate of 0 and no decay leave the weights as they were loaded; everything else is as in a new run."""
        still = ("Optimizer.lr.max_lr=0", "Optimizer.lr.min_lr=0", "Optimizer.weight_decay=0")
        run = train(
            tmp_path, *RUN, *still, of(source), "Engine.save_load.weights_only=true", "Debug.log_sample_ids=true"
        )
        text = capsys.readouterr().out
        assert run.code == 0 and same_weights(run.weights(3), source.weights(3))
        assert [record["step"] for record in run.records()] == [1, 2, 3]
        assert f"ids: {list(range(8))}" in text and f"new run with the weights of {source.output}" in text
        assert "optimizer          not restored" in text and "step               0" in text
        assert run.tensors(3)["norm.weight.beta1_pow"] == pytest.approx(0.9**4)  # Paddle holds the next update's

    def test_in_the_folder_it_came_from_moves_the_earlier_run_aside(self, source, tmp_path):
        folder = shutil.copytree(source.output, tmp_path / "run")
        ckpt_dir = f"Engine.save_load.ckpt_dir={folder / 'step_00000003'}"
        run = train(folder, "Model.num_layers=2", "Engine.max_steps=1", ckpt_dir, "Engine.save_load.weights_only=true")
        assert run.code == 0 and len(run.records()) == 1
        assert same_weights(Outcome(0, folder / "previous-1").tensors(3), source.tensors(3))

    @pytest.mark.parametrize("ckpt_dir", ["auto", "null"])
    def test_needs_a_path(self, tmp_path, capsys, ckpt_dir):
        code = train(tmp_path, *RUN, f"Engine.save_load.ckpt_dir={ckpt_dir}", "Engine.save_load.weights_only=true").code
        assert code == 2 and "Engine.save_load.weights_only" in capsys.readouterr().err


class TestNotStrict:
    LOOSE = "Engine.save_load.strict=false"

    def test_a_parameter_that_it_lacks_stays_as_initialised(self, source, tmp_path, capsys):
        still = ("Optimizer.lr.max_lr=0", "Optimizer.lr.min_lr=0", "Optimizer.weight_decay=0")
        fresh = train(tmp_path / "fresh", "Model.num_layers=3", "Engine.max_steps=1", *still)
        capsys.readouterr()
        run = train(tmp_path / "run", "Model.num_layers=3", "Engine.max_steps=4", *still, of(source), self.LOOSE)
        assert run.code == 0 and [record["step"] for record in run.records()] == [4]
        old, new = source.weights(3), fresh.weights(1)
        for name, value in run.weights(4).items():
            assert np.array_equal(value, old[name] if name in old else new[name]), name
        text = capsys.readouterr().out
        assert "; 16 as initialised, blocks.2.attention.k.bias first" in text, text

    def test_a_parameter_that_the_model_lacks_is_not_used(self, source, tmp_path, capsys):
        run = train(tmp_path, "Model.num_layers=1", "Engine.max_steps=4", of(source), self.LOOSE)
        assert run.code == 0 and "; 16 not used, blocks.1.attention.k.bias first" in capsys.readouterr().out

    def test_a_shape_still_has_to_fit(self, source, tmp_path, capsys):
        code = train(tmp_path, *RUN, "Model.hidden_size=128", of(source), self.LOOSE).code
        assert code == 2 and "[256, 64]" in (text := capsys.readouterr().err) and "[256, 128]" in text


class TestNextSamples:
    """The ledger's hash of which samples come next."""

    def line(self, text: str) -> str:
        return next(line for line in text.splitlines() if line.startswith("  next samples"))

    def test_the_same_data(self, source, tmp_path, capsys):
        folder = shutil.copytree(source.output, tmp_path / "run")
        train(folder, "Model.num_layers=2", "Engine.max_steps=4", AUTO)
        assert self.line(capsys.readouterr().out).endswith(", as saved")

    @pytest.mark.parametrize("override", ["Global.seed=7", "Data.Train.dataset.split=[900,90,10]"])
    def test_other_data_or_another_order_are_said(self, source, tmp_path, capsys, override):
        folder = shutil.copytree(source.output, tmp_path / "run")
        train(folder, "Model.num_layers=2", "Engine.max_steps=4", AUTO, override)
        assert self.line(capsys.readouterr().out).endswith(": the data or their order changed")


def test_keys_that_need_each_other(tmp_path, capsys):
    assert train(tmp_path, *RUN, "Engine.save_load.keep_every=2").code == 2
    assert "Engine.save_load.keep_every" in (text := capsys.readouterr().err) and "keep_last" in text


def test_c75_keep_last(tmp_path):
    for keep, left in (("2", [5, 6]), ("null", [1, 2, 3, 4, 5, 6])):
        keys = ("Engine.save_load.save_steps=1", f"Engine.save_load.keep_last={keep}")
        run = train(tmp_path / keep, "Model.num_layers=1", "Engine.max_steps=6", *keys)
        assert run.code == 0 and sorted(int(path.name[5:]) for path in run.output.glob("step_*")) == left


def test_saving_at_once_gives_the_same_checkpoint(source, tmp_path):
    run = train(tmp_path, *RUN, "Engine.save_load.async_save=false", "Engine.save_load.save_steps=1")
    assert same_weights(run.tensors(3), source.tensors(3))
