"""Runs command lines like worker.py; after every update compares the copies of each parameter that several ranks hold."""

from __future__ import annotations

import json
import sys

import paddle
import paddle.distributed as dist

from ppfleetx.engine.engine import Engine
from tools.train import main

_update = Engine._update
counted = {"mp": 0, "tied": 0}


def equal_over(group, parameter):
    """Whether all members hold the same bits."""
    copies: list[paddle.Tensor] = []
    dist.all_gather(copies, parameter.detach(), group=group)
    return all(bool((copy == copies[0]).all()) for copy in copies)


def update_and_compare(self, *arguments):
    result = _update(self, *arguments)
    for name, parameter in self.trainable.named.items():
        mp, tied = self.context.group("mp"), self.context.tied_group
        if mp is not None and parameter.spec.mp_dim is None:
            assert equal_over(mp, parameter), f"{name} differs over mp after step {self.progress.step}"
            counted["mp"] += 1
        if tied is not None and parameter.spec.at_both_ends:
            assert equal_over(tied, parameter), f"{name} differs over stages after step {self.progress.step}"
            counted["tied"] += 1
    return result


Engine._update = update_and_compare
codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
print("COUNTED", json.dumps(counted), flush=True)
raise SystemExit(max(codes))
