"""From a plain tree to the typed sections of the schema, collecting every problem on the way."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from typing import Any

import yaml

from ppfleetx.config.elsewhere import ELSEWHERE
from ppfleetx.config.errors import Problem
from ppfleetx.config.fields import Bounds
from ppfleetx.config.scalars import parse_bool_word, parse_scalar, read_yaml
from ppfleetx.config.schema import Number, Sections
from ppfleetx.config.unknown import UNKNOWN


class _Wrong(Exception):
    """A value that does not fit its key: the rule that it breaks, and a fix."""

    def __init__(self, rule: str, fix: str = ""):
        self.rule, self.fix = rule, fix


def build(tree: dict[str, Any]) -> tuple[Sections, list[Problem]]:
    """The typed sections of `tree`, and everything in it that breaks a rule of a single key.

    A key or section with a problem is `UNKNOWN`, so that later rules can still be checked where they do not need it.
    """
    problems: list[Problem] = []
    return _build_section(Sections, tree, "", problems), problems


def to_tree(value: Any) -> Any:
    """The plain tree (dicts, lists, scalars) of typed sections, the inverse of `build`."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_tree(item) for item in value]
    return value


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of a section."""
    return typing.get_type_hints(cls)


def without_none(annotation: Any) -> tuple[Any, bool]:
    """`X | None` → (X, True); another annotation → (itself, False)."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return members[0], True
    return annotation, False


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether the key may be absent."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of a key that is absent or null."""
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return tuple(value) if isinstance(value, list) else value


