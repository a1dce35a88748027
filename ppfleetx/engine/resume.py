"""What a checkpoint of a run holds, how it is put back, and the ledger that says so."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle
import yaml

import ppfleetx
from ppfleetx.checkpoint.files import move_aside, write_text
from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.manager import KEY
from ppfleetx.checkpoint.reader import SCALAR_SLOTS, Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.checkpoint.writer import TrainingState
from ppfleetx.config import Config, Problem, UserError
from ppfleetx.distributed import seed_streams
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.progress import Progress
from ppfleetx.models.gpt.spec import parameters
from ppfleetx.optim.optimizer import MASTER, load_optimizer_state, optimizer_state, slots_of

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

logger = logging.getLogger("ppfleetx")


def capture(engine: Engine) -> TrainingState:
    """The state of this rank's run, as it stands between two updates; no communication."""
    return TrainingState(
        pieces=engine.trainable.pieces(),
        optimizer=optimizer_state(engine.optimizer, engine.trainable.named),
        streams=engine.tracker.state_dict(),
        progress={**asdict(engine.progress), "scaler": engine.train_step.precision.state_dict()},
        run={
            "layout": dict(engine.context.topology.degrees),
            "config": yaml.safe_load(engine.config.to_yaml()),
            "versions": {
                "ppfleetx": ppfleetx.__version__,
                "paddle": paddle.__version__,
                "python": platform.python_version(),
            },
        },
    )


def restore(engine: Engine, path: Path) -> None:
    """Puts back the checkpoint at `path`, whatever layout wrote it; every rank must call it. No communication.

    Raises:
        UserError: the checkpoint does not fit the model; nothing was changed.
    """
    saved = _open(engine.config, path)
    _restore_tensors(engine, saved)
    engine.trainable.after_load()
    progress = dict(saved.manifest.progress)
    engine.train_step.precision.load_state_dict(progress.pop("scaler"))
    engine.progress = Progress(**progress)
    topology, seed = engine.context.topology, engine.config.Global.seed
    if _same_layout(engine, saved):
        engine.tracker.load_state_dict(saved.streams(topology.device_rank))
    else:
        seed_streams(topology, _seed_after(seed, engine.progress.consumed_samples))
        engine.tracker.set_init_seed(seed)
    logger.info("%s", ledger(engine, saved))


def ledger(engine: Engine, saved: Checkpoint) -> str:
    """The table of what was restored and from where, what was not, and what changed in the config since."""
    progress, manifest = engine.progress, saved.manifest
    before, now = manifest.run["config"], yaml.safe_load(engine.config.to_yaml())
    files = len({entry.file for entry in manifest.entries})
    layouts = f"{_layout(before, manifest.run['layout'])} → {_layout(now, engine.context.topology.degrees)}"
    lines = [
        f"resumed from {saved.path}",
        f"  step               {progress.step}",
        f"  consumed samples   {progress.consumed_samples}",
        f"  weights            {len(saved.shapes())} tensors",
        f"  optimizer          {_optimizer_line(engine.config, saved)}",
        f"  shards             {files} file{'s' if files > 1 else ''}, layout {layouts}",
        f"  random streams     {'to the bit' if _same_layout(engine, saved) else 'seeded anew: the layout is another one'}",
    ]
    for key, (old, new) in sorted(_differences(before, now).items()):
        if not key.startswith(("_derived", KEY)):
            lines.append(f"  config changed     {key}: {old!r} → {new!r}")
    return "\n".join(lines)


def settle_output_dir(engine: Engine) -> None:
    """Makes `output_dir` this run's: what it does not continue is moved into `previous-N`, never written over.

    A fresh start moves everything that an earlier run left; a resume keeps what it continues and moves the checkpoints of
    later steps, which `auto` would otherwise take for its own.
    """
    folder, resumed_from = engine.output_dir, engine.resumed_from
    folder.mkdir(parents=True, exist_ok=True)
    steps = engine.checkpoints.steps()
    continues = resumed_from is not None and resumed_from.resolve().parent == folder.resolve()
    if continues:
        assert resumed_from is not None
        stale = [step for step in steps if step.name > resumed_from.name]
    else:
        stale = [*steps, folder / "metrics.jsonl", folder / "visualdl", folder / "config.yaml"]
    if (moved := move_aside(stale, folder)) is not None:
        logger.warning("%s holds an earlier run; what this one does not continue was moved to %s", folder, moved)
    write_text(folder / "config.yaml", engine.config.to_yaml())


