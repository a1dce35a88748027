"""What each of the 2 processes of test_sharding.py runs: every scene against the same layers in one process."""

from __future__ import annotations

import contextlib
import gc
import os
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.base import core
from paddle.distributed.fleet.utils import recompute

from ppfleetx.config.schema import ShardingConfig
from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.distributed.sharding import ShardedParameters, partition
from ppfleetx.distributed.sharding_unit import ALIGN, Unit, UnitOptions, view
from ppfleetx.distributed.trainable import Dtypes
from ppfleetx.layers.spec import ParameterSpec

RANK, WORLD = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
HIDDEN, WORDS, BLOCKS, CLIP, RATE = 24, 50, 3, 0.5, 0.3
IDS = np.random.default_rng(1).integers(0, WORDS, [4, 9])


class Block(nn.Layer):
    """x + W₂ gelu(W₁ norm(x)); may hold a parameter that is not used, freeze one, recompute itself."""

    def __init__(self, unused=False, frozen=False, inside=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 70), nn.Linear(70, HIDDEN)
        self.unused = nn.Linear(HIDDEN, 3) if unused else None
        self.up.bias.stop_gradient = frozen
        self.inside = inside

    def compute(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return recompute(self.compute, x) if self.inside and self.training else self.compute(x)


class Head(nn.Layer):
    """Logits with the tied weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return paddle.matmul(x, self.weight, transpose_y=True)


class Model(nn.Layer):
    """Embedding, blocks, a last norm, a tied head."""

    def __init__(self, around=False, lazy=False, **options):
        super().__init__()
        with paddle.LazyGuard() if lazy else contextlib.nullcontext():
            embedding = nn.Embedding(WORDS, HIDDEN)
            blocks = [Block(**options) for _ in range(BLOCKS)]
            self.pieces = nn.LayerList([embedding, *blocks, nn.LayerNorm(HIDDEN), Head(embedding.weight)])
        self.around = around
        for name, parameter in self.named_parameters():
            parameter.spec = ParameterSpec(
                name=name,
                shape=tuple(parameter.shape),
                decay=len(parameter.shape) > 1,
                at_both_ends=name == "pieces.0.weight",
            )

    def forward(self, ids):
        x = ids
        for piece in self.pieces:
            x = recompute(piece, x) if self.around and isinstance(piece, Block) and self.training else piece(x)
        return x


def loss_of(model, ids, rows):
    """Sum of the losses over the global number of tokens."""
    ids = paddle.to_tensor(ids)
    return F.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="sum") / (rows * (ids.shape[1] - 1))


def build(**options):
    paddle.seed(5)
    return Model(**options)


def optimizer_over(parameters):
    decayed = {parameter.name for parameter in parameters if parameter.spec.decay}
    return paddle.optimizer.AdamW(
        1e-2, parameters=parameters, weight_decay=0.1, epsilon=1e-4, apply_decay_param_fun=decayed.__contains__
    )


def in_one(steps=4, **options):
    """(losses of all samples after each update, gradient norms) in one process, 2 micro-batches."""
    model = build(**options)
    optimizer = optimizer_over(model.parameters())
    losses, norms = [], []
    for _ in range(steps):
        for half in (IDS[:2], IDS[2:]):
            loss_of(model, half, 4).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(paddle.stack([(g**2).sum() for g in gradients]).sum().sqrt()))
        with paddle.no_grad():
            for gradient in gradients:
                gradient.scale_(min(1.0, CLIP / norms[-1]))
        optimizer.step()
        optimizer.clear_grad()
        with paddle.no_grad():
            losses.append(float(loss_of(model, IDS, 4)))
    return losses, norms


def sharded(section, steps=4, evaluate=False, **options):
    """The same over 2 ranks: each has one row of each micro-batch."""
    model = build(**options)
    parameters = ShardedParameters(CONTEXT, list(model.pieces), section)
    optimizer = optimizer_over(list(parameters.named.values()))
    losses, norms = [], []
    for _ in range(steps):
        if evaluate:
            evaluation(model)
        for half in (IDS[:2], IDS[2:]):
            loss_of(model, half[RANK : RANK + 1], 4).backward()
        parameters.reduce()
        norms.append(float(parameters.norm()))
        parameters.scale(min(1.0, CLIP / norms[-1]))
        with parameters.updating():
            optimizer.step()
        parameters.after_update()
        losses.append(evaluation(model))
    return losses, norms, parameters, model


def evaluation(model):
    with paddle.no_grad():
        return float(loss_of(model, IDS, 4))


def compare(section, evaluate=False, lazy=False, **options):
    right, found = in_one(**options), sharded(section, evaluate=evaluate, lazy=lazy, **options)
    for one, other in zip(right, found[:2], strict=True):
        worst = max(abs(a - b) / max(1, abs(a)) for a, b in zip(one, other, strict=True))
        assert worst < 2e-6, (section, options, worst, one, other)
    return found


def stage(number, **overlap):
    return ShardingConfig(sharding_degree=2, sharding_stage=number, **overlap)


def every_stage_and_trap():
    for number in (1, 2, 3):
        compare(stage(number))
        compare(stage(number), evaluate=True)
        compare(stage(number), unused=True)
        compare(stage(number), frozen=True)
        compare(stage(number), inside=True)
        compare(stage(number), around=True)
        compare(stage(number), lazy=True)
    compare(stage(1, reduce_overlap=True))
    compare(stage(2, reduce_overlap=True, broadcast_overlap=True))
    compare(stage(2, reduce_overlap=True, broadcast_overlap=True), evaluate=True, unused=True)


def unused_parameters_keep_their_values():
    """As in one process, where no gradient means no update, not even decay."""
    parameters = sharded(stage(2), unused=True)[2]
    start = build(unused=True).state_dict()
    held: list[object] = []
    dist.all_gather_object(held, list(parameters.named))
    assert any(".unused." in name for names in held for name in names)
    for piece in parameters.pieces():
        before = start[piece.name].numpy().flatten()[slice(*piece.flat)]
        assert np.array_equal(piece.tensor.numpy(), before) == (".unused." in piece.name), piece.name


def gradients_share_memory():
    """`.grad = view` would copy without a word, and clipping the flat buffer would then change nothing."""
    model = build()
    parameters = ShardedParameters(CONTEXT, list(model.pieces), stage(3))
    loss_of(model, IDS[RANK : RANK + 2], 4).backward()
    parameters.reduce()
    before = {name: tensor.grad.numpy() for name, tensor in parameters.named.items()}
    parameters.scale(0.5)
    for name, tensor in parameters.named.items():
        assert np.array_equal(tensor.grad.numpy(), before[name] * np.float32(0.5)), name


def loaded_values_are_computed_with():
    """What is written into the pieces' tensors is what the model computes with, after `after_load`."""
    for number in (1, 2, 3):
        _, _, parameters, model = sharded(stage(number))
        evaluation(model)
        other = {name: values.numpy() * 1.5 for name, values in build().state_dict().items()}
        for piece in parameters.pieces():
            piece.tensor.set_value(other[piece.name].flatten()[slice(*piece.flat)])
        parameters.after_load()
        right = build()
        right.set_state_dict(other)
        assert evaluation(model) == evaluation(right)


def pieces_are_a_partition():
    """Over the two ranks the pieces hold every element once, without the padding."""
    model = build()
    sizes = {p.spec.name: p.size for p in model.parameters()}
    parameters = ShardedParameters(CONTEXT, list(model.pieces), stage(2))
    held: list[object] = []
    dist.all_gather_object(held, [(p.name, p.flat, p.is_mine, p.tensor.size) for p in parameters.pieces()])
    everything = [piece for one in held for piece in one]
    assert all(first and flat[1] - flat[0] == size for _, flat, first, size in everything)
    for name, size in sizes.items():
        runs = sorted(flat for other, flat, _, _ in everything if other == name)
        assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])] and runs[-1][1] == size, name
    assert sum(unit.length for unit in parameters._units) * WORLD > sum(sizes.values())


