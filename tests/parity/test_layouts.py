"""Every layout gives one process's numbers: tensor, pipeline, sep and sequence parallel, alone and together.

SGD without clipping shows a wrong factor in the gradients, SGD with an always active clip shows a wrong norm; AdamW is blind to
the first and hides much. Each with several micro-batches; the corpus has masked tokens.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from ppfleetx.config.layouts import parse_layout
from tests.training import NO_DROPOUT, Outcome, train, train_many_on

COMMON = (
    *NO_DROPOUT, "Model.hidden_size=32", "Global.micro_batch_size=2", "Data.Train.loader.num_workers=0",
    "Optimizer.lr.name=ConstantWithWarmup", "Optimizer.lr.warmup_rate=0",
)  # fmt: skip
MODELS = {
    # 8 blocks for pp4vpp2; a vocabulary whose padding leaves the last of 4 tensor ranks without a single token (250 of 4 · 128)
    "gpt": (*COMMON, "Model.num_layers=8", "Model.num_attention_heads=4"),
    # 8 query heads over 2 of keys and values
    "llama": (
        *COMMON, "Model.name=Llama", "Model.num_layers=4", "Model.num_attention_heads=8", "Model.num_key_value_heads=2",
        "Model.ffn_hidden_size=44", "Model.rope_theta=500", "Model.rope_scaling.original_max_position_embeddings=16",
    ),
}  # fmt: skip
RUNS = {
    # at 0.3 the small Llama has a spike (gradient norm 60) that multiplies rounding errors by a hundred
    "sgd": ("Optimizer.name=SGD", "Optimizer.lr.max_lr=0.1", "Optimizer.grad_clip=null", "Optimizer.weight_decay=0"),
    "clip": ("Optimizer.name=SGD", "Optimizer.lr.max_lr=0.3", "Optimizer.grad_clip.clip_norm=0.1"),
    "adamw": ("Optimizer.name=AdamW",),
}
TOLERANCE = {"sgd": 1e-5, "clip": 1e-5, "adamw": 1e-4}
#: processes: model: layouts
LAYOUTS = {
    2: {"gpt": ["mp2", "pp2", "sep2", "mp2sp", "pp2rc"], "llama": ["mp2rc", "sharding2s3rc", "sep2", "mp2sprc"]},
    4: {
        "gpt": ["mp4", "pp4", "pp4vpp2", "mp2pp2", "mp2pp2sp", "mp2pp2rc", "sep2mp2", "mp4sp", "dp2mp2", "sep2pp2"],
        "llama": ["mp2sharding2s3rc", "mp2pp2rc", "pp2sharding2s3"],
    },
    8: {
        "gpt": ["dp2mp2pp2", "mp2pp4vpp2", "mp2pp2sharding2s2", "pp4vpp2sharding2s1"],
        "llama": ["mp2pp2sharding2s1sp"],
    },
}
#: what a layout needs beside its string: a 1F1B phase in the interleaved schedule, one sample a data rank
MORE = {
    "pp4vpp2": ("Global.micro_batch_size=1",),
    "mp2pp4vpp2": ("Global.micro_batch_size=1",),
    "pp4vpp2sharding2s1": ("Global.micro_batch_size=1",),
}
#: one update so large that the weights are the gradient
GRADIENT = (
    "Engine.max_steps=1",
    "Optimizer.name=SGD",
    "Optimizer.lr.max_lr=1e4",
    "Optimizer.grad_clip=null",
    "Optimizer.weight_decay=0",
)


def runs_of(full: bool) -> dict[str, tuple[str, ...]]:
    """Overrides of each run: 20 updates with --full, else 4."""
    return {name: (*overrides, f"Engine.max_steps={20 if full else 4}") for name, overrides in RUNS.items()}


#: one ordinary update with an active clip
UPDATE = (*RUNS["clip"], "Engine.max_steps=1")


@pytest.fixture(scope="module")
def one(request, tmp_path_factory) -> dict[str, Outcome]:
    """One process, by model and run."""
    folder = tmp_path_factory.mktemp("one")
    runs = {**runs_of(request.config.getoption("--full")), "gradient": GRADIENT, "update": UPDATE}
    return {
        f"{model}-{name}": train(folder / model / name, *small, *overrides)
        for model, small in MODELS.items()
        for name, overrides in runs.items()
    }


@pytest.fixture(scope="module", params=[2, 4, 8])
def many(request, tmp_path_factory) -> dict[str, Outcome]:
    """All layouts of a world size in one set of processes, by model, layout and run: every run with --full, else the gradient
    and the clipped run."""
    full = request.config.getoption("--full")
    chosen = {name: run for name, run in runs_of(full).items() if full or name == "clip"}
    runs = {
        f"{model}-{layout}-{name}": (*MODELS[model], *overrides, *parse_layout(layout).overrides, *MORE.get(layout, ()))
        for model, layouts in LAYOUTS[request.param].items()
        for layout in layouts
        for name, overrides in {**chosen, "gradient": GRADIENT, "update": UPDATE}.items()
    }
    outcomes = train_many_on(
        request.param, runs, tmp_path_factory.mktemp(f"many{request.param}"), timeout=3000 if full else 400
    )
    launched = next(iter(outcomes.values())).launched
    assert launched.returncode == 0 and launched.orphans == 0, "\n".join(log[-1500:] for log in launched.logs)
    return outcomes


def relative(found, right, key):
    found, right = (np.array([record[key] for record in run.records()]) for run in (found, right))
    assert found.shape == right.shape
    return np.abs(found - right) / np.maximum(1, np.abs(right))


def test_losses_and_norms(one, many):
    wrong = {}
    for name, outcome in many.items():
        model, _, run = name.split("-")
        loss, norm = (relative(outcome, one[f"{model}-{run}"], key) for key in ("loss", "grad_norm"))
        if loss[0] > 1e-6 or norm[0] > 1e-5 or loss.max() > TOLERANCE.get(run, 1e-6):
            wrong[name] = (loss.max(), norm.max())
    assert not wrong, json.dumps({name: [float(value) for value in values] for name, values in wrong.items()}, indent=1)


def parted(one, many, run, tolerance):
    """Parameters whose values after one update differ by more than `tolerance` of their norm."""
    wrong = {}
    for name, outcome in many.items():
        if name.endswith(f"-{run}"):
            found, right = outcome.weights(1), one[f"{name.partition('-')[0]}-{run}"].weights(1)
            floor = 1e-3 * max(np.linalg.norm(weight) for weight in right.values())
            assert found.keys() == right.keys()
            for parameter, weight in right.items():
                difference = np.linalg.norm(found[parameter] - weight) / max(np.linalg.norm(weight), floor)
                if difference > tolerance:
                    wrong[f"{name} {parameter}"] = float(difference)
    return wrong


def test_first_gradient_of_every_parameter(one, many):
    """After one update of rate 10⁴ the weights are −10⁴ times the gradient, but for the initial weights beside it."""
    assert not parted(one, many, "gradient", 1e-5)


def test_every_parameter_after_one_clipped_update(one, many):
    assert not parted(one, many, "update", 1e-6)
