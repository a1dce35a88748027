"""Sharding, stages 1, 2 and 3, alone and with every other axis: the numbers of one process (design: tolerances of part 4).

One launch of 2 processes and one of 4; each rank notes what it saw (sharding_worker.py). No checkpoints are involved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import launch
from tests.parity.sharding_worker import assemble, run
from tests.training import NO_DROPOUT, REPO

BLOCKS, MICRO_BATCHES = 2, 2
SMALL = (f"Model.num_layers={BLOCKS}", "Model.hidden_size=32")
CONSTANT = ("Optimizer.lr.name=ConstantWithWarmup", "Optimizer.lr.warmup_rate=0", "Optimizer.weight_decay=0")
SGD = (*SMALL, *NO_DROPOUT, *CONSTANT, "Optimizer.name=SGD", "Optimizer.lr.max_lr=0.3")
#: the clip is always active: the norm is above 0.1 at every update
KINDS = {
    "sgd": (*SGD, "Engine.max_steps=20", "Optimizer.grad_clip=null"),
    "clip": (*SGD, "Engine.max_steps=5", "Optimizer.grad_clip.clip_norm=0.1"),
    "adamw": (*SMALL, *NO_DROPOUT, "Engine.max_steps=20"),
}
RECOMPUTE = ("Model.use_recompute=true", "Model.recompute_granularity=full")
STAGES = (1, 2, 3)
#: layout: (processes, sharding degree, micro-batch size that makes MICRO_BATCHES, overrides)
LAYOUTS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "sharding2": (2, 2, 2, ()),
    "sharding4": (4, 4, 1, ()),
    "dp2sharding2": (4, 2, 1, ("Distributed.dp_degree=2",)),
    "mp2sharding2": (4, 2, 2, ("Distributed.mp_degree=2",)),
    "mp2spsharding2": (4, 2, 2, ("Distributed.mp_degree=2", "Model.sequence_parallel=true")),
    "sep2sharding2": (4, 2, 2, ("Distributed.sep_degree=2",)),
    "pp2sharding2": (4, 2, 2, ("Distributed.pp_degree=2",)),
}
GRANULARITIES = ("none", "full", "full_attn", "core_attn")
FAULTS = ("nan_weight", "inf_grad")


def sharded(degree: int, stage: int) -> tuple[str, ...]:
    return (f"Distributed.sharding.sharding_degree={degree}", f"Distributed.sharding.sharding_stage={stage}")


def matrix(processes: int) -> dict[str, tuple[str, ...]]:
    """Every layout of so many processes, stage and kind; the clipped runs recompute."""
    runs = {}
    for layout, (size, degree, micro, overrides) in LAYOUTS.items():
        for stage in STAGES if size == processes else ():
            for kind, common in KINDS.items():
                extra = RECOMPUTE if kind == "clip" else ()
                batch = f"Global.micro_batch_size={micro}"
                runs[f"{layout}s{stage}-{kind}"] = (*common, *overrides, batch, *extra, *sharded(degree, stage))
    return runs


def recompute_runs() -> dict[str, tuple[str, ...]]:
    """C52: dropout on, accumulation 2."""
    runs = {}
    for name, layout in {"dp2": (), "s2": sharded(2, 2), "s3": sharded(2, 3)}.items():
        for granularity in GRANULARITIES:
            on = granularity != "none"
            extra = ("Model.use_recompute=true", f"Model.recompute_granularity={granularity}") if on else ()
            runs[f"c52-{name}-{granularity}"] = (*SMALL, "Engine.max_steps=10", *layout, *extra)
    return runs


def offload_runs() -> dict[str, tuple[str, ...]]:
    batch, offload = "Global.micro_batch_size=2", "Distributed.sharding.sharding_offload=true"
    return {f"offload-s{stage}": (*KINDS["adamw"], batch, *sharded(2, stage), offload) for stage in STAGES}


#: C110: one process, dp 2 and sharding 2; other axes are refused (tests/unit/config/test_rules.py)
FUSION = {
    f"c110-{layout}-{fusion}": (
        *SMALL, *NO_DROPOUT, "Engine.max_steps=5", "Optimizer.name=FusedAdamW", f"Optimizer.tensor_fusion={fusion}", *overrides
    )
    for layout, overrides in {"dp2": (), "s2": sharded(2, 2)}.items()
    for fusion in ("true", "false")
}  # fmt: skip


def fault_runs() -> dict[str, tuple[str, ...]]:
    fault = "Debug.fault={{rank: 1, step: 2, kind: {}}}"
    return {
        f"{kind}-s{stage}": (*SMALL, "Engine.max_steps=3", *sharded(2, stage), fault.format(kind))
        for kind in FAULTS
        for stage in STAGES
    }


def train_on(processes: int, runs: dict[str, tuple[str, ...]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank saw of every run."""
    command = [REPO / "tests/parity/sharding_worker.py", json.dumps(runs), folder]
    result = launch(command, processes, timeout=400, cwd=REPO)
    assert result.returncode == 0 and not result.orphans, "\n".join(log[-2000:] for log in result.logs)
    return {name: [_read(folder, name, rank) for rank in range(processes)] for name in runs}


