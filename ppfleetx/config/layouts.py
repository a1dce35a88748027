"""Layout strings: axes and degrees one after another, `mp2pp4`, `sharding2s3` (stage), `mp2sp` (sequence parallel), `pp4vpp2`,
`sep2`, `…rc` (recompute)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ppfleetx.config.errors import Problem, UserError

_WORD = re.compile(r"(dp|mp|pp|sharding|sep|vpp)(\d+)|(s)([123])|(sp)|(rc)")
_KEYS = {
    "dp": "Distributed.dp_degree",
    "mp": "Distributed.mp_degree",
    "pp": "Distributed.pp_degree",
    "sharding": "Distributed.sharding.sharding_degree",
    "sep": "Distributed.sep_degree",
    "vpp": "Model.virtual_pp_degree",
    "s": "Distributed.sharding.sharding_stage",
}
_SWITCHES = {"sp": "Model.sequence_parallel=true", "rc": "Model.use_recompute=true"}


@dataclass(frozen=True)
class Layout:
    """A layout as overrides of a configuration.

    Attributes:
        name: the string.
        world_size: processes it takes.
        overrides: `-o` pairs that set it, every degree included.
    """

    name: str
    world_size: int
    overrides: tuple[str, ...]


def parse_layout(text: str, key: str = "--layouts") -> Layout:
    """`mp2pp2sp` → Layout.

    Raises:
        UserError: the string does not have that form, or names an axis twice.
    """
    values: dict[str, str] = dict.fromkeys(("dp", "mp", "pp", "sharding", "sep", "vpp"), "1")
    seen: list[str] = []
    switches = []
    at = 0
    while at < len(text):
        found = _WORD.match(text, at)
        if found is None or not found.group():
            rule = "a layout is written as axes and degrees one after another, such as mp2pp4, sharding2s3, mp2sp, pp4vpp2rc"
            raise UserError(Problem(key, text, f"{rule}; {text[at:]!r} is none of these"))
        name = next(group for group in (found[1], found[3], found[5], found[6]) if group)
        if name in seen:
            raise UserError(Problem(key, text, f"{name} stands twice"))
        seen.append(name)
        if name in _SWITCHES:
            switches.append(_SWITCHES[name])
        else:
            values[name] = found[2] or found[4]
        at = found.end()
    degrees = [int(values[axis]) for axis in ("dp", "mp", "pp", "sharding", "sep")]
    pairs = [f"{_KEYS[name]}={value}" for name, value in values.items()]
    return Layout(text, math.prod(degrees), (*pairs, *switches))