def half_precision_has_float32_cuts():
    """Gathered in bfloat16, summed in float32; a CPU cannot multiply in bfloat16, so the unit alone."""
    layer = nn.Linear(8, 8)
    values = layer.weight.numpy()
    for name, parameter in layer.named_parameters():
        parameter.spec = ParameterSpec(name=name, shape=tuple(parameter.shape))
    unit = Unit(layer.parameters(), CONTEXT.group("sharding"), UnitOptions(False, True, dtypes=Dtypes("bfloat16")))
    gradient = paddle.zeros([unit.length])
    unit.attach(gradient)
    unit.gather()
    assert layer.weight.dtype == paddle.bfloat16 and unit.cut.dtype == paddle.float32
    rounded = paddle.to_tensor(values).astype("bfloat16").astype("float32")
    assert np.array_equal(layer.weight.astype("float32").numpy(), rounded.numpy())
    (layer.weight.astype("float32") * (RANK + 1)).sum().backward()
    (layer.bias.astype("float32") * 1.001).sum().backward()
    unit.finish()
    for piece in unit.slices:
        right = 3.0 if piece.spec.name == "weight" else 2 * float(paddle.to_tensor(1.001).astype("bfloat16"))
        assert piece.grad.dtype == paddle.float32 and np.allclose(piece.grad.numpy(), right), piece.spec.name
        assert piece.dtype == paddle.float32


