"""Which samples each rank of a layout reads."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from ppfleetx.config import UserError, load_config
from ppfleetx.data import CorpusWriter
from ppfleetx.distributed import Topology
from ppfleetx.engine.data import open_data

ROOT = Path(__file__).resolve().parents[3]
DATA = [f"Data.{mode}.dataset.input_dir={ROOT / 'configs/debug/data'}" for mode in ("Train", "Eval")]


@pytest.mark.parametrize("order", [("dp", "pp", "sharding", "mp", "sep"), ("sharding", "mp", "dp", "pp", "sep")])
def test_c12_ranks_of_a_model_group_read_the_same_and_data_ranks_different_samples(order):
    """World 8 as mp 2 · pp 2 · sharding 2, local batch 8, micro-batch 2: dp 1, global batch 16, 4 micro-batches, 2 streams."""
    degrees = {"mp_degree": 2, "pp_degree": 2, "sharding_degree": 2}
    overrides = [
        "Distributed.mp_degree=2", "Distributed.pp_degree=2", "Distributed.sharding.sharding_degree=2",
        "Global.global_batch_size=null", "Global.local_batch_size=8", "Global.micro_batch_size=2", *DATA,
    ]  # fmt: skip
    config = load_config([str(ROOT / "configs/debug/tiny_gpt.yaml")], overrides, 8).config
    derived = config.derived
    assert (derived.dp_degree, derived.global_batch_size, derived.accumulate_steps) == (1, 16, 4)

    read = {}
    for rank in range(8):
        topology = Topology(rank, 8, **degrees, order=order)
        batch = next(iter(open_data(config, topology).train_batches(consumed=32)))
        read.setdefault(topology.sharding_info.rank, set()).add(tuple(batch.sample_ids))
    assert read == {0: {tuple(range(32, 40))}, 1: {tuple(range(40, 48))}}


def test_evaluation_reads_the_same_samples_whatever_the_layout():
    overrides = [*DATA, "Engine.eval_freq=1", "Engine.eval_iters=2"]
    seen = []
    for world in (1, 2, 4):
        config = load_config([str(ROOT / "configs/debug/tiny_gpt.yaml")], overrides, world).config
        batches = [list(open_data(config, Topology(rank, world)).evaluation_batches()) for rank in range(world)]
        seen.append([[one for rank in batches for one in rank[step].sample_ids.tolist()] for step in range(2)])
    assert seen == [[list(range(8)), list(range(8, 16))]] * 3


def test_recipes_of_an_installation_find_their_data_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["./ppfleetx/configs/debug/tiny_gpt.yaml"]).config
    assert open_data(config, Topology(0, 1)).train.num_samples() > 1000


def test_the_start_says_what_is_read_and_whether_a_shuffle_would_help(tmp_path, caplog):
    """24 documents of 40 tokens, split 2 : 1 : 1. The hint is for the last documents of a corpus in the order of its input."""
    corpora = (("plain", None), ("shuffled", 7), ("other", None))
    for name, seed in corpora:
        with CorpusWriter(tmp_path / name, "megatron", 256) as writer:
            for _ in range(24):
                writer.append([5] * 40)
            writer.finish(0, name, "one", shuffle_seed=seed)
    old = json.loads((tmp_path / "other_meta.json").read_text())
    del old["shuffle_seed"]
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"other{suffix}", tmp_path / f"old{suffix}")
    (tmp_path / "old_meta.json").write_text(json.dumps(old))

    def told(train, evaluation, split="[2,1,1]"):
        overrides = [
            f"Data.Train.dataset.input_dir={tmp_path / train}", f"Data.Eval.dataset.input_dir={tmp_path / evaluation}",
            *(f"Data.{mode}.dataset.split={split}" for mode in ("Train", "Eval")),
            "Engine.eval_freq=1", "Engine.eval_iters=1",
        ]  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.INFO, "ppfleetx"):
            open_data(load_config([str(ROOT / "configs/debug/tiny_gpt.yaml")], overrides).config, Topology(0, 1))
        return [record.getMessage() for record in caplog.records if " reads " in record.getMessage()]

    hint = (
        "; these are the last in the order of the input and may be unlike the others:"
        " tools/preprocess_data.py --shuffle SEED mixes them"
    )
    ends = {"plain": hint, "shuffled": "", "old": ""}
    for name, end in ends.items():
        assert told(name, name) == [
            f"training reads documents 1 to 12 of 24 (480 tokens) in {tmp_path / name}",
            f"evaluation reads documents 13 to 18 of 24 (240 tokens) in {tmp_path / name}{end}",
        ]
    assert (
        told("plain", "other")[1] == f"evaluation reads documents 13 to 18 of 24 (240 tokens) in {tmp_path / 'other'}"
    )


@pytest.mark.parametrize("mode", ["Eval", "Test"])
def test_training_and_other_data_of_two_tokenizers_are_refused(tmp_path, mode):
    """Test data too at the start of training, which does not read them."""
    for name, made_by in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "")):
        with CorpusWriter(tmp_path / name, "megatron", 256) as writer:
            for _ in range(6):
                writer.append([5] * 40)
            writer.finish(0, name, made_by)

    def opened(evaluation):
        overrides = [
            f"Data.Train.dataset.input_dir={tmp_path / 'a'}",
            f"Data.{mode}.dataset.input_dir={tmp_path / evaluation}",
            f"Data.{mode}.dataset.max_seq_len=32",
        ]
        splits = [f"Data.{mode}.dataset.split=[1,1,1]" for mode in ("Train", "Eval")]
        overrides += [*splits, "Engine.eval_freq=1", f"Engine.eval_iters={int(mode == 'Eval')}"]
        return open_data(load_config([str(ROOT / "configs/debug/tiny_gpt.yaml")], overrides).config, Topology(0, 1))

    with pytest.raises(UserError, match="must come from the tokenizer of the training data") as caught:
        opened("b")
    assert caught.value.problems[0].key == f"Data.{mode}.dataset.input_dir"
    for known in "cd":
        assert (opened(known).evaluation is not None) is (mode == "Eval")