def _read(folder: Path, name: str, rank: int) -> dict[str, Any]:
    seen = json.loads((folder / f"{name}.{rank}.json").read_text())
    arrays = np.load(folder / f"{name}.{rank}.npz")
    seen["pieces"] = [(*piece, arrays[f"arr_{number}"]) for number, piece in enumerate(seen["pieces"])]
    return seen


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, Any]]:
    """One process."""
    return {kind: run(overrides) for kind, overrides in KINDS.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    runs = {**matrix(2), **recompute_runs(), **offload_runs(), **FUSION, **fault_runs()}
    return train_on(2, runs, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    runs = {**matrix(4), "dp4-sgd": (*KINDS["sgd"], "Global.micro_batch_size=1")}
    return train_on(4, runs, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=[f"{layout}s{stage}" for layout in LAYOUTS for stage in STAGES])
def layout(request) -> str:
    return request.param


@pytest.fixture
def ranks(request, layout) -> dict[str, list[dict[str, Any]]]:
    """Every rank's view of the layout's run of each kind."""
    processes = LAYOUTS[layout[:-2]][0]
    runs = request.getfixturevalue("two" if processes == 2 else "four")
    return {kind: runs[f"{layout}-{kind}"] for kind in KINDS}


def relative(found, right) -> float:
    """Largest |a − b| / max(1, |b|) of two series."""
    a, b = np.array(found), np.array(right)
    assert a.shape == b.shape
    return float((np.abs(a - b) / np.maximum(1, np.abs(b))).max())


def test_the_numbers_of_one_process(one, ranks):
    for kind, tolerance in {"sgd": 1e-5, "clip": 1e-5, "adamw": 1e-4}.items():
        for seen in ranks[kind]:
            right = one[kind]
            assert relative(seen["losses"][:1], right["losses"][:1]) <= 1e-6, kind
            assert relative(seen["losses"], right["losses"]) <= tolerance, kind
            assert relative(seen["grad_norms"][:1], right["grad_norms"][:1]) <= 1e-5, kind
            assert relative(seen["grad_norms"], right["grad_norms"]) <= 10 * tolerance, kind
            assert seen["losses"] == ranks[kind][0]["losses"] and seen["grad_norms"] == ranks[kind][0]["grad_norms"]
    assert min(one["clip"]["grad_norms"]) > 0.1
    assert one["sgd"]["losses"][-1] < one["sgd"]["losses"][0] - 0.3


def test_the_weights_of_one_process_and_equal_copies(one, ranks):
    """`assemble` asserts that first copies hold every element once and that other copies are equal to the bit."""
    for kind, tolerance in {"sgd": 1e-5, "clip": 1e-6, "adamw": 1e-4}.items():
        right = assemble(one[kind]["pieces"])
        found = assemble([piece for seen in ranks[kind] for piece in seen["pieces"]])
        assert found.keys() == right.keys()
        for name, values in right.items():
            difference = np.linalg.norm(found[name] - values) / max(np.linalg.norm(values), 1e-3)
            assert difference <= tolerance, (kind, name, difference)


def test_memory_falls(one, layout, ranks):
    """Elements a rank holds of what one process holds of each kind."""
    _, degree, _, overrides = LAYOUTS[layout[:-2]]
    share = 1.1 / degree
    for seen, whole in ((rank["elements"], one["adamw"]["elements"]) for rank in ranks["adamw"]):
        assert seen["optimizer"] <= share * whole["optimizer"]
        assert seen["updated"] <= share * whole["updated"]
        if layout.endswith("s3"):
            assert seen["model"] == 0, "between updates no block is gathered"


def test_collectives_are_what_the_number_of_blocks_says(ranks, layout):
    """Units: the blocks, and embedding, last norm and head in one."""
    if not layout.startswith(("sharding2", "dp2")):
        return  # tensor and sequence parallel use the same collectives; a stage has other units
    units = BLOCKS + 1
    gathers, reductions = {
        "s1": (units, units),
        "s2": (units, MICRO_BATCHES * units),
        "s3": (MICRO_BATCHES * (units + BLOCKS - 1), MICRO_BATCHES * units),
    }[layout[-2:]]
    for kind in KINDS:  # "clip" recomputes: no gather more
        for seen in ranks[kind]:
            expected = {"all_gather": gathers, "reduce_scatter": reductions}
            assert seen["collectives"] == [expected] * len(seen["losses"]), kind


@pytest.mark.parametrize("layout", ["sharding4s1", "sharding4s2", "sharding4s3", "dp2sharding2s2"])
def test_c49_sharding_follows_the_data_parallel_curve(four, layout):
    found, right = four[f"{layout}-sgd"][0]["losses"], four["dp4-sgd"][0]["losses"]
    assert relative(found[:10], right[:10]) <= 1e-6 and np.isfinite(found).all()


@pytest.mark.parametrize("layout", ["dp2", "s2", "s3"])
def test_c52_recompute_changes_nothing_with_dropout(two, layout):
    plain = two[f"c52-{layout}-none"]
    assert len(plain[0]["losses"]) == 10
    for granularity in GRANULARITIES[1:]:
        for seen, right in zip(two[f"c52-{layout}-{granularity}"], plain, strict=True):
            assert seen["losses"] == right["losses"] and seen["grad_norms"] == right["grad_norms"]


def test_c110_tensor_fusion_changes_nothing(two):
    one = [run(FUSION[f"c110-dp2-{fusion}"]) for fusion in ("true", "false")]
    for fused, plain in (one, *((two[f"c110-{name}-true"][0], two[f"c110-{name}-false"][0]) for name in ("dp2", "s2"))):
        assert len(plain["losses"]) == 5 and fused["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert plain["losses"] == pytest.approx(one[1]["losses"], rel=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_of_one_rank_stops_all_in_the_same_update(two, fault, stage):
    assert [seen["stopped"] for seen in two[f"{fault}-s{stage}"]] == [2, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_offload_changes_nothing(two, stage):
    """To the bit: the same arithmetic, elsewhere."""
    for seen, right in zip(two[f"offload-s{stage}"], two[f"sharding2s{stage}-adamw"], strict=True):
        assert seen["losses"] == right["losses"] and seen["grad_norms"] == right["grad_norms"]
        assert seen["elements"] == right["elements"]
        for piece, other in zip(seen["pieces"], right["pieces"], strict=True):
            assert piece[:4] == other[:4] and np.array_equal(piece[4], other[4])
