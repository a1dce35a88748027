"""Tensor × fully sharded: what each rank reads, what it is given to compare, and what moves."""

from __future__ import annotations

import json
import re

import pytest

from ppfleetx.config.layouts import parse_layout
from tests.training import train_many_on

STEPS, BLOCKS, MICRO_BATCHES = 3, 3, 2
SEQUENCE, MICRO, HIDDEN, VOCABULARY = 32, 2, 32, 4096
SMALL = (
    "Model.name=Llama", "Model.num_attention_heads=8", "Model.num_key_value_heads=2", "Model.ffn_hidden_size=44",
    f"Model.hidden_size={HIDDEN}", f"Model.num_layers={BLOCKS}", f"Model.vocab_size={VOCABULARY}",
    f"Engine.max_steps={STEPS}", "Global.global_batch_size=8", f"Global.micro_batch_size={MICRO}",
    "Debug.log_sample_ids=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What each of 4 ranks printed in a run, by run."""
    runs = {layout: (*SMALL, *parse_layout(layout).overrides) for layout in ("mp2sharding2s3", "mp2sharding2s3sp")}
    worker = "tests/parity/llama_worker.py"
    launched = train_many_on(4, runs, tmp_path_factory.mktemp("two"), worker=worker)["mp2sharding2s3"].launched
    assert launched.returncode == 0, launched.logs[0][-2000:]
    printed = [re.split(r"SEEN (.*)\n", log) for log in launched.logs]
    return {name: [(one[2 * i], json.loads(one[2 * i + 1])) for one in printed] for i, name in enumerate(runs)}


def test_a_tensor_group_reads_the_same_samples_and_data_ranks_read_others(logs):
    read = []
    for text, _ in logs["mp2sharding2s3"]:
        found = re.findall(r"\[sample_ids\] step: (\d+), rank: \d+, ids: \[([\d, ]*)\]", text)
        read.append({int(step): [int(one) for one in ids.split(", ")] for step, ids in found})
    first, second = read[0], read[2]
    assert read == [first, first, second, second]  # ranks 0 and 1 are one tensor group, 2 and 3 the other
    for step in range(1, STEPS + 1):
        start = 8 * (step - 1)
        assert first[step] == list(range(start, start + 4)) and second[step] == list(range(start + 4, start + 8))


@pytest.mark.parametrize("name", ["mp2sharding2s3", "mp2sharding2s3sp"])
def test_the_logits_of_a_micro_batch_are_never_whole(logs, name):
    """The loss sees a rank's half of the vocabulary, and nothing as large as even that half ever travels."""
    half = SEQUENCE * MICRO * VOCABULARY // 2
    for _, seen in logs[name]:
        assert seen["logits"] == [[SEQUENCE, MICRO, VOCABULARY // 2]]
        sizes = [int(size) for counts in seen["collectives"].values() for size in counts]
        assert HIDDEN * VOCABULARY // 2 <= max(sizes) < half  # the largest is the embedding's gather


def test_a_gather_and_a_reduction_a_block(logs):
    """Units: the embedding, the blocks, the head with the last norm. Forward gathers each; backward gathers all again but the
    head and the last block, which are still there; each is reduced once, in every micro-batch."""
    units = BLOCKS + 2
    for _, seen in logs["mp2sharding2s3"]:
        calls = {name: sum(seen["collectives"][name].values()) for name in ("all_gather", "reduce_scatter")}
        expected = {"all_gather": units + units - 2, "reduce_scatter": units}
        assert calls == {name: STEPS * MICRO_BATCHES * count for name, count in expected.items()}
