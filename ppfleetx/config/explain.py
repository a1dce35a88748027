"""`--explain KEY`: which file, override or rule a value comes from."""

from __future__ import annotations

import dataclasses

from ppfleetx.config.api import Loaded
from ppfleetx.config.coerce import did_you_mean, key_paths, to_tree
from ppfleetx.config.derive import Derived
from ppfleetx.config.errors import Problem, UserError


def explain(loaded: Loaded, key: str) -> str:
    """The value of `key` (a dotted path, or the name of a derived value), its meaning and every place that set it.

    Raises:
        UserError: there is no such key.
    """
    derived = {field.name: field for field in dataclasses.fields(Derived)}
    path = key.removeprefix("_derived.")
    if path in derived:
        return "\n".join(_derived_lines(loaded, path, derived[path].metadata["doc"]))
    node, doc = _find(loaded, key)
    lines = [f"{key} = {to_tree(node)!r}", f"  meaning: {doc}"]
    set_by = [
        f"  set by:  {source} → {value!r}" + ("" if at == key else f" ({at})")
        for at, history in sorted(loaded.origins.items(), key=lambda item: item[0].count("."))
        if f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")
        for source, value in history
    ]
    lines += set_by or ["  set by:  default"]
    if key in loaded.reasons:
        lines.append(f"  forced:  {loaded.reasons[key]}")
    name = key.rpartition(".")[2]
    if name in derived and node is None:
        lines += _derived_lines(loaded, name, "")
    return "\n".join(lines)


def _derived_lines(loaded: Loaded, name: str, doc: str) -> list[str]:
    lines = [f"_derived.{name} = {to_tree(getattr(loaded.config.derived, name))!r}"]
    if doc:
        lines.append(f"  meaning: {doc}")
    return [*lines, f"  derived: {loaded.reasons[name]}"]


def _find(loaded: Loaded, key: str) -> tuple[object, str]:
    node: object = loaded.config
    doc, names = "", key.split(".")
    for depth, name in enumerate(names):
        if dataclasses.is_dataclass(node) and name in node.__dataclass_fields__ and name != "derived":
            doc = node.__dataclass_fields__[name].metadata["doc"]
            node = getattr(node, name)
        elif isinstance(node, tuple) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        elif node is None and key in key_paths():
            raise UserError(
                Problem("--explain", key, f"{'.'.join(names[:depth])} is absent, so what it stands for is off")
            )
        else:
            raise UserError(Problem("--explain", key, "there is no such key", did_you_mean(key, key_paths())))
    return node, doc
