"""A resumed run equals one that never stopped, to the bit; what a start does with what it finds."""

from __future__ import annotations

import json

import pytest

from ppfleetx.checkpoint.manifest import verify
from tests.training import Outcome, same_weights, train, train_on

#: dropout on, two micro-batches
RUN = ("Global.micro_batch_size=4", "Model.num_layers=2")
AUTO = "Engine.save_load.ckpt_dir=auto"


def timeless(records):
    """Records without what depends on the clock."""
    clock = {"time", "avg_batch_cost_s", "tokens_per_second", "tokens_per_second_per_device", "memory_bytes"}
    return [{key: value for key, value in record.items() if key not in clock} for record in records]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Outcome:
    """10 updates without a stop."""
    run = train(tmp_path_factory.mktemp("straight"), *RUN, "Engine.max_steps=10")
    assert run.code == 0
    return run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Outcome:
    """5 updates; copied by tests that go on from it."""
    run = train(tmp_path_factory.mktemp("stopped"), *RUN, "Engine.max_steps=5")
    assert run.code == 0
    return run


def test_c66_c67_five_and_five_equal_ten(copy, straight):
    """Loss, gradient norm, learning rate of every step and the final weights."""
    resumed = train(copy, *RUN, "Engine.max_steps=10", AUTO)
    assert resumed.code == 0
    assert timeless(resumed.records()) == timeless(straight.records())
    assert [record["step"] for record in resumed.records()] == list(range(1, 11))
    assert same_weights(resumed.weights(10), straight.weights(10))


def test_c67_five_and_five_equal_ten_on_two_processes(tmp_path):
    common = (*RUN, "Global.micro_batch_size=2")
    straight = train_on(2, tmp_path / "straight", *common, "Engine.max_steps=10")
    first = train_on(2, tmp_path / "parts", *common, "Engine.max_steps=5")
    second = train_on(2, tmp_path / "parts", *common, "Engine.max_steps=10", AUTO)
    assert [straight.code, first.code, second.code] == [0, 0, 0]
    assert timeless(second.records()) == timeless(straight.records())
    assert same_weights(second.weights(10), straight.weights(10))


@pytest.mark.parametrize("optimizer", ["Adam", "Momentum", "SGD"])
def test_every_optimizer_resumes_to_the_bit(tmp_path, optimizer):
    common = ("Model.num_layers=1", f"Optimizer.name={optimizer}")
    straight = train(tmp_path / "straight", *common, "Engine.max_steps=4")
    train(tmp_path / "parts", *common, "Engine.max_steps=2")
    resumed = train(tmp_path / "parts", *common, "Engine.max_steps=4", AUTO)
    assert resumed.losses() == straight.losses()
    assert same_weights(resumed.weights(4), straight.weights(4))


def test_evaluation_and_saving_change_nothing(tmp_path, straight):
    busy = train(
        tmp_path,
        *RUN,
        "Engine.max_steps=10",
        "Engine.eval_freq=2",
        "Engine.eval_iters=2",
        "Engine.save_load.save_steps=3",
    )
    assert timeless(busy.records()) == timeless(straight.records())
    assert same_weights(busy.weights(10), straight.weights(10))


def test_c74_saves_at_every_third_step_and_once_at_the_end(tmp_path):
    train(tmp_path, "Model.num_layers=1", "Engine.max_steps=7", "Engine.save_load.save_steps=3")
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000003", "step_00000006", "step_00000007"]


def test_last_save_is_not_made_twice(tmp_path, capsys):
    train(tmp_path, "Model.num_layers=1", "Engine.max_steps=4", "Engine.save_load.save_steps=2")
    assert capsys.readouterr().out.count("saved ") == 2


