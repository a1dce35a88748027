"""What a checkpoint of a run holds, and how it is put back."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import paddle
import yaml

import ppfleetx
from ppfleetx.checkpoint.compare import setting
from ppfleetx.checkpoint.manager import KEY
from ppfleetx.checkpoint.reader import SCALAR_SLOTS, Checkpoint, rank_file
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.checkpoint.snapshot import TrainingState, dtype_of, memory_of
from ppfleetx.config import Config, Problem, UserError
from ppfleetx.distributed import seed_streams
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.data import RunData
from ppfleetx.engine.ledger import ledger, wanted_shapes
from ppfleetx.engine.progress import Progress
from ppfleetx.optim.optimizer import MASTER, initial_slot, load_optimizer_state, optimizer_state, slots_of

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

T = TypeVar("T")

_HEADS = "Model.num_attention_heads"

logger = logging.getLogger("ppfleetx")


def capture(engine: Engine, data: RunData) -> TrainingState:
    """The state of this rank's run, as it stands between two updates; no communication."""
    return TrainingState(
        pieces=engine.trainable.pieces(),
        optimizer=optimizer_state(engine.optimizer, engine.trainable.named),
        streams=engine.tracker.state_dict(),
        progress={**asdict(engine.progress), "scaler": engine.train_step.precision.state_dict()},
        run={
            "layout": dict(engine.context.topology.degrees),
            "config": yaml.safe_load(engine.config.to_yaml()),
            "next_samples": data.next_samples(engine.progress.consumed_samples),
            "versions": {
                "ppfleetx": ppfleetx.__version__,
                "paddle": paddle.__version__,
                "python": platform.python_version(),
            },
        },
    )


def read(engine: Engine, data: RunData, path: Path, weights_only: bool = False) -> Callable[[], None]:
    """Reads the checkpoint at `path`, whatever layout wrote it, and returns what puts it in place; every rank must call both.

    No communication. The run changes only in the second step.

    Args:
        data: what the run reads, for the ledger.
        weights_only: no more than the weights is needed, whatever `Engine.save_load.weights_only` says.

    Raises:
        UserError: the checkpoint does not fit the model.
    """
    saved, section = _open(engine.config, path), engine.config.Engine.save_load
    starts_anew = section.weights_only
    if not (starts_anew or weights_only or saved.manifest.progress):
        rule, fix = "it holds weights only, so no run can go on from it", "-o Engine.save_load.weights_only=true"
        raise UserError(Problem(KEY, str(path), rule, fix))
    slots = frozenset() if starts_anew or weights_only else _checked(saved, lambda: _restorable(engine.config, saved))
    optimizer = _checked(saved, lambda: read_optimizer(engine.config, engine.trainable.pieces(), saved, slots))
    position = None if starts_anew or not saved.manifest.progress else _checked(saved, lambda: _position(engine, saved))

    def put() -> None:
        _checked(saved, lambda: read_weights(engine.trainable.pieces(), saved))
        engine.trainable.after_load()
        load_optimizer_state(engine.optimizer, engine.trainable.named, optimizer)
        if position is not None:
            _checked(saved, lambda: _go_to(engine, position))
        streams = "as for a new run" if position is None else position.said
        logger.info("%s", ledger(engine, saved, data, slots, streams))

    return put


class _Position(NamedTuple):
    """Where a run stands, tensors apart.

    Attributes:
        progress: counters.
        scaler: its state; {} without one.
        streams: random streams of this rank; None: they are seeded anew.
        said: what becomes of the streams, for people.
    """

    progress: Progress
    scaler: dict[str, Any]
    streams: dict[str, Any] | None
    said: str


def _position(engine: Engine, saved: Checkpoint) -> _Position:
    """What the checkpoint says of progress and random streams; Damaged if it makes no sense."""
    counters = dict(saved.manifest.progress)
    scaler = counters.pop("scaler", {})
    known = {field.name for field in fields(Progress)}
    if counters.keys() != known or not all(type(n) is int and 0 <= n < 2**62 for n in counters.values()):
        raise Damaged(f"its progress is {counters}")
    if not isinstance(scaler, dict) or (scaler and "scale" not in scaler):
        raise Damaged(f"its scaler is {scaler}")
    progress = Progress(**counters)
    if not _same_places(engine, saved):
        return _Position(progress, scaler, None, "seeded anew: the layout is another one")
    streams = saved.streams(engine.context.topology.device_rank)
    there, here = streams.get("device"), engine.context.device.partition(":")[0]
    if there is None:
        raise Damaged(f"{rank_file(engine.context.topology.device_rank)} holds no random streams")
    if there != here:  # a generator's state fits its own kind
        return _Position(progress, scaler, None, f"seeded anew: the device is another one, {there} → {here}")
    return _Position(progress, scaler, streams, "to the bit")


def _go_to(engine: Engine, position: _Position) -> None:
    """Counters, scaler and random streams."""
    engine.train_step.precision.load_state_dict(position.scaler)
    engine.progress = position.progress
    topology, seed = engine.context.topology, engine.config.Global.seed
    if position.streams is None:
        seed_streams(topology, _seed_after(seed, engine.progress.consumed_samples))
        engine.tracker.set_init_seed(seed)
        return
    try:
        engine.tracker.load_state_dict(position.streams)
    except ValueError as error:
        raise Damaged(f"{rank_file(topology.device_rank)}: {error}") from None


