"""`load_config`: the one way from files and overrides to a `Config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ppfleetx.config.coerce import build, to_tree
from ppfleetx.config.derive import Derived, Deriver
from ppfleetx.config.errors import UserError
from ppfleetx.config.load import Origins, load_tree
from ppfleetx.config.rules import check, warn
from ppfleetx.config.scalars import ScalarLoader
from ppfleetx.config.schema import Sections


@dataclass(frozen=True, kw_only=True)
class Config(Sections):
    """The YAML sections, plus what follows from them."""

    derived: Derived

    def to_yaml(self) -> str:
        """The resolved tree as YAML; as a `-c` file it gives the same run (`_derived` is then ignored)."""
        tree = to_tree(self)
        tree["_derived"] = tree.pop("derived")
        return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Mappings one key a line, lists on one line, quotes where our or another reader would not see text as text."""


for _first, _resolvers in ScalarLoader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _Dumper.add_implicit_resolver(_tag, _pattern, [_first])


def _represent_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = None if value.isprintable() else '"'  # only this style keeps every kind of line break
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True)
class Loaded:
    """A configuration and how it came about.

    Attributes:
        config: the configuration.
        warnings: what the user should know; one process prints them.
        origins: for each key path, where it was set, in order; the last one won.
        reasons: for each derived value (by name) and forced key (by path), how it was worked out.
    """

    config: Config
    warnings: tuple[str, ...]
    origins: Origins
    reasons: Mapping[str, str]


def load_config(
    paths: Sequence[str], overrides: Sequence[str] = (), world_size: int = 1, num_nodes: int | None = 1
) -> Loaded:
    """Reads, merges, types, checks and completes a configuration. Imports no Paddle.

    Args:
        paths: `-c` files, each laid over the one before.
        overrides: `-o` pairs, `Key.sub=value`.
        world_size: number of processes of the run.
        num_nodes: machines that they run on, for degrees that are `auto`; None: unevenly.

    Raises:
        UserError: with all problems found.
    """
    tree, origins = load_tree(paths, overrides)
    sections, problems = build(tree)
    deriver = Deriver(sections, world_size, num_nodes)
    derived = deriver.run()
    problems += deriver.problems + check(deriver.sections, derived)
    if problems:
        raise UserError(*problems)
    values: dict[str, Any] = {name: getattr(deriver.sections, name) for name in Sections.__dataclass_fields__}
    warnings = (*deriver.warnings, *warn(deriver.sections, derived))
    return Loaded(Config(**values, derived=derived), warnings, origins, deriver.reasons)
