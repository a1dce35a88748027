"""The training loop. Names load on first use (PEP 562), so that the command line needs no Paddle to show a config."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppfleetx.engine.alike import open_data_alike, settings
    from ppfleetx.engine.data import RunData, open_data, section_to_evaluate
    from ppfleetx.engine.engine import Engine
    from ppfleetx.engine.step import edges_of, make_model, make_trainable, stage_of

_MODULE_OF = {
    "Engine": "engine",
    "RunData": "data",
    "edges_of": "step",
    "make_model": "step",
    "make_trainable": "step",
    "open_data": "data",
    "section_to_evaluate": "data",
    "open_data_alike": "alike",
    "settings": "alike",
    "stage_of": "step",
}

__all__ = [
    "Engine",
    "RunData",
    "edges_of",
    "make_model",
    "make_trainable",
    "open_data",
    "open_data_alike",
    "section_to_evaluate",
    "settings",
    "stage_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
