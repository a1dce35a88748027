"""Files and overrides → one plain tree, with the origin of every value.

Order: `-c` files from the first to the last, each laid over its `_base_` and then over what stands already; then `-o`
pairs from the first to the last. A mapping is merged key by key; anything else (list, scalar, null) replaces what was
there; `_inherited_: False` in a mapping makes it replace as well.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppfleetx.config.coerce import default_list
from ppfleetx.config.errors import Problem, UserError
from ppfleetx.config.scalars import parse_bool_word, parse_value, read_yaml

#: origin of each value by dotted path: (where it was set, the value), the last one won
Origins = dict[str, list[tuple[str, Any]]]

_PACKAGE = Path(__file__).resolve().parents[1]
# OmegaConf gives `${…}` and `???` a meaning of its own; a character that no path or name can hold takes it away
_SHIELD = "\0"


def load_tree(paths: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """Reads `-c` files and applies `-o` pairs.

    Args:
        paths: YAML files, each laid over the one before.
        overrides: `Key.sub=value` texts, split at the first `=`.

    Raises:
        UserError: a file is missing or is no YAML mapping, a pair has no `=`, a list index is out of range, …
    """
    problems: list[Problem] = []
    origins: Origins = {}
    tree = OmegaConf.create({})
    for path in paths:
        try:
            for file, layer in _read_layers(path, ()):
                tree = _lay_over(tree, layer)
                _note_origins(origins, layer, str(file))
        except UserError as error:
            problems.extend(error.problems)
    for pair in overrides:
        try:
            _override(tree, pair, origins)
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(*problems)
    return _unshield(OmegaConf.to_container(tree)), origins


def find_path(path: str) -> Path:
    """`path` itself, or, for a missing one that begins with `configs/` or `ppfleetx/configs/`, its place in the package."""
    parts = [part for part in Path(path).parts if part != "."]
    if parts[:1] == ["ppfleetx"]:
        parts = parts[1:]
    inside = _PACKAGE.joinpath(*parts)
    return inside if parts[:1] == ["configs"] and not os.path.exists(path) and inside.exists() else Path(path)


def _read_layers(path: str, above: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The file's bases, outermost first, then the file itself."""
    file = find_path(path)
    if file.resolve() in above:
        chain = " → ".join(str(one) for one in (*above, file.resolve()))
        raise UserError(Problem("_base_", path, f"a file cannot be its own base: {chain}"))
    layer = _read_yaml(file, "_base_" if above else "-c", path)
    base = layer.pop("_base_", None)
    if base is not None:
        if not isinstance(base, str) or "\0" in base:
            raise UserError(Problem(f"{file}: _base_", base, "one path is wanted here, relative to the file's folder"))
        yield from _read_layers(str(file.parent / base), (*above, file.resolve()))
    yield file, layer


def _read_yaml(file: Path, key: str, path: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            layer = read_yaml(stream)
    except FileNotFoundError:
        near = sorted(one.name for one in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        raise UserError(
            Problem(key, path, "there is no such file", f"in that folder: {', '.join(near)}" if near else "")
        ) from None
    except OSError as error:
        raise UserError(Problem(key, path, f"the file cannot be read: {error.strerror}")) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(Problem(key, path, f"the file is not valid YAML: {_in_one_line(error)}")) from None
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise UserError(Problem(key, path, "the file must hold a mapping of sections"))
    return layer


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(getattr(error, "problem", None) or error).split())
    mark = getattr(error, "problem_mark", None)
    return text if mark is None else f"{text} (line {mark.line + 1}, column {mark.column + 1})"


def _lay_over(tree: DictConfig, layer: dict[str, Any]) -> DictConfig:
    if _replaces(layer):
        tree = OmegaConf.create({})
    _make_room(tree, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return OmegaConf.unsafe_merge(tree, _shield(_strip_markers(layer)))  # type: ignore[return-value]


def _make_room(tree: DictConfig, layer: dict[str, Any]) -> None:
    """Clears what `layer` replaces: OmegaConf would merge all mappings and refuse a list on a mapping."""
    for name, value in layer.items():
        old = tree.get(name)
        if isinstance(value, dict) and isinstance(old, DictConfig) and not _replaces(value):
            _make_room(old, value)
        elif OmegaConf.is_config(old):
            tree[name] = None


def _replaces(layer: dict[str, Any]) -> bool:
    """Whether a mapping replaces what stands there (`_inherited_: False`) rather than being merged into it."""
    marker = layer.get("_inherited_", True)
    inherited = parse_bool_word(marker) if isinstance(marker, str) else marker
    if not isinstance(inherited, bool):
        raise UserError(Problem("_inherited_", marker, "true or false is wanted here"))
    return not inherited


def _strip_markers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strip_markers(item) for name, item in value.items() if name != "_inherited_"}
    return value


def _override(tree: DictConfig, pair: str, origins: Origins) -> None:
    path, equals, text = pair.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")) or "[" in path or "]" in path:
        raise UserError(
            Problem("-o", pair, "an override is KEY=VALUE, the key written Section.key, an item of a list key.0")
        )
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        raise UserError(Problem(path, text, f"the value is not valid YAML: {_in_one_line(error)}")) from None
    _check_list_index(tree, path, text)
    try:
        _set(tree, path, _shield(value))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(Problem(path, text, "this key cannot be set: " + str(error).splitlines()[0])) from None
    _forget(origins, path)
    _note_origins(origins, value, f"-o {pair}", path)


def _set(tree: DictConfig, path: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        OmegaConf.update(tree, path, value, merge=False, force_add=True)


def _check_list_index(tree: DictConfig, path: str, text: str) -> None:
    """Refuses an index that is not in its list, which OmegaConf reports without key or length."""
    node: Any = tree
    names = path.split(".")
    for depth, name in enumerate(names):
        if OmegaConf.is_list(node):
            if not name.isdecimal() or int(name) >= len(node):
                where = ".".join(names[:depth])
                allowed = f"index {name} is not in 0..{len(node) - 1}" if len(node) else f"there is no index {name}"
                raise UserError(Problem(path, text, f"{where} is a list of length {len(node)}; {allowed}"))
            node = node[int(name)]
        else:
            node = node.get(name) if OmegaConf.is_dict(node) else None
        here, last = ".".join(names[: depth + 1]), depth + 1 == len(names)
        if node is None and not last and (default := default_list(here)) is not None:
            _set(tree, here, default)  # an index into a list that no file set
            node = OmegaConf.create(default)


def _note_origins(origins: Origins, value: Any, source: str, path: str = "") -> None:
    if isinstance(value, dict):
        if _replaces(value):
            _forget(origins, path)
        for name, item in value.items():
            if name != "_inherited_":
                _note_origins(origins, item, source, f"{path}.{name}" if path else name)
    else:
        _forget(origins, path)
        origins.setdefault(path, []).append((source, value))


def _forget(origins: Origins, path: str) -> None:
    """Drops the origins of what stood below `path`, since all of it is being replaced."""
    for known in [known for known in origins if not path or known.startswith(path + ".")]:
        del origins[known]


def _shield(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shield(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shield(item) for item in value]
    if isinstance(value, str) and ("${" in value or value == "???"):
        return _SHIELD + value.replace("${", "$" + _SHIELD + "{")
    return value


def _unshield(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unshield(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unshield(item) for item in value]
    return value.replace(_SHIELD, "") if isinstance(value, str) else value
