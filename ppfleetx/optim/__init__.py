"""Optimizers and learning rate schedules; schedules need no Paddle."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppfleetx.optim.optimizer import build_optimizer, load_optimizer_state, optimizer_state
    from ppfleetx.optim.schedules import Schedule, build_schedule

_MODULE_OF = {
    "build_optimizer": "optimizer",
    "load_optimizer_state": "optimizer",
    "optimizer_state": "optimizer",
    "Schedule": "schedules",
    "build_schedule": "schedules",
}

__all__ = ["Schedule", "build_optimizer", "build_schedule", "load_optimizer_state", "optimizer_state"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