def test_resume_at_the_end_does_nothing(copy):
    before = (copy / "step_00000005/manifest.json").stat().st_mtime_ns
    assert train(copy, *RUN, "Engine.max_steps=5", AUTO).code == 0
    assert (copy / "step_00000005/manifest.json").stat().st_mtime_ns == before


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(tmp_path, capsys):
    assert train(tmp_path, "Model.num_layers=1", "Engine.max_steps=1", AUTO).code == 0
    assert "starting afresh" in capsys.readouterr().out


def test_auto_passes_over_an_incomplete_checkpoint(copy, straight):
    """A folder that a kill left without manifest, or with a cut file, is no checkpoint."""
    train(copy, *RUN, "Engine.max_steps=7", AUTO)
    shard = copy / "step_00000007/shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    resumed = train(copy, *RUN, "Engine.max_steps=10", AUTO)
    assert resumed.code == 0
    assert timeless(resumed.records()) == timeless(straight.records())


def test_fresh_start_moves_an_earlier_run_aside(copy, stopped):
    assert train(copy, *RUN, "Engine.max_steps=2").code == 0
    assert sorted(path.name for path in copy.glob("step_*")) == ["step_00000002"]
    assert same_weights(Outcome(0, copy / "previous-1").weights(5), stopped.weights(5))
    assert len(Outcome(0, copy / "previous-1").records()) == 5


def test_resume_from_an_earlier_step_moves_later_ones_aside(tmp_path):
    common = ("Model.num_layers=1", "Engine.save_load.save_steps=1")
    train(tmp_path, *common, "Engine.max_steps=4")
    again = train(tmp_path, *common, "Engine.max_steps=3", f"Engine.save_load.ckpt_dir={tmp_path / 'step_00000002'}")
    assert again.code == 0
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "previous-1").glob("step_*")) == ["step_00000003", "step_00000004"]
    assert [record["step"] for record in again.records()] == [1, 2, 3]


def test_resume_with_another_batch_size_goes_on_at_the_same_sample(copy, capsys):
    train(copy, *RUN, "Engine.max_steps=6", "Global.global_batch_size=12", "Debug.log_sample_ids=true", AUTO)
    text = capsys.readouterr().out
    assert f"ids: {list(range(40, 52))}" in text  # 5 updates of 8 were read
    assert "config changed     Global.global_batch_size: 8 → 12" in text


def test_resume_under_another_layout_keeps_weights_and_says_that_streams_are_new(copy, stopped):
    resumed = train_on(2, copy, *RUN, "Engine.max_steps=6", AUTO)
    assert resumed.code == 0
    assert "seeded anew" in resumed.launched.logs[0]
    assert [record["loss"] for record in resumed.records()][:5] == stopped.losses()
    # dropout masks differ from here on, so the loss is near the straight run's but not equal
    assert resumed.losses()[5] == pytest.approx(stopped.losses()[4], abs=0.3)


@pytest.mark.parametrize(("optimizer", "said"), [
    ("Momentum", "not restored: Momentum starts anew, the checkpoint lacks velocity"),
    ("SGD", "nothing to restore: SGD keeps nothing"),
    ("Adam", "144 tensors"),
])  # fmt: skip
def test_another_optimizer_takes_what_it_can_and_says_so(copy, capsys, optimizer, said):
    resumed = train(copy, *RUN, "Engine.max_steps=6", f"Optimizer.name={optimizer}", AUTO)
    assert resumed.code == 0 and len(resumed.losses()) == 6
    assert f"  optimizer          {said}" in capsys.readouterr().out
    kept = {"moment1", "moment2", "beta1_pow", "beta2_pow"} if optimizer == "Adam" else {"velocity"}
    assert resumed.checkpoint(6).all_slots() - {""} == (kept if optimizer != "SGD" else set())


