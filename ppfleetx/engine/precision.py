"""Mixed precision: float16 with a loss scaler, bfloat16, levels O1 and O2; float32 on a CPU."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import paddle

from ppfleetx.config.schema import MixPrecisionConfig

logger = logging.getLogger("ppfleetx")


class LossScaler:
    """The factor that keeps float16's gradients off zero (Micikevicius et al. 2018, section 3.2).

    By Paddle's rule it is halved by an overflow and doubled after 2000 updates without one.

    Not Paddle's own: it tells of an overflow by a conversion that NumPy 2.4 refuses (Paddle 3.3.1), and looks at the gradients
    of its own rank, where a step knows already from the norm whether those of all ranks are finite.

    Losses are divided by the tokens of the global batch, so that gradients on one rank are smaller by the data degree than
    those of the rank's own mean, which `scale_loss` is meant for; so the scale is larger by it.

    Args:
        scale: first scale, for the mean over the tokens of one data rank.
        data_degree: data ranks.

    Attributes:
        scale: present factor on losses.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, scale: float, data_degree: int):
        self._data_degree = data_degree
        self.scale = scale * data_degree
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """After each update: `finite` says whether the gradients of all ranks were."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self._good_steps == self.GROWTH_INTERVAL:
            self.scale *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; the scale as for one data rank, so that it fits any number of them."""
        return {"scale_per_data_rank": self.scale / self._data_degree, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        self.scale = state["scale_per_data_rank"] * self._data_degree
        self._good_steps = state["good_steps"]


class Precision:
    """How forward and backward compute.

    Args:
        section: `Engine.mix_precision`.
        device: device kind; on "cpu" the section is set aside with one warning, since Paddle has no half kernels there.
        data_degree: data ranks of the run.

    Attributes:
        enabled: half precision is used.
        scaler: of float16; None: nothing is scaled.
    """

    def __init__(self, section: MixPrecisionConfig, device: str, data_degree: int):
        self.section = section
        self.enabled = section.enable and device != "cpu"
        if section.enable and not self.enabled:
            logger.warning("mixed precision does not exist on a CPU: running in float32")
        scaled = self.enabled and section.dtype == "float16"
        self.scaler = LossScaler(section.scale_loss, data_degree) if scaled else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context that forward runs in."""
        if not self.enabled:
            return contextlib.nullcontext()
        return paddle.amp.auto_cast(
            enable=True,
            custom_white_list=self.section.custom_white_list,
            custom_black_list=self.section.custom_black_list,
            level=self.section.level,
            dtype=self.section.dtype,
        )

    def scale(self, loss: paddle.Tensor) -> paddle.Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def loss_scale(self) -> float:
        """The present loss scale (1 without a scaler)."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state as plain numbers; {} without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave; {} leaves a scaler as it is."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def parameter_dtype(section: MixPrecisionConfig, device: str) -> str:
    """The type of the model's parameters: half at level O2, else float32."""
    half = section.enable and section.level == "O2" and device != "cpu"
    return section.dtype if half else "float32"
