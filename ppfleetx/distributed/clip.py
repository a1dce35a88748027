"""The global gradient norm, and clipping by it (Pascanu et al. 2013)."""

from __future__ import annotations

from collections.abc import Iterable

import paddle


def global_norm(parameters: Iterable[paddle.Tensor]) -> paddle.Tensor:
    """L2 norm over all gradients, float32 [], each parameter once. No communication: gradients are whole on every rank."""
    with paddle.no_grad():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return paddle.stack([gradient.astype("float32").square().sum() for gradient in gradients]).sum().sqrt()


def scale_gradients(parameters: Iterable[paddle.Tensor], factor: float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    with paddle.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.scale_(factor)
