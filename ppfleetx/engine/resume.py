"""What a checkpoint of a run holds, and how it is put back."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import paddle
import yaml

import ppfleetx
from ppfleetx.checkpoint.compare import setting
from ppfleetx.checkpoint.manager import KEY
from ppfleetx.checkpoint.reader import MASTER, SCALAR_SLOTS, Checkpoint, float32, rank_file
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.checkpoint.snapshot import TrainingState, host_copy, memory_of
from ppfleetx.config import Config, Problem, UserError
from ppfleetx.distributed import seed_streams
from ppfleetx.distributed.cpu import in_use
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.data import RunData
from ppfleetx.engine.ledger import ledger, wanted_shapes
from ppfleetx.engine.progress import Stored, progress_of
from ppfleetx.optim.optimizer import load_optimizer_state, optimizer_state, slots_of

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
        progress={**engine.progress.state_dict(), "scaler": engine.train_step.precision.state_dict()},
        run={
            "layout": dict(engine.context.topology.degrees),
            "config": yaml.safe_load(engine.config.to_yaml()),
            "next_samples": data.next_samples(engine.progress.consumed_samples),
            "cpu": asdict(in_use(engine.config)) if engine.config.Global.device == "cpu" else None,
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
    pieces = engine.trainable.pieces()
    slots = frozenset() if starts_anew or weights_only else slots_of(engine.config.Optimizer.name)
    if section.strict:
        _check_complete(engine.config, pieces, saved, slots)
    optimizer = _checked(saved, lambda: read_optimizer(pieces, saved, slots))
    position = None if starts_anew or not saved.manifest.progress else _checked(saved, lambda: _position(engine, saved))

    def put() -> None:
        _checked(saved, lambda: read_weights(pieces, saved))
        engine.trainable.after_load()
        load_optimizer_state(engine.optimizer, engine.trainable.named, optimizer)
        if position is not None:
            _checked(saved, lambda: _go_to(engine, position))
        streams = "as for a new run" if position is None else position.said
        logger.info("%s", ledger(engine, saved, data, slots, streams, position and position.stored))

    return put


class _Position(NamedTuple):
    """Where a run stands, tensors apart.

    Attributes:
        stored: counters.
        scaler: its state; {} without one.
        streams: random streams of this rank; None: they are seeded anew.
        said: what becomes of the streams, for people.
    """

    stored: Stored
    scaler: dict[str, Any]
    streams: dict[str, Any] | None
    said: str


def _position(engine: Engine, saved: Checkpoint) -> _Position:
    """What the checkpoint says of progress and random streams; Damaged if it makes no sense."""
    counters = dict(saved.manifest.progress)
    scaler = _scaler(counters.pop("scaler", {}), saved.manifest.run.get("layout"))
    try:
        stored = progress_of(counters)
    except ValueError as error:
        raise Damaged(str(error)) from None
    if not _same_places(engine, saved):
        return _Position(stored, scaler, None, "seeded anew: the layout is another one")
    streams = saved.streams(engine.context.topology.device_rank)
    there, here = streams.get("device"), engine.context.device.partition(":")[0]
    if there is None:
        raise Damaged(f"{rank_file(engine.context.topology.device_rank)} holds no random streams")
    if there != here:  # a generator's state fits its own kind
        return _Position(stored, scaler, None, f"seeded anew: the device is another one, {there} → {here}")
    return _Position(stored, scaler, *_known_streams(streams, engine.tracker.state_dict()))


def _known_streams(saved: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """What of the saved streams there is in this version of ppfleetx, and what becomes of them; None where some are missing."""
    named = saved.get("streams")
    if not isinstance(named, dict):
        return saved, "to the bit"  # the tracker says what is wrong
    lacking = [*(own.keys() - saved.keys()), *(own["streams"].keys() - named.keys())]
    if lacking:
        return None, f"seeded anew: the checkpoint lacks {', '.join(sorted(lacking))}"
    unknown = sorted(saved.keys() - own.keys())
    known = {name: saved[name] for name in own}
    return known, "to the bit" + (f"; not known here, skipped: {', '.join(unknown)}" if unknown else "")


def _scaler(stored: Any, layout: Any) -> dict[str, Any]:
    """The loss scaler's state. Earlier versions stored that of Paddle's: the scale of all data ranks together."""
    try:
        if "scale" in stored:
            data_degree = layout["dp"] * layout["sharding"]
            stored = {"scale_per_data_rank": stored["scale"] / data_degree, "good_steps": stored["incr_count"]}
        if stored and not (stored["scale_per_data_rank"] > 0 <= stored["good_steps"]):
            raise ValueError("a number in it is negative")
        return dict(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its loss scaler is {stored}: {error!r}") from None


def _go_to(engine: Engine, position: _Position) -> None:
    """Counters, scaler and random streams."""
    engine.train_step.precision.load_state_dict(position.scaler)
    engine.progress = position.stored.progress
    topology, seed = engine.context.topology, engine.config.Global.seed
    if position.streams is None:
        seed_streams(topology, _seed_after(seed, engine.progress.consumed_samples))
        engine.tracker.set_init_seed(seed)
        return
    try:
        engine.tracker.load_state_dict(position.streams)
    except ValueError as error:
        raise Damaged(f"{rank_file(topology.device_rank)}: {error}") from None


def read_optimizer(pieces: Sequence[Piece], saved: Checkpoint, slots: Set[str]) -> dict[str, paddle.Tensor]:
    """New tensors for what is stored of these slots, `<logical name>.<slot>`. What a part of a parameter lacks is 0, as it is
    when a run begins."""
    found: dict[str, paddle.Tensor] = {}
    for piece in pieces:
        if piece.tensor.stop_gradient:
            continue  # frozen: the optimizer keeps nothing for it
        for slot in slots & saved.slots(piece.tensor.spec):
            zeros = np.zeros(piece.tensor.size, np.float32) if _lacks(saved, piece, slot) else None
            memory = float32(saved.read_piece(piece.tensor.spec, piece.box, piece.flat, slot, zeros))
            shape = [1] if slot in SCALAR_SLOTS else piece.tensor.shape
            found[f"{piece.name}.{slot}"] = _tensor(memory, shape, piece.tensor)
    return found


def read_weights(pieces: Sequence[Piece], saved: Checkpoint) -> None:
    """Fills the pieces, in place; from the float32 masters of a half-precision weight, where a run stored both."""
    for piece in pieces:
        assert piece.tensor.dtype == paddle.float32
        stored = saved.slots(piece.tensor.spec)
        if not stored:
            continue  # with strict off: it stays as it is
        slot = MASTER if MASTER in stored else ""
        present = memory_of(host_copy(piece.tensor)) if _lacks(saved, piece, slot) else None
        memory = float32(saved.read_piece(piece.tensor.spec, piece.box, piece.flat, slot, present))
        if piece.tensor.place.is_cpu_place():
            memory_of(piece.tensor)[:] = memory
        else:
            piece.tensor.copy_(paddle.to_tensor(memory.reshape(piece.tensor.shape)), True)


def _lacks(saved: Checkpoint, piece: Piece, slot: str) -> bool:
    """Whether the slot is not stored for a part of the parameter (a query without key and value, say)."""
    spec = piece.tensor.spec
    return any(slot not in saved.slots_of(name) for name in spec.parts or (spec.name,))


def _tensor(memory: np.ndarray, shape: Sequence[int], like: paddle.Tensor) -> paddle.Tensor:
    """A new float32 tensor where `like` is (offloaded states are on the host)."""
    if not like.place.is_cpu_place():
        return paddle.to_tensor(memory.reshape(shape))
    tensor = paddle.empty(shape, "float32", device="cpu")
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


def _check_complete(config: Config, pieces: Sequence[Piece], saved: Checkpoint, slots: Set[str]) -> None:
    """Refuses a checkpoint without what this run's optimizer goes on from: it would begin anew beside trained weights. What
    the optimizer that wrote it does not keep cannot be there: who takes another one begins its part anew, and is told.

    Only this rank's pieces: ranks agree on a refusal later.
    """
    wrote = setting(saved.manifest.run.get("config"), "Optimizer.name")
    expected = slots & slots_of(wrote) if wrote is not None else slots
    for piece in pieces:
        if piece.tensor.stop_gradient:
            continue
        for slot in sorted(expected):
            if _lacks(saved, piece, slot):
                rule = f"it has no {slot} of {piece.name}, from which {config.Optimizer.name} goes on"
                anew = "-o Engine.save_load.strict=false begins anew what is missing"
                fix = f"{anew}; weights_only=true takes the weights into a new run"
                raise UserError(Problem(KEY, str(saved.path), rule, fix))


def _same_places(engine: Engine, saved: Checkpoint) -> bool:
    """Whether every rank has the place in the layout that it had: only then are random streams the right ones for it."""
    run, topology = saved.manifest.run, engine.context.topology
    order = setting(run.get("config"), "Distributed.order") or ()
    cut = [axis for axis in topology.order if topology.degrees[axis] > 1]
    return run.get("layout") == topology.degrees and [axis for axis in order if axis in cut] == cut


def _seed_after(seed: int, consumed_samples: int) -> int:
    """A seed for a run that goes on under another layout: a function of both, far from the seeds in use."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{consumed_samples}".encode()).digest()[:6], "big")
