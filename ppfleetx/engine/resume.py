"""What a checkpoint of a run holds, how it is put back, and the ledger that says so."""

from __future__ import annotations

import hashlib
import logging
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
import yaml

import ppfleetx
from ppfleetx.checkpoint.files import move_aside, write_text
from ppfleetx.checkpoint.manager import KEY, TrainingState, layout
from ppfleetx.config import Problem, UserError
from ppfleetx.distributed import seed_streams
from ppfleetx.engine.progress import Progress
from ppfleetx.optim.optimizer import load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

logger = logging.getLogger("ppfleetx")


def capture(engine: Engine) -> TrainingState:
    """The state of this rank's run, as it stands between two updates; no communication."""
    return TrainingState(
        weights=dict(engine.trainable.named),
        optimizer=optimizer_state(engine.optimizer, engine.trainable.named),
        streams=engine.tracker.state_dict(),
        progress={**asdict(engine.progress), "scaler": engine.train_step.precision.state_dict()},
        run={
            "layout": layout(engine.context),
            "config": yaml.safe_load(engine.config.to_yaml()),
            "versions": {
                "ppfleetx": ppfleetx.__version__,
                "paddle": paddle.__version__,
                "python": platform.python_version(),
            },
        },
    )


def restore(engine: Engine, path: Path) -> None:
    """Puts back the checkpoint at `path`; every rank must call it.

    Raises:
        UserError: the checkpoint does not fit the model; nothing was changed.
    """
    state = engine.checkpoints.load(path)
    _check_fit(engine, state, path)
    for name, parameter in engine.trainable.named.items():
        parameter.set_value(state.weights[name].astype(parameter.dtype))
    load_optimizer_state(engine.optimizer, engine.trainable.named, state.optimizer)
    engine.train_step.precision.load_state_dict(state.progress.pop("scaler"))
    engine.progress = Progress(**state.progress)
    seed = engine.config.Global.seed
    if state.streams is not None:
        engine.tracker.load_state_dict(state.streams)
    else:
        seed_streams(engine.context.topology, _seed_after(seed, engine.progress.consumed_samples))
        engine.tracker.set_init_seed(seed)
    logger.info("%s", ledger(engine, state, path))


def ledger(engine: Engine, state: TrainingState, path: Path) -> str:
    """The table of what was restored and from where, what was not, and what changed in the config since."""
    progress = engine.progress
    streams = "to the bit" if state.streams is not None else "seeded anew: the layout is another one"
    lines = [
        f"resumed from {path}",
        f"  step               {progress.step}",
        f"  consumed samples   {progress.consumed_samples}",
        f"  weights            {len(state.weights)} tensors",
        f"  optimizer          {len(state.optimizer)} tensors",
        f"  random streams     {streams}",
    ]
    before, now = state.run["config"], yaml.safe_load(engine.config.to_yaml())
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


def fingerprint(engine: Engine) -> str:
    """Hash of the weights, padding excluded: equal if and only if they are bit-equal (sha256 of float32 values by name)."""
    digest = hashlib.sha256()
    for name, parameter in sorted(engine.trainable.named.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(parameter.astype("float32").numpy()[: parameter.spec.rows]).tobytes())
    return digest.hexdigest()[:16]


def _check_fit(engine: Engine, state: TrainingState, path: Path) -> None:
    """Refuses a checkpoint of another model, naming the first parameter that differs and both shapes."""
    for name, parameter in engine.trainable.named.items():
        found = state.weights.get(name)
        if found is None:
            raise UserError(
                Problem(KEY, str(path), f"it has no parameter {name}, which the model has with shape {parameter.shape}")
            )
        if list(found.shape) != list(parameter.shape):
            raise UserError(
                Problem(KEY, str(path), f"{name} has shape {found.shape} in it and {parameter.shape} in the model")
            )
    extra = sorted(set(state.weights) - set(engine.trainable.named))
    if extra:
        shape = state.weights[extra[0]].shape
        raise UserError(
            Problem(KEY, str(path), f"it has the parameter {extra[0]} with shape {shape}, which the model lacks")
        )


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
