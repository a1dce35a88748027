"""One YAML file (and its bases, overlays and overrides) → one frozen, checked, typed configuration."""

from ppfleetx.config.api import Config, Loaded, load_config
from ppfleetx.config.errors import EXIT_USER_ERROR, Problem, UserError
from ppfleetx.config.launch import (
    check_launch,
    local_size_of_launch,
    nodes_of_launch,
    rank_of_launch,
    world_size_of_launch,
)

__all__ = [
    "EXIT_USER_ERROR",
    "Config",
    "Loaded",
    "Problem",
    "UserError",
    "check_launch",
    "load_config",
    "local_size_of_launch",
    "nodes_of_launch",
    "rank_of_launch",
    "world_size_of_launch",
]
