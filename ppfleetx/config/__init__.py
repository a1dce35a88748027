"""One YAML file (and its bases, overlays and overrides) → one frozen, checked, typed configuration."""

from ppfleetx.config.api import Config, Loaded, load_config, nodes_of_launch, world_size_of_launch
from ppfleetx.config.errors import EXIT_USER_ERROR, Problem, UserError

__all__ = [
    "EXIT_USER_ERROR",
    "Config",
    "Loaded",
    "Problem",
    "UserError",
    "load_config",
    "nodes_of_launch",
    "world_size_of_launch",
]