class TestRefusals:
    """C73, C76: exit code 2, the path or the parameter named, nothing written over."""

    def refused(self, capsys, output, *overrides):
        before = sorted(path.name for path in output.iterdir())
        assert train(output, *RUN, *overrides).code == 2
        assert sorted(path.name for path in output.iterdir()) == before
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return captured.err

    def test_missing_folder(self, copy, capsys):
        text = self.refused(capsys, copy, "Engine.save_load.ckpt_dir=nowhere/step_00000009")
        assert "nowhere/step_00000009" in text and "no such folder" in text

    def test_what_another_program_wrote(self, copy, capsys, tmp_path):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf/config.json").write_text("{}")
        text = self.refused(capsys, copy, f"Engine.save_load.ckpt_dir={tmp_path / 'hf'}")
        assert "manifest.json is missing" in text and "tools/checkpoint.py converts" in text

    def test_parent_folder(self, copy, capsys):
        text = self.refused(capsys, copy, f"Engine.save_load.ckpt_dir={copy}")
        assert str(copy) in text and "step_00000005" in text

    def test_end_before_the_checkpoint(self, copy, capsys):
        text = self.refused(capsys, copy, AUTO, "Engine.max_steps=3")
        assert "Engine.max_steps = 3" in text and "step 5" in text

    def test_missing_rank_file(self, copy, capsys):
        (copy / "step_00000005/rank_00000.json").unlink()
        text = self.refused(capsys, copy, f"Engine.save_load.ckpt_dir={copy / 'step_00000005'}")
        assert "rank_00000.json is missing" in text

    @pytest.mark.parametrize(
        ("override", "named"),
        [
            ("Model.num_layers=3", ["blocks.2."]),
            ("Model.num_layers=1", ["blocks.1.", "model lacks"]),
            ("Model.hidden_size=128", ["embedding.word.weight", "[256, 64]", "[256, 128]"]),
            ("Model.vocab_size=250", ["embedding.word.weight", "[256, 64]", "[250, 64]"]),
            ("Model.num_attention_heads=8", ["Model.num_attention_heads = 8", "it is 4"]),  # all shapes are the same
        ],
    )
    def test_other_model(self, copy, capsys, override, named):
        text = self.refused(capsys, copy, override, AUTO)
        assert all(word in text for word in named), text

    def test_damaged_manifest(self, copy, capsys):
        (copy / "step_00000005/manifest.json").write_text("{")
        assert "manifest.json" in self.refused(capsys, copy, f"Engine.save_load.ckpt_dir={copy / 'step_00000005'}")

    def test_a_changed_byte(self, copy, capsys):
        shard = copy / "step_00000005/shard_00000.safetensors"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        assert [fault.split()[0] for fault in verify(shard.parent)] == [shard.name]
        text = self.refused(capsys, copy, f"Engine.save_load.ckpt_dir={shard.parent}")
        assert "shard_00000.safetensors was changed" in text


def test_c76_fused_query_key_value_converts(copy, straight, capsys):
    """Either way the same matrices, named apart: the run goes on as if nothing had changed."""
    split = train(copy, *RUN, "Engine.max_steps=7", AUTO, "Model.fuse_attn_qkv=false")
    assert "config changed     Model.fuse_attn_qkv: True → False" in capsys.readouterr().out
    again = train(copy, *RUN, "Engine.max_steps=10", AUTO)
    assert split.code == again.code == 0
    assert again.losses() == pytest.approx(straight.losses(), rel=1e-5)
    assert again.weights(10).keys() == straight.weights(10).keys()


def test_checkpoint_holds_no_pickle_and_logical_names(stopped):
    folder = stopped.output / "step_00000005"
    names = ["manifest.json", "rank_00000.json", "shard_00000.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert verify(folder) == []
    assert {"blocks.0.attention.q.weight", "blocks.0.attention.q.weight.moment1"} < stopped.tensors(5).keys()
    assert "blocks.0.attention.q.weight.moment1" not in stopped.weights(5)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["progress"]["step"] == 5 and manifest["progress"]["consumed_samples"] == 40
    assert manifest["run"]["config"]["Model"]["num_layers"] == 2
