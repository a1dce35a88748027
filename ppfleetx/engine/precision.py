"""Mixed precision: float16 with a loss scaler, bfloat16, levels O1 and O2; float32 on a CPU."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import paddle
from paddle import nn

from ppfleetx.config.schema import MixPrecisionConfig

logger = logging.getLogger("ppfleetx")


class Precision:
    """How forward and backward compute.

    Args:
        section: `Engine.mix_precision`.
        device: device kind; on "cpu" the section is set aside with one warning, since Paddle has no half kernels there.
    """

    def __init__(self, section: MixPrecisionConfig, device: str):
        self.section = section
        self.enabled = section.enable and device != "cpu"
        if section.enable and not self.enabled:
            logger.warning("mixed precision does not exist on a CPU: running in float32")
        dynamic = self.enabled and section.dtype == "float16"
        self.scaler = paddle.amp.GradScaler(init_loss_scaling=section.scale_loss) if dynamic else None

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

    def decorate(self, model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> None:
        """At level O2 casts the parameters in place; the optimizer then keeps float32 masters."""
        if self.enabled and self.section.level == "O2":
            paddle.amp.decorate(
                models=model, optimizers=optimizer, level="O2", dtype=self.section.dtype, master_weight=True
            )

    def scale(self, loss: paddle.Tensor) -> paddle.Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def loss_scale(self) -> float:
        """The present loss scale (1 without a scaler)."""
        return 1.0 if self.scaler is None else float(self.scaler.state_dict()["scale"].item())

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state as plain numbers; {} without one."""
        if self.scaler is None:
            return {}
        return {
            name: value.item() if hasattr(value, "item") else value for name, value in self.scaler.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        if self.scaler is not None and state:
            tensors = {"scale": paddle.to_tensor([state["scale"]], dtype="float32")}
            self.scaler.load_state_dict({**state, **tensors})


def parameter_dtype(section: MixPrecisionConfig, device: str) -> str:
    """The type of the model's parameters: half at level O2, else float32."""
    half = section.enable and section.level == "O2" and device != "cpu"
    return section.dtype if half else "float32"
