"""What a plain YAML scalar means.

As OmegaConf reads them (`1e-4` is a number), with four differences, so that no text is silently turned into something
else: octal (`010`) and sexagesimal (`12:30`) forms stay text, `yes`/`no`/`on`/`off` stay text (a bool key still takes
them), `None` is null. Dates stay text as well, and so does every key of a mapping.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, TextIO

import yaml

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|None|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
# longer ones stay text: Python refuses to convert some thousand digits
_INT = re.compile(r"(?:[-+]?(?:0|[1-9][0-9_]{0,99})|0x[0-9a-fA-F][0-9a-fA-F_]{0,99}|0b[01][01_]{0,99})\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:0|[1-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?(?:0|[1-9][0-9_]*)[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


class ScalarLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` with the scalars above; refuses duplicate keys, deep nesting and all but the plain tags."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # both filled below
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > 40:
            raise yaml.composer.ComposerError(
                None, None, "it is nested more than 40 deep", self.peek_event().start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be one word", name.start_mark)
            if name.value in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {name.value!r} stands twice", name.start_mark)
            seen.add(name.value)
        return node


def _construct_scalar(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    value = parse_scalar(str(loader.construct_scalar(node)))
    if isinstance(value, str):
        raise _wrong(node, f"{value!r} does not fit its tag {node.tag}")
    return value


def _construct_map(loader: yaml.SafeLoader, node: yaml.Node) -> dict[str, Any]:
    """Keys as they are written; what `<<` merges gives way to the mapping's own keys, and a later one to an earlier."""
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, f"this does not fit its tag {node.tag}")
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value_node in node.value:
        value = loader.construct_object(value_node, deep=True)
        if name.tag != _TAG + "merge":
            own[name.value] = value
            continue
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise _wrong(value_node, "<< merges mappings only")
            merged = {**one, **merged}
    return {**merged, **own}


def _wrong(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _name, _pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
    ScalarLoader.add_implicit_resolver(_TAG + _name, _pattern, None)
    ScalarLoader.add_constructor(_TAG + _name, _construct_scalar)
ScalarLoader.add_implicit_resolver(_TAG + "merge", re.compile(r"<<\Z"), ["<"])
ScalarLoader.add_constructor(_TAG + "str", lambda loader, node: loader.construct_scalar(node))
ScalarLoader.add_constructor(_TAG + "seq", lambda loader, node: loader.construct_sequence(node, deep=True))
ScalarLoader.add_constructor(_TAG + "map", _construct_map)
ScalarLoader.add_constructor(None, yaml.SafeLoader.construct_undefined)


def read_yaml(stream: str | TextIO) -> Any:
    """The one document of a YAML file or text.

    Raises:
        yaml.YAMLError: it is not valid, for whatever reason.
    """
    try:
        return yaml.load(stream, Loader=ScalarLoader)  # noqa: S506 (a SafeLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # bytes that are not UTF-8, characters that do not exist
        raise yaml.YAMLError(str(error)) from None


def parse_scalar(text: str) -> bool | int | float | str | None:
    """The value of a plain scalar written as `text`."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""), 0)
    if _FLOAT.match(text):
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def parse_bool_word(text: str) -> bool | None:
    """The bool that a word of YAML 1.1 stands for (`yes`, `Off`, …), or None."""
    return _WORDS.get(text.lower())


def parse_value(text: str) -> Any:
    """The value of a command line `KEY=VALUE`: a plain scalar, or a quoted text, list or mapping in YAML's flow form.

    Raises:
        yaml.YAMLError: the flow form is not closed or not valid.
    """
    text = text.strip()
    return read_yaml(text) if text[:1] in ("[", "{", '"', "'") else parse_scalar(text)
