"""What a checkpoint of a run holds, how it is put back, and the ledger that says so."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import paddle
import yaml

import ppfleetx
from ppfleetx.checkpoint.compare import differences
from ppfleetx.checkpoint.inspect import layout_name, written_by
from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.manager import KEY
from ppfleetx.checkpoint.reader import SCALAR_SLOTS, Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.checkpoint.snapshot import TrainingState, dtype_of, memory_of
from ppfleetx.config import Config, Problem, UserError
from ppfleetx.distributed import seed_streams
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.data import RunData
from ppfleetx.engine.progress import Progress
from ppfleetx.models.registry import parameters
from ppfleetx.optim.optimizer import MASTER, initial_slot, load_optimizer_state, optimizer_state, slots_of

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

T = TypeVar("T")

#: samples that the ledger's hash tells of
NEXT_SAMPLES = 32

#: keys that may change on purpose (a longer context), and without which the weights are not the model that was saved
ARITHMETIC = ("Model.rope_theta", "Model.rope_scaling", "Model.rms_norm_eps")

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
            "next_samples": _next_samples(engine.progress, data),
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
    slots = frozenset() if starts_anew or weights_only else _restorable(engine.config, saved)
    optimizer = _checked(saved, lambda: read_optimizer(engine.config, engine.trainable.pieces(), saved, slots))

    def put() -> None:
        _checked(saved, lambda: read_weights(engine.trainable.pieces(), saved))
        engine.trainable.after_load()
        load_optimizer_state(engine.optimizer, engine.trainable.named, optimizer)
        if not starts_anew and saved.manifest.progress:
            _put_progress(engine, saved)
        logger.info("%s", ledger(engine, saved, data, slots))

    return put


def _put_progress(engine: Engine, saved: Checkpoint) -> None:
    """Counters, scaler and random streams."""
    progress = dict(saved.manifest.progress)
    engine.train_step.precision.load_state_dict(progress.pop("scaler"))
    engine.progress = Progress(**progress)
    topology, seed = engine.context.topology, engine.config.Global.seed
    if _same_layout(engine, saved):
        engine.tracker.load_state_dict(saved.streams(topology.device_rank))
    else:
        seed_streams(topology, _seed_after(seed, engine.progress.consumed_samples))
        engine.tracker.set_init_seed(seed)


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


def ledger(engine: Engine, saved: Checkpoint, data: RunData, slots: Set[str]) -> str:
    """The table of what was restored and from where, what was not, and what changed in the config since."""
    progress, run = engine.progress, saved.manifest.run
    now = yaml.safe_load(engine.config.to_yaml())
    before = run.get("config") or {}  # of another program's weights only the section Model
    files = len({entry.file for entry in saved.manifest.entries})
    there, here = written_by(saved.manifest), layout_name(now, engine.context.topology.degrees)
    anew = engine.config.Engine.save_load.weights_only
    rows = {
        "step": progress.step,
        "consumed samples": progress.consumed_samples,
        "next samples": _samples_line(_next_samples(progress, data), run.get("next_samples"), anew),
        "weights": _weights_line(engine.config, saved),
        "optimizer": "not restored" if anew else _optimizer_line(engine.config, saved, slots),
        "shards": f"{files} file{'s' if files > 1 else ''}, layout {there} → {here}",
        "random streams": _streams_line(engine, saved, anew),
    }
    lines = [f"{'new run with the weights of' if anew else 'resumed from'} {saved.path}"]
    lines += [f"  {name:<18} {value}" for name, value in rows.items()]
    for key, (old, new) in sorted(differences(before, {section: now.get(section) for section in before}).items()):
        if not key.startswith(("_derived", KEY)):
            note = ": the same weights compute something else" if key.startswith(ARITHMETIC) else ""
            lines.append(f"  config changed     {key}: {old!r} → {new!r}{note}")
    return "\n".join(lines)


def _open(config: Config, path: Path) -> Checkpoint:
    """The checkpoint at `path`; UserError if it is one of another model, naming the first parameter and both shapes."""
    try:
        saved = Checkpoint(path)
    except Damaged as error:
        raise UserError(Problem(KEY, str(path), str(error))) from None
    if (difference := _difference(saved.shapes(), _wanted(config), config.Engine.save_load.strict)) is not None:
        raise UserError(Problem(KEY, str(path), difference))
    heads, now = _model_of(saved).get("num_attention_heads"), config.Model.num_attention_heads
    if heads not in (None, now):  # no shape tells of it
        rule = f"in {path} it is {heads}, and its matrices cut into other heads are another model"
        raise UserError(Problem("Model.num_attention_heads", now, rule, f"Model.num_attention_heads={heads}"))
    return saved


def _model_of(saved: Checkpoint) -> Mapping[str, Any]:
    """The section Model of what wrote a checkpoint, resolved; empty if it is not told."""
    return (saved.manifest.run.get("config") or {}).get("Model") or {}


def _wanted(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this model holds: name to shape."""
    specs = [spec for spec in parameters(config).values() if spec.tied_to is None]
    return {name: shape for spec in specs for name, shape in stored_shapes(spec).items()}


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
    """The slots of this run's optimizer, if the checkpoint has all of them; none otherwise: it starts anew."""
    needed = slots_of(config.Optimizer.name)
    return needed if needed <= saved.all_slots() else frozenset()


def _weights_line(config: Config, saved: Checkpoint) -> str:
    """How many tensors were restored; with strict off, which ones were not."""
    found, wanted = saved.shapes().keys(), _wanted(config).keys()
    line = f"{len(found & wanted)} tensors"
    if missing := sorted(wanted - found):
        line += f"; {len(missing)} as initialised, {missing[0]} first"
    if extra := sorted(found - wanted):
        line += f"; {len(extra)} not used, {extra[0]} first"
    return line


def _optimizer_line(config: Config, saved: Checkpoint, restored: Set[str]) -> str:
    """What was restored of the optimizer."""
    needed = slots_of(config.Optimizer.name)
    if not needed:
        return f"nothing to restore: {config.Optimizer.name} keeps nothing"
    if lacks := sorted(needed - saved.all_slots()):
        return f"not restored: {config.Optimizer.name} starts anew, the checkpoint lacks {', '.join(lacks)}"
    if not restored:
        return "not restored: only weights were wanted"
    return f"{len({entry.key for entry in saved.manifest.entries if entry.slot in restored})} tensors"


def _streams_line(engine: Engine, saved: Checkpoint, anew: bool) -> str:
    """What became of the random streams."""
    if anew or not saved.manifest.progress:
        return "as for a new run"
    return "to the bit" if _same_layout(engine, saved) else "seeded anew: the layout is another one"


def _samples_line(now: str, before: str | None, anew: bool) -> str:
    """The hash of the next samples, and whether it is the one that was saved."""
    if anew or before is None:
        return now
    return f"{now}, as saved" if now == before else f"{now}, saved {before}: the data or their order changed"


def _next_samples(progress: Progress, data: RunData) -> str:
    """A hash of which samples of the corpus come next: epoch and place of the following few."""
    first = progress.consumed_samples
    places = [data.train.place_of(index) for index in range(first, first + NEXT_SAMPLES)]
    return hashlib.sha256(repr(places).encode()).hexdigest()[:12]


def _same_layout(engine: Engine, saved: Checkpoint) -> bool:
    """Random streams are restored only where the degrees of all axes are the same."""
    return saved.manifest.run["layout"] == engine.context.topology.degrees


def _seed_after(seed: int, consumed_samples: int) -> int:
    """A seed for a run that goes on under another layout: a function of both, far from the seeds in use."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{consumed_samples}".encode()).digest()[:6], "big")