def read_optimizer(
    config: Config, pieces: Sequence[Piece], saved: Checkpoint, slots: Set[str]
) -> dict[str, paddle.Tensor]:
    """New tensors for what is stored of these slots, `<logical name>.<slot>`, and for the master weights of half-precision
    pieces: between runs in half and in full precision the float32 values go on."""
    found: dict[str, paddle.Tensor] = {}
    for piece in pieces:
        stored = saved.slots(piece.tensor.spec)
        if not stored:  # with strict off: as in a new run
            fresh = {f"{piece.name}.{slot}": initial_slot(config, slot, piece.tensor.shape) for slot in slots}
            found |= fresh
            continue
        wanted = {slot: slot for slot in slots & stored}
        if piece.tensor.dtype != paddle.float32:
            wanted[MASTER] = MASTER if MASTER in stored else ""
        for slot, source in wanted.items():
            memory = saved.read_piece(piece.tensor.spec, piece.box, piece.flat, source)
            if slot == MASTER and memory.dtype != np.float32:
                continue  # half-precision weights without masters: the first update makes them
            shape = [1] if slot in SCALAR_SLOTS else piece.tensor.shape
            found[f"{piece.name}.{slot}"] = _tensor(memory, shape, piece.tensor)
    return found


def read_weights(pieces: Sequence[Piece], saved: Checkpoint) -> None:
    """Fills the pieces, in place; from the stored weight if it has the piece's type, else from the master weight."""
    for piece in pieces:
        stored = saved.slots(piece.tensor.spec)
        if not stored:
            continue  # with strict off: it stays as it is
        memory = saved.read_piece(piece.tensor.spec, piece.box, piece.flat)
        if memory.dtype != dtype_of(piece.tensor) and MASTER in stored:
            memory = saved.read_piece(piece.tensor.spec, piece.box, piece.flat, MASTER)
        if memory.dtype == dtype_of(piece.tensor) and piece.tensor.place.is_cpu_place():
            memory_of(piece.tensor)[:] = memory
        else:
            value = paddle.to_tensor(memory.reshape(piece.tensor.shape))  # uint16 becomes bfloat16
            piece.tensor.copy_(value.astype(piece.tensor.dtype), True)


def _tensor(memory: np.ndarray, shape: Sequence[int], like: paddle.Tensor) -> paddle.Tensor:
    """A new tensor where `like` is (offloaded states are on the host); uint16 becomes bfloat16."""
    if not like.place.is_cpu_place():
        return paddle.to_tensor(memory.reshape(shape))
    tensor = paddle.empty(shape, "bfloat16" if memory.dtype == np.uint16 else str(memory.dtype), device="cpu")
    memory_of(tensor)[:] = memory  # straight from the file
    return tensor


def _open(config: Config, path: Path) -> Checkpoint:
    """The checkpoint at `path`; UserError if it is one of another model, naming the first parameter and both shapes, or the
    number of heads, which no shape tells."""
    try:
        saved = Checkpoint(path)
    except Damaged as error:
        raise UserError(Problem(KEY, str(path), str(error))) from None
    if (difference := _difference(saved.shapes(), wanted_shapes(config), config.Engine.save_load.strict)) is not None:
        raise UserError(Problem(KEY, str(path), difference))
    heads, now = setting(saved.manifest.run.get("config"), _HEADS), config.Model.num_attention_heads
    if heads not in (None, now):  # no shape tells of it
        rule = f"in {path} it is {heads}, and its matrices cut into other heads are another model"
        raise UserError(Problem(_HEADS, now, rule, f"{_HEADS}={heads}"))
    return saved


def _difference(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], strict: bool = True
) -> str | None:
    """How the parameters in a checkpoint differ from the model's, by the first that does; None if they do not.

    Without `strict` only shapes count, and having none in common.
    """
    for name, shape in wanted.items():
        if name in found and found[name] != shape:
            return f"{name} has shape {list(found[name])} in it and {list(shape)} in the model"
        if name not in found and strict:
            return f"it has no parameter {name}, which the model has with shape {list(shape)}"
    if not strict:
        return None if found.keys() & wanted.keys() else "it has none of the model's parameters"
    extra = min(found.keys() - wanted.keys(), default=None)
    return extra and f"it has the parameter {extra} with shape {list(found[extra])}, which the model lacks"


def _checked(saved: Checkpoint, work: Callable[[], T]) -> T:
    """`work`, whose failures to read become UserErrors."""
    try:
        return work()
    except (Damaged, OSError) as error:
        raise UserError(Problem(KEY, str(saved.path), f"the checkpoint is damaged: {error}")) from None


def _restorable(config: Config, saved: Checkpoint) -> frozenset[str]:
    """The slots of this run's optimizer, if the checkpoint has all of them; none otherwise: it starts anew.

    Raises:
        Damaged: some parameters have them, and others have not.
    """
    needed = slots_of(config.Optimizer.name)
    if not needed <= saved.all_slots():
        return frozenset()
    for name in saved.shapes():
        if lacks := sorted(needed - saved.slots_of(name)):
            raise Damaged(f"it has no {lacks[0]} of {name}, which others have")
    return needed


def _same_places(engine: Engine, saved: Checkpoint) -> bool:
    """Whether every rank has the place in the layout that it had: only then are random streams the right ones for it."""
    run, topology = saved.manifest.run, engine.context.topology
    order = setting(run.get("config"), "Distributed.order") or ()
    cut = [axis for axis in topology.order if topology.degrees[axis] > 1]
    return run.get("layout") == topology.degrees and [axis for axis in order if axis in cut] == cut


def _seed_after(seed: int, consumed_samples: int) -> int:
    """A seed for a run that goes on under another layout: a function of both, far from the seeds in use."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{consumed_samples}".encode()).digest()[:6], "big")
