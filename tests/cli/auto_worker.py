"""Prints what `auto` degrees came to on this rank."""

from __future__ import annotations

import sys

from ppfleetx.engine import command

loaded = command._load(command.parser("").parse_args(sys.argv[1:]))
layout = loaded.config.Distributed
print("DEGREES", layout.mp_degree, layout.sharding.sharding_degree, flush=True)
