"""Float32 values that the optimizer updates instead of the model's parameters (Micikevicius et al. 2018, section 3.1).

Private names of Paddle, seen in 3.3.1: see sharding_unit.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle
from paddle.base.framework import EagerParamBase

if TYPE_CHECKING:
    from paddle import Tensor


class Master(EagerParamBase):
    """Float32 values of a parameter, or of a part of it, without memory yet.

    Args:
        parameter: of the model.
        shape: of these values.

    Attributes:
        spec: the parameter's logical description.
    """

    def __init__(self, parameter: Tensor, shape: Sequence[int]):
        trainable = not parameter.stop_gradient
        super().__init__(shape=list(shape), dtype="float32", name=parameter.name, trainable=trainable)
        self.spec = parameter.spec
        self.optimize_attr = parameter.optimize_attr


class WholeMaster(Master):
    """All of a parameter. The model's keeps the values in the type it computes in, its gradients go on here, in float32.

    With main gradients each backward pass adds the parameter's complete gradient to `.grad` here and leaves none there: a
    half-precision sum of many micro-batches would lose the small ones. Without, it is taken once an update. Local.

    The optimizer knows of float32 parameters only. Paddle's own masters (`multi_precision`, 3.3.1) take the loss scale out of
    half-precision gradients, where small ones become zero, and start from rounded values.

    Paddle's own main gradients (`MixPrecisionLayer`, 3.3.1) are never reduced in pure data parallel; these are ordinary
    gradients of ordinary parameters, and are reduced as such.

    Args:
        parameter: of the model, whose values are taken; afterwards of type `dtype`.
        dtype: type that the model computes in.
        main_gradients: whether they are kept.
    """

    def __init__(self, parameter: Tensor, dtype: str, main_gradients: bool):
        super().__init__(parameter, parameter.shape)
        _copy(parameter, "float32")._share_buffer_to(self)
        _copy(self, dtype)._share_buffer_to(parameter)
        self._parameter = parameter
        if main_gradients and not parameter.stop_gradient:
            myself = weakref.ref(self)  # what a hook holds, Python's garbage collection cannot see
            parameter._register_backward_hook(lambda *_: _collect(myself()))

    def publish(self) -> None:
        """Gives the model's parameter the present values, rounded to its type."""
        self._parameter.copy_(self.detach().astype(self._parameter.dtype), True)

    def collect(self) -> None:
        """Adds the parameter's gradient, if there is one, to the one here and takes it away."""
        gradient = self._parameter.grad
        if gradient is None:
            return
        with paddle.no_grad():
            if self.grad is None:
                self._copy_gradient_from(_copy(gradient, "float32"))
            else:
                self.grad.add_(gradient.astype("float32"))
        self._parameter.clear_gradient(False)


def _copy(tensor: Tensor, dtype: str) -> Tensor:
    """In that type; `astype` alone gives the same memory where the type is the same."""
    tensor = tensor.detach()
    return tensor.clone() if str(tensor.dtype) == f"paddle.{dtype}" else tensor.astype(dtype)


def _collect(master: WholeMaster | None) -> None:
    if master is not None:
        master.collect()