def _open(config: Config, path: Path) -> Checkpoint:
    """The checkpoint at `path`; UserError if it is one of another model, naming the first parameter and both shapes."""
    try:
        saved = Checkpoint(path)
    except Damaged as error:
        raise UserError(Problem(KEY, str(path), str(error))) from None
    specs = [spec for spec in parameters(config).values() if spec.tied_to is None]
    wanted = {name: shape for spec in specs for name, shape in stored_shapes(spec).items()}
    if (difference := _difference(saved.shapes(), wanted)) is not None:
        raise UserError(Problem(KEY, str(path), difference))
    return saved


def _difference(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str | None:
    """How the parameters in a checkpoint differ from the model's, by the first that does; None if they do not."""
    for name, shape in wanted.items():
        if name not in found:
            return f"it has no parameter {name}, which the model has with shape {list(shape)}"
        if found[name] != shape:
            return f"{name} has shape {list(found[name])} in it and {list(shape)} in the model"
    extra = min(found.keys() - wanted.keys(), default=None)
    return extra and f"it has the parameter {extra} with shape {list(found[extra])}, which the model lacks"


def _restore_tensors(engine: Engine, saved: Checkpoint) -> None:
    """Weights and optimizer states of this rank. UserError if the files cannot be read."""
    wanted = {"", MASTER, *_restorable(engine.config, saved)}
    optimizer: dict[str, paddle.Tensor] = {}
    try:
        for piece in engine.trainable.pieces():
            slots = _restore_weight(piece, _read(piece, saved, wanted))
            optimizer |= {f"{piece.name}.{slot}": value for slot, value in slots.items()}
    except (Damaged, OSError) as error:
        raise UserError(Problem(KEY, str(saved.path), f"the checkpoint is damaged: {error}")) from None
    load_optimizer_state(engine.optimizer, engine.trainable.named, optimizer)


def _restorable(config: Config, saved: Checkpoint) -> frozenset[str]:
    """The slots of this run's optimizer, if the checkpoint has all of them; none otherwise: it starts anew."""
    needed = slots_of(config.Optimizer.name)
    return needed if needed <= saved.all_slots() else frozenset()


def _optimizer_line(config: Config, saved: Checkpoint) -> str:
    """What was restored of the optimizer, for the ledger."""
    needed, restored = slots_of(config.Optimizer.name), _restorable(config, saved)
    if not needed:
        return f"nothing to restore: {config.Optimizer.name} keeps nothing"
    if not restored:
        lacks = ", ".join(sorted(needed - saved.all_slots()))
        return f"not restored: {config.Optimizer.name} starts anew, the checkpoint lacks {lacks}"
    return f"{len({entry.key for entry in saved.manifest.entries if entry.slot in restored})} tensors"


def _read(piece: Piece, saved: Checkpoint, wanted: Set[str]) -> dict[str, paddle.Tensor]:
    """What is stored for a piece, by slot; "" is the weight."""
    values = {}
    for slot in wanted & saved.slots(piece.tensor.spec):
        memory = saved.read_piece(piece.tensor.spec, piece.box, piece.flat, slot)
        shape = [1] if slot in SCALAR_SLOTS else piece.tensor.shape
        values[slot] = paddle.to_tensor(memory.reshape(shape))  # uint16 becomes bfloat16
    return values


def _restore_weight(piece: Piece, slots: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Sets a piece's weight, in place; returns what is left for the optimizer. Between runs in half and in full precision the
    float32 values go on: a master weight becomes the weight, or the weight the master."""
    weight, dtype = slots.pop(""), piece.tensor.dtype
    exact = slots.pop(MASTER, weight)
    piece.tensor.copy_(weight if weight.dtype == dtype else exact.astype(dtype), True)
    if exact.dtype == paddle.float32 and dtype != paddle.float32:
        slots[MASTER] = exact
    return slots


def _same_layout(engine: Engine, saved: Checkpoint) -> bool:
    """Random streams are restored only where the degrees of all axes are the same."""
    return saved.manifest.run["layout"] == engine.context.topology.degrees


def _layout(config: dict[str, Any], degrees: dict[str, int]) -> str:
    """The layout string, such as dp2mp2sp or sharding2s3."""
    degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
    stage = config["Distributed"]["sharding"]["sharding_stage"]
    names = [f"{axis}{degree}{f's{stage}' if axis == 'sharding' else ''}" for axis, degree in degrees.items()]
    return "".join(names) + ("sp" if config["Model"]["sequence_parallel"] else "") or "one process"


def _seed_after(seed: int, consumed_samples: int) -> int:
    """A seed for a run that goes on under another layout: a function of both, far from the seeds in use."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{consumed_samples}".encode()).digest()[:6], "big")


def _differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in sorted({*old, *new}):
            found |= _differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
        return found
    return {} if old == new else {path: (old, new)}
