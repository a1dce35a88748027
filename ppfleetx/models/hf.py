"""What a family says of its Hugging Face form: the names of the tensors, and config.json. Imports no Paddle.

`models/<family>/hf.py` is a module in the form of `HFForm`; `ppfleetx/convert/hf.py` does the work for all families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ppfleetx.config.errors import Problem


@dataclass(frozen=True)
class Link:
    """A tensor of theirs, and what it is of ours.

    Attributes:
        theirs: its full name, `transformer.h.7.attn.c_attn.weight`.
        ours: names of the tensors in our files (query, key and value are three there) that it holds side by side, along
            our last dim, without vocabulary padding.
        transposed: theirs is [out, in], as torch's Linear has it; ours are [in, out].
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


class Section(NamedTuple):
    """What a config.json is as a section `Model`.

    Attributes:
        model: the keys to set, all that matter to what the model computes: they are laid over a config that may have others.
        notes: what the user should know: settings of theirs that are dropped without changing what the model computes.
    """

    model: dict[str, Any]
    notes: list[str]


class HFForm(Protocol):
    """A module that says how one family looks there.

    Attributes:
        MODEL_TYPE: `model_type` of config.json.
        NAMES: our `Model.name`s of the family.
        PREFIX: what names lack in files of the model without its head (`transformer.`).
        NO_WEIGHTS: names (after PREFIX) of tensors that hold no weights: masks that old versions stored.
    """

    MODEL_TYPE: str
    NAMES: tuple[str, ...]
    PREFIX: str
    NO_WEIGHTS: re.Pattern[str]

    def links(self, model: Mapping[str, Any]) -> Sequence[Link]:
        """All tensors of the section `Model`, in their order."""

    def tied(self, model: Mapping[str, Any]) -> Mapping[str, str]:
        """Names that files may repeat: theirs → the linked name whose values it must have."""

    def to_config(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of a section `Model` (resolved, as a checkpoint has it)."""

    def from_config(self, config: Mapping[str, Any]) -> Section:
        """The section `Model` of a config.json. UserError names every key that we cannot represent."""


def required(config: Mapping[str, Any], names: Sequence[str]) -> list[Problem]:
    """A problem for each whole number that config.json must give and does not."""
    problems = []
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            rule = "config.json lacks it" if name not in config else "it must be a whole number above 0"
            problems.append(Problem(f"config.json: {name}", value, rule))
    return problems


def fitting(config: Mapping[str, Any], options: Mapping[str, tuple[str, Any]]) -> list[Problem]:
    """A problem for each option that is given and is not of the kind of its default: true or false, or a number.

    Args:
        options: key of ours → (key of theirs, default).
    """
    problems = []
    for name, default in options.values():
        value = config.get(name, default)
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, (bool, int, float)):
            rule = "it must be true or false" if isinstance(default, bool) else "it must be a number"
            problems.append(Problem(f"config.json: {name}", value, rule))
    return problems


def only(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> list[Problem]:
    """A problem for each key that is given with a value that our model does not compute."""
    return [
        Problem(
            f"config.json: {name}", config[name], f"our model computes {name} = {' or '.join(map(repr, values))} only"
        )
        for name, values in allowed.items()
        if name in config and config[name] not in values
    ]
