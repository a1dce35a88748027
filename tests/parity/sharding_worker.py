"""Trains the tiny model in several layouts one after another, in one process or as one of several, without checkpoints.

Each run leaves in its folder what every rank saw: losses, gradient norms, collectives of each update, and its pieces of the
weights. `python sharding_worker.py JSON` with {name: overrides} and a folder; tests call `run` for the one-process side.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleetx.config import load_config
from ppfleetx.config.load import world_size_of_launch
from ppfleetx.data import Batch
from ppfleetx.distributed import ParallelContext, get_rng_state_tracker, seed_streams
from ppfleetx.engine import Engine, check_supported, command, edges_of, make_trainable, open_data, stage_of
from ppfleetx.engine.debug import Fault
from ppfleetx.models.gpt.pieces import build_model
from ppfleetx.optim import build_optimizer
from ppfleetx.optim.schedules import build_schedule
