"""The model families: `Config.Model.name` names one, and here it is found. Imports no Paddle; each part loads on first use.

A family is a package beside this file: `spec.py` is the model on paper (without Paddle), `pieces.py` what it computes, `hf.py`
its Hugging Face form.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppfleetx.config import Config
from ppfleetx.config.schema import FAMILIES
from ppfleetx.layers.spec import ParameterSpec

if TYPE_CHECKING:
    from ppfleetx.distributed import RNGStatesTracker
    from ppfleetx.layers.edges import Edges
    from ppfleetx.models.hf import HFForm
    from ppfleetx.models.pieces import PieceList


def parameters(config: Config) -> dict[str, ParameterSpec]:
    """All logical parameters by name, in model order."""
    found: dict[str, ParameterSpec] = _module(config, "spec").parameters(config)
    return found


def num_parameters(config: Config) -> int:
    """Parameters of the model, vocabulary padding included, tied weights once."""
    return sum(spec.size for spec in parameters(config).values())


def flops_per_token(config: Config, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token (recomputation not counted, as in model FLOPs).

    6 for each weight of a matmul (2 forward, 4 backward) plus the attention products, 12·L·h·s
    (Chowdhery et al. 2022, PaLM, appendix B). A tied matrix counts once, as the head.
    """
    weights = sum(spec.size for spec in parameters(config).values() if len(spec.shape) == 2 and not spec.is_lookup)
    return 6 * weights + 12 * config.Model.num_layers * config.Model.hidden_size * seq_len


def summary(config: Config) -> str:
    """One line for people: the size of the model and of the run."""
    count = num_parameters(config)
    derived = config.derived
    return (
        f"{count:,} parameters ({count / 1e9:.2f} B), {derived.world_size} processes, "
        f"{derived.global_batch_size} samples an update in {derived.accumulate_steps} micro-batches"
    )


def build_model(
    config: Config, tracker: RNGStatesTracker, edges: Edges | None = None, stage: tuple[int, int] = (0, 1)
) -> PieceList:
    """This rank's part of the model, weights from the tracker's init streams.

    The first stage takes ids int64 [b, s], the last gives logits [s, b, V/mp], between stages goes [s, b, h].

    Args:
        config: the run's configuration.
        tracker: the random streams, seeded.
        edges: where values are cut over groups; None: nowhere.
        stage: (number, count) of pipeline stages.
    """
    from ppfleetx.layers.edges import Edges  # needs Paddle

    model: PieceList = _module(config, "pieces").PieceMaker(config, tracker, edges or Edges()).model(stage)
    return model


def hf_forms() -> tuple[HFForm, ...]:
    """How each family looks in Hugging Face's files."""
    return tuple(import_module(f"ppfleetx.models.{family.lower()}.hf") for family in dict.fromkeys(FAMILIES.values()))


def _module(config: Config, part: str) -> Any:
    return import_module(f"ppfleetx.models.{config.Model.family.lower()}.{part}")