def _build_section(cls: type, tree: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(tree, dict):
        problems.append(Problem(path, tree, "this is a section: it holds keys, not a single value"))
        return UNKNOWN
    fields = {field.name: field for field in dataclasses.fields(cls)}
    meant = {_report_unknown(cls, path, name, tree[name], problems) for name in tree if name not in fields}
    values = {}
    for name, field in fields.items():
        if name in meant and name not in tree:
            values[name] = UNKNOWN  # misspelt rather than missing
        else:
            values[name] = _build_field(field, hints(cls)[name], tree.get(name), _join(path, name), problems)
    return cls(**values)


def _build_field(field: dataclasses.Field[Any], annotation: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    inner, _ = without_none(annotation)
    if dataclasses.is_dataclass(inner):
        if value is None and field.default is None:
            return None
        return _build_section(inner, {} if value is None else value, path, problems)  # type: ignore[arg-type]
    if value is None:
        if has_default(field):
            return default_of(field)
        problems.append(Problem(path, None, f"this key is required: {field.metadata['doc']}", f"-o {path}=…"))
        return UNKNOWN
    bounds: Bounds = field.metadata["bounds"]
    if isinstance(value, str) and value.strip().lower() in bounds.words:
        return value.strip().lower()
    try:
        return _check_bounds(_coerce(value, inner), bounds)
    except _Wrong as wrong:
        problems.append(Problem(path, value, wrong.rule, wrong.fix))
        return UNKNOWN


def _coerce(value: Any, annotation: Any) -> Any:
    """`value` as the annotated type; text that stands for a number, bool or list counts as such where one is wanted."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return value
    if origin is list:
        return _coerce_list(value, typing.get_args(annotation)[0])
    if origin is dict:
        if isinstance(value, dict):
            return value
        raise _Wrong("a mapping is wanted here")
    if isinstance(value, (dict, list)):
        raise _Wrong(
            f"one {_NAMES[annotation]} is wanted here, not a {'list' if isinstance(value, list) else 'mapping'}"
        )
    converters = {int: _coerce_int, float: _coerce_float, Number: _coerce_number, bool: _coerce_bool, str: _coerce_str}
    return converters[annotation](value)


_NAMES: dict[Any, str] = {
    int: "whole number", float: "number", Number: "number", bool: "true or false", str: "text", Any: "value"
}  # fmt: skip


def _coerce_list(value: Any, item: Any) -> tuple[Any, ...]:
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = read_yaml(value)
        except yaml.YAMLError:
            raise _Wrong(f"a list is wanted here, each item a {_NAMES[item]}, and this is not a valid one") from None
    if not isinstance(value, (list, tuple)):
        raise _Wrong(
            f"a list is wanted here, each item a {_NAMES[item]}", "" if isinstance(value, dict) else f"[{value}]"
        )
    return tuple(_coerce(one, item) for one in value)


def _coerce_int(value: Any) -> int:
    number = _coerce_number(value, "whole number")
    if isinstance(number, int):
        return number
    if not number.is_integer():
        raise _Wrong("a whole number is wanted here")
    return int(_coerce_number(int(number)))


def _coerce_float(value: Any) -> float:
    return float(_coerce_number(value))


def _coerce_number(value: Any, wanted: str = "number") -> int | float:
    number = parse_scalar(value.strip()) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _Wrong(f"a {wanted} is wanted here")
    if isinstance(number, float) and not math.isfinite(number):
        raise _Wrong("a finite number is wanted here")
    if isinstance(number, int) and abs(number) >= 2**63:
        raise _Wrong("a number below 2^63 is wanted here")
    return number


def _coerce_bool(value: Any) -> bool:
    if isinstance(value, str):
        value = parse_bool_word(value.strip())
    if not isinstance(value, bool):
        raise _Wrong("true or false is wanted here")
    return value


def _coerce_str(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # a folder called 2024, say; floats and bools would not come back as they were written
    if not isinstance(value, str):
        raise _Wrong("text is wanted here", f'write it in quotes: "{value}"')
    return value


def _check_bounds(value: Any, bounds: Bounds) -> Any:
    if bounds.length is not None and len(value) != bounds.length:
        raise _Wrong(f"a list of exactly {bounds.length} items is wanted here, not {len(value)}")
    if isinstance(value, tuple):
        return tuple(_check_item(item, bounds) for item in value)
    return value if isinstance(value, dict) else _check_item(value, bounds)


def _check_item(value: Any, bounds: Bounds) -> Any:
    if bounds.choices is not None:
        for choice in bounds.choices:
            if value == choice or (isinstance(value, str) and value.lower() == str(choice).lower()):
                return choice
        raise _Wrong(
            "allowed are " + ", ".join(str(choice) for choice in bounds.choices), did_you_mean(value, bounds.choices)
        )
    if bounds.at_least is not None and value < bounds.at_least:
        raise _Wrong(f"must be at least {bounds.at_least}")
    if bounds.above is not None and value <= bounds.above:
        raise _Wrong(f"must be above {bounds.above}")
    if bounds.below is not None and value >= bounds.below:
        raise _Wrong(f"must be below {bounds.below}")
    return value


def _nearest(value: Any, candidates: typing.Iterable[Any]) -> str | None:
    """The candidate most like `value`, without regard to case, or None if none is like it."""
    by_lower = {str(candidate).lower(): str(candidate) for candidate in candidates}
    close = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def did_you_mean(value: Any, candidates: typing.Iterable[Any]) -> str:
    """A fix for a misspelt value, or an empty text."""
    near = _nearest(value, candidates)
    return f"did you mean {near}?" if near else ""


def _report_unknown(cls: type, section: str, name: str, value: Any, problems: list[Problem]) -> str | None:
    """Reports a key that `section` does not have; returns the key of the section that it was probably meant to be."""
    path = _join(section, name)
    if path == "_derived":
        return None  # what an earlier run worked out; it is worked out anew
    if path in ELSEWHERE:
        if not _is_off(value):
            problems.append(Problem(path, value, ELSEWHERE[path], "remove the key"))
        return None
    if path in key_paths():
        problems.append(
            Problem(path, value, "in a file a section and its keys are nested, not joined by a dot", "nest them")
        )
        return None
    siblings = [field.name for field in dataclasses.fields(cls)]
    near = next((sibling for sibling in siblings if sibling.lower() == name.lower()), None)
    namesakes = [] if near else [known for known in key_paths() if known.endswith("." + name)]
    namesakes.sort(key=lambda known: not known.startswith(section + "."))
    near = near or (None if namesakes else _nearest(name, siblings))
    if namesakes or near:
        fix = f"did you mean {namesakes[0] if namesakes else _join(section, near)}?"
    else:
        fix = did_you_mean(path, key_paths()) or "known here: " + ", ".join(siblings)
    problems.append(Problem(path, value, "there is no such key", fix))
    return near


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return ("enable" in value and _is_off(value["enable"])) or all(_is_off(item) for item in value.values())
    return not value or (isinstance(value, str) and parse_bool_word(value) is False)


@functools.cache
def key_paths() -> tuple[str, ...]:
    """The dotted paths of all keys of the schema, sections included, in its order."""

    def walk(cls: type, path: str) -> typing.Iterator[str]:
        for field in dataclasses.fields(cls):
            inner, _ = without_none(hints(cls)[field.name])
            yield _join(path, field.name)
            if dataclasses.is_dataclass(inner):
                yield from walk(inner, _join(path, field.name))  # type: ignore[arg-type]

    return tuple(walk(Sections, ""))


def default_list(path: str) -> list[Any] | None:
    """The default of the list key at `path` (null counts as empty), or None if there is no such list key."""
    cls: Any = Sections
    *sections, name = path.split(".")
    for part in sections:
        cls = without_none(hints(cls).get(part))[0]
        if not dataclasses.is_dataclass(cls):
            return None
    if typing.get_origin(without_none(hints(cls).get(name))[0]) is not list:
        return None
    return list(default_of({field.name: field for field in dataclasses.fields(cls)}[name]) or ())


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
