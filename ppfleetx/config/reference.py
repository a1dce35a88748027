"""Writes the reference page of every key: `python -m ppfleetx.config.reference > configs/README.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ppfleetx.config.coerce import default_of, has_default, hints, to_tree, without_none
from ppfleetx.config.derive import Derived
from ppfleetx.config.elsewhere import ELSEWHERE
from ppfleetx.config.fields import Bounds
from ppfleetx.config.schema import Number, Sections

_HEAD = """# Every key of a run

Generated from `ppfleetx/config/schema.py` by `python -m ppfleetx.config.reference > configs/README.md`; do not edit.

- A file may name a `_base_` (a path relative to itself); its mappings are merged into the base's key by key, anything
  else replaces; `_inherited_: False` inside a mapping makes it replace too.
- `-c` may be given several times, each file laid over the one before; `-o Section.key=value …` comes last; list items
  are set by index (`-o Data.Train.dataset.split.0=900`).
- An empty value (null, `None`) means the default, or, where the table says "null: …", the value worked out so.
- `--dry-run` prints the resolved file, `--explain KEY` says where a value comes from.

**Bold** keys are required. Values worked out from others stand under `_derived` in the resolved file.
"""

_TYPES: dict[Any, str] = {int: "int", float: "float", Number: "number", bool: "bool", str: "text", Any: "value"}


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for path, cls in _sections(Sections, ""):
        if path:
            doc = (cls.__doc__ or "").strip().splitlines()[0]
            parts.append(f"\n## {path}\n\n{doc}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
            parts.extend(_rows(cls))
    parts.append("\n## _derived\n\nWorked out once; not set by hand.\n\n| value | meaning |\n|---|---|\n")
    parts.extend(f"| {field.name} | {_meaning(field)} |\n" for field in dataclasses.fields(Derived))
    parts.append("\n## Known, but not here\n\nKeys of PaddleFleetX that are refused with these words.\n\n")
    parts.append("| key | answer |\n|---|---|\n")
    parts.extend(f"| {name} | {answer} |\n" for name, answer in ELSEWHERE.items())
    return "".join(parts)


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    yield path, cls
    for field in dataclasses.fields(cls):
        inner, _ = without_none(hints(cls)[field.name])
        if dataclasses.is_dataclass(inner):
            name = f"{path}.{field.name}" if path else field.name
            if name in ("Data.Eval", "Data.Test"):
                continue  # the same keys as Data.Train
            yield from _sections(inner, name)  # type: ignore[arg-type]


def _rows(cls: type) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        inner, _ = without_none(hints(cls)[field.name])
        if dataclasses.is_dataclass(inner):
            absent = " (absent: off)" if field.default is None else ""
            yield f"| {field.name} | section | | {_meaning(field)}{absent} |\n"
            continue
        name = field.name if has_default(field) else f"**{field.name}**"
        default = _show(to_tree(default_of(field))) if has_default(field) else ""
        yield f"| {name} | {_type(inner, field.metadata['bounds'])} | {default} | {_meaning(field)} |\n"


def _show(value: Any) -> str:
    return "null" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(field: dataclasses.Field[Any]) -> str:
    text = f"{field.metadata['family']}: " if field.metadata.get("family") else ""
    text += field.metadata["doc"]
    if field.metadata.get("unit"):
        text += f" [{field.metadata['unit']}]"
    if field.metadata.get("derived"):
        text += f"; null: {field.metadata['derived']}"
    return text


def _type(annotation: Any, bounds: Bounds) -> str:
    items = getattr(annotation, "__args__", None)
    if getattr(annotation, "__origin__", None) is list and items:
        text = f"list of {bounds.length or ''} {_TYPES[items[0]]}".replace("  ", " ")
    else:
        text = _TYPES.get(annotation, "mapping")
    if bounds.choices is not None:
        return text + ": " + ", ".join(str(choice) for choice in bounds.choices)
    limits = [("≥ ", bounds.at_least), ("> ", bounds.above), ("< ", bounds.below)]
    texts = [text, *(f"{sign}{limit:g}" for sign, limit in limits if limit is not None)]
    return " or ".join([", ".join(texts), *bounds.words])


if __name__ == "__main__":
    print(page(), end="")
