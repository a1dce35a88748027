"""The ledger of a resume: one table of what was restored and from where, what was not, and what changed since."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import yaml

from ppfleetx.checkpoint.compare import differences
from ppfleetx.checkpoint.inspect import layout_name, written_by
from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.manager import KEY
from ppfleetx.checkpoint.reader import MASTER, Checkpoint
from ppfleetx.config import Config
from ppfleetx.distributed.cpu import CpuUse, in_use
from ppfleetx.engine.progress import Stored
from ppfleetx.models.registry import parameters
from ppfleetx.optim.optimizer import slots_of

if TYPE_CHECKING:
    from ppfleetx.engine.data import RunData
    from ppfleetx.engine.engine import Engine

#: keys that may change on purpose (a longer context), and without which the weights are not the model that was saved
_ARITHMETIC = ("Model.rope_theta", "Model.rope_scaling", "Model.rms_norm_eps")

#: derived values that are said as well: they decide what an update is, and may change though no key of the YAML does
_DERIVED = {"global_batch_size": "Global.global_batch_size", "decay_steps": "Optimizer.lr.decay_steps"}


def wanted_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this model holds: name to shape."""
    specs = [spec for spec in parameters(config).values() if spec.tied_to is None]
    return {name: shape for spec in specs for name, shape in stored_shapes(spec).items()}


def ledger(
    engine: Engine, saved: Checkpoint, data: RunData, slots: Set[str], streams: str, stored: Stored | None
) -> str:
    """The table of what was restored and from where, what was not, and what changed in the config since.

    Args:
        slots: what was wanted of the optimizer.
        streams: what became of the random streams.
        stored: what the checkpoint tells of the progress; None: it was not wanted.
    """
    progress, run = engine.progress, saved.manifest.run
    now = yaml.safe_load(engine.config.to_yaml())
    before = run.get("config") or {}  # of another program's weights only the section Model
    files = len({entry.file for entry in saved.manifest.entries})
    there, here = written_by(saved.manifest), layout_name(now, engine.context.topology.degrees)
    anew = engine.config.Engine.save_load.weights_only
    rows = {
        "step": progress.step,
        "consumed samples": progress.consumed_samples,
        "next samples": _samples_line(data.next_samples(progress.consumed_samples), run.get("next_samples"), anew),
        "weights": _weights_line(engine.config, saved),
        "optimizer": "not restored" if anew else _optimizer_line(engine.config, saved, slots),
        "shards": f"{files} file{'s' if files > 1 else ''}, layout {there} → {here}",
        "random streams": streams,
    }
    if stored is not None:
        rows |= _version_rows(stored)
    if not anew and engine.config.Global.device == "cpu":
        rows["CPU"] = _cpu_line(in_use(engine.config), CpuUse.read(run.get("cpu")))
    lines = [f"{'new run with the weights of' if anew else 'resumed from'} {saved.path}"]
    lines += [f"  {name:<18} {value}" for name, value in rows.items()]
    for key, (old, new) in _changes(before, now):
        note = ": the same weights compute something else" if key.startswith(_ARITHMETIC) else ""
        lines.append(f"  config changed     {key}: {old!r} → {new!r}{note}")
    return "\n".join(lines)


def _version_rows(stored: Stored) -> dict[str, str]:
    """What a checkpoint of another version of ppfleetx has more or less of."""
    rows = {}
    if stored.unknown:
        rows["unknown counters"] = f"{', '.join(stored.unknown)}: of a newer version, skipped"
    if stored.lacking:
        rows["new counters"] = f"{', '.join(stored.lacking)}: not in this checkpoint, as in a new run"
    return rows


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    """(key, (old, new)) of what changed in the sections that `before` has; for `_DERIVED` what came out."""
    found = differences(before, {section: now.get(section) for section in before})
    changes = {key: pair for key, pair in found.items() if not key.startswith(("_derived", KEY))}
    for name, key in _DERIVED.items():
        if (pair := found.get(f"_derived.{name}")) is not None:
            changes[key] = pair
    return sorted(changes.items())


def _weights_line(config: Config, saved: Checkpoint) -> str:
    """How many tensors were restored; with strict off, which ones were not."""
    found, wanted = saved.shapes().keys(), wanted_shapes(config).keys()
    line = f"{len(found & wanted)} tensors"
    if missing := sorted(wanted - found):
        line += f"; {len(missing)} as initialised, {missing[0]} first"
    if extra := sorted(found - wanted):
        line += f"; {len(extra)} not used, {extra[0]} first"
    return line


def _optimizer_line(config: Config, saved: Checkpoint, wanted: Set[str]) -> str:
    """What was restored of the optimizer; with strict off, of how many parameters it begins anew."""
    name, names = config.Optimizer.name, wanted_shapes(config)
    if not slots_of(name):
        return f"nothing to restore: {name} keeps nothing"
    if not wanted:
        return "not restored: only weights were wanted"
    lacking = [each for each in names if not wanted <= saved.slots_of(each)]
    if len(lacking) == len(names):
        return f"not restored: {name} starts anew, the checkpoint lacks {', '.join(sorted(wanted - saved.all_slots()))}"
    count = sum(len(wanted) for each in names if each not in lacking)
    # a frozen parameter has nothing to restore, and is not told from others here
    line = f"{count} tensors" + (f"; none for {len(lacking)} parameters, {lacking[0]} first" if lacking else "")
    unknown = saved.all_slots() - wanted - {"", MASTER}
    return line + (f"; not known to {name}, skipped: {', '.join(sorted(unknown))}" if unknown else "")


def _samples_line(now: str, before: str | None, anew: bool) -> str:
    """The hash of the next samples, and whether it is the one that was saved."""
    if anew or before is None:
        return now
    return f"{now}, as saved" if now == before else f"{now}, saved {before}: the data or their order changed"


def _cpu_line(now: CpuUse, before: CpuUse | None) -> str:
    """What is computed with; "to the bit" holds for the same threads and kernels."""
    if now == before:
        return f"{now}, as saved"
    return f"{before or 'not saved'} → {now}: the last bits of what is computed may differ"