def offload_works_on_copies():
    """Here a tensor's copy on the host is the tensor itself; made a copy, it must not change a thing, nor go unused."""
    plain = paddle.Tensor.cpu
    copies = []

    def cpu(tensor):
        copies.append(tensor.clone())
        return copies[-1]

    for number in (1, 2, 3):
        right = sharded(stage(number), frozen=True, unused=True)
        paddle.Tensor.cpu = cpu
        found = sharded(stage(number, sharding_offload=True), frozen=True, unused=True)
        paddle.Tensor.cpu = plain
        assert found[:2] == right[:2], (found[:2], right[:2])
        units = len(found[2]._units)
        assert len(copies) == units + 4, "each cut, and once an update the gradient of all"
        assert [unit.cut.data_ptr() for unit in found[2]._units] == [copy.data_ptr() for copy in copies[:units]]
        copies.clear()


def main_gradients_at_stage_1():
    """Rank 0 gives 1, then 16 times 2⁻⁹, rank 1 gives 2⁻⁹ 17 times: 1 + 33 · 2⁻⁹. The parameter's own bfloat16 sum stays 1."""
    right = {True: 1 + 33 * 2.0**-9, False: 1 + 17 * 2.0**-9}
    for main_gradients in (True, False):
        layer = nn.Linear(8, 8)
        for name, parameter in layer.named_parameters():
            parameter.spec = ParameterSpec(name=name, shape=tuple(parameter.shape))
        dtypes = Dtypes("bfloat16", "float32", main_gradients)
        unit = Unit(layer.parameters(), CONTEXT.group("sharding"), UnitOptions(False, False, dtypes=dtypes))
        unit.attach(paddle.zeros([unit.length]))
        unit.gather()
        for number in range(17):
            value = 1.0 if RANK == number == 0 else 2.0**-9
            (layer.weight.astype("float32") * value).sum().backward()
            assert (layer.weight.grad is None) == main_gradients
        unit.finish()
        for piece in unit.slices:
            if piece.spec.name == "weight":
                assert np.array_equal(np.unique(piece.grad.numpy()), [right[main_gradients]])


def memory_falls():
    """Live bytes by the allocator, at stage 3; the last message to the other rank may still be held."""

    def live():
        gc.collect()
        return core.host_memory_stat_current_value("Allocated", 0) - start

    start = 0
    start = live()
    model = build()
    whole = live()
    message = whole / (1 + BLOCKS)
    parameters = ShardedParameters(CONTEXT, list(model.pieces), stage(3))
    assert live() <= 1.1 * 2 * whole / WORLD, "cuts and their gradient"
    for half in (IDS[:2], IDS[2:]):
        loss_of(model, half[RANK : RANK + 1], 4).backward()
    assert not any(p._is_initialized() or p.grad is not None for p in model.parameters())
    assert live() <= 1.1 * 2 * whole / WORLD + message, "after backward every block is free"
    optimizer = optimizer_over(list(parameters.named.values()))
    parameters.reduce()
    optimizer.step()
    parameters.after_update()
    assert live() <= 1.1 * 4 * whole / WORLD + message, "cuts, gradient, two moments"
    arrays = [tensor.numpy() for tensor in parameters.named.values()]
    assert live() <= 1.1 * 5 * whole / WORLD + message, "an array is as large as its slice"
    del model, parameters, optimizer, arrays
    assert live() <= message, "hooks keep nothing alive"


def the_plan():
    """A unit a block; embedding, last norm and tied head in one; aligned; alone where two stages must cut alike."""
    model = build()
    names = [[p.spec.name for p in unit] for unit in partition(list(model.pieces))]
    assert names[0] == ["pieces.0.weight", "pieces.4.weight", "pieces.4.bias"] and len(names) == 1 + BLOCKS
    tied = [[p.spec.name for p in unit] for unit in partition(list(model.pieces), tied_alone=True)]
    assert tied[0] == ["pieces.0.weight"] and tied[-1] == ["pieces.4.weight", "pieces.4.bias"]
    assert len(tied) == 2 + BLOCKS
    group = SimpleNamespace(rank=1, nranks=3)
    unit = Unit(list(model.pieces[1].parameters()), group, UnitOptions(True, True))
    assert unit.length % ALIGN == 0 and all(start % ALIGN == 0 for start in unit._starts)
    flat = paddle.arange(12, dtype="float32")
    part = view(flat, 4, [2, 3])
    part.scale_(2.0)
    assert flat.tolist() == [0, 1, 2, 3, 8, 10, 12, 14, 16, 18, 10, 11]


paddle.set_device("cpu")
CONTEXT = ParallelContext.create(Topology(RANK, WORLD, sharding_degree=WORLD))
for scene in (
    the_plan,
    every_stage_and_trap,
    unused_parameters_keep_their_values,
    gradients_share_memory,
    loaded_values_are_computed_with,
    pieces_are_a_partition,
    half_precision_has_float32_cuts,
    main_gradients_at_stage_1,
    offload_works_on_copies,
    memory_falls,
):
    scene()
    print(scene.__name__, "held", flush=True)
CONTEXT.close()
