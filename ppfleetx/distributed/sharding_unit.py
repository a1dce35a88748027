"""A unit of sharded parameters: they lie end to end in one flat buffer, which is cut evenly over a group.

Each rank owns one cut, in float32. The model's own parameters are shells: pointed into the gathered buffer before they are
needed, emptied when they are not. Autograd holds a parameter, not its memory, so emptying it after the forward pass frees
the memory at once, and pointing it at a new buffer is all that the backward pass needs.

Private names of Paddle, seen in 3.3.1 (Fleet's own sharding uses them too):
    Tensor._slice(a, b), Tensor.get_tensor()._set_dims(shape)   a view of a flat tensor's memory
    Tensor._share_buffer_to(other)          `other` gets the memory, shape and dtype of this tensor
    Tensor._clear_data()                    lets go of the memory; the tensor stays known to autograd
    Tensor._copy_gradient_from(tensor)      `.grad` shares the memory of `tensor`; `.grad = tensor` copies without a word
    Tensor._register_backward_hook(f)       f runs when `.grad` is complete, once a backward pass even for a tied parameter
    Tensor._copy_to(place, blocking)        a copy there
    Tensor._is_initialized()                False under LazyGuard and for a shell without memory
    paddle.base.framework.EagerParamBase    a Parameter without a layer
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import paddle

from ppfleetx.distributed.collectives import Transfer, start_all_gather, start_reduce_scatter
from ppfleetx.distributed.masters import Master
from ppfleetx.distributed.trainable import FLOAT32, Dtypes

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle.distributed.communication.group import Group

#: every parameter begins at a multiple of so many elements, where kernels read fastest; what lies between is padding
ALIGN = 64


@dataclass(frozen=True)
class UnitOptions:
    """How the units of one run work.

    Attributes:
        frees: parameters have memory only while they are needed (stage 3).
        reduces_each_backward: gradients are reduced after every backward pass (stages 2 and 3), or once an update (stage 1).
        overlaps_gather: a gather runs beside the computation until its result is needed.
        overlaps_reduce: a reduction does.
        offloads: the cut lies in host memory.
        dtypes: `compute` is that of what is gathered. Gradients that are reduced after each backward pass always add up in
            float32, in the cut; others with main gradients do so in the flat buffer, else in the parameters' `.grad`.
    """

    frees: bool
    reduces_each_backward: bool
    overlaps_gather: bool = False
    overlaps_reduce: bool = False
    offloads: bool = False
    dtypes: Dtypes = FLOAT32


class Slice(Master):
    """The part of a parameter that lies in this rank's cut: float32 [length], a view of the cut; the optimizer updates it.

    Attributes:
        number: its place in the unit.
        at: its start in the cut.
        flat: (start, stop) of it in the parameter, in row-major order.
    """

    def __init__(self, parameter: Tensor, number: int, at: int, flat: tuple[int, int]):
        super().__init__(parameter, [flat[1] - flat[0]])
        self.number, self.at, self.flat = number, at, flat

    def numpy(self) -> np.ndarray:
        """A copy of the slice: Paddle's own copies all of the buffer that a view lies in."""
        return self.detach().clone().numpy()


class Unit:
    """The parameters that are gathered and reduced together. Every rank of the group must make the same calls.

    The unit takes the parameters over: after construction they are shells. Call `attach` before use.

    Args:
        parameters: of the model, each carrying `.spec`; their values are taken, and no rank needs another's.
        group: the ranks to cut over.
        options: how.

    Attributes:
        length: elements of a cut.
        cut: this rank's, float32 [length].
        slices: views of it, one for each parameter that overlaps it.
    """

    def __init__(self, parameters: Sequence[Tensor], group: Group, options: UnitOptions):
        self.parameters, self._group, self._options = list(parameters), group, options
        self._shapes = [list(parameter.shape) for parameter in parameters]
        self._starts, end = _lay_out([math.prod(shape) for shape in self._shapes])
        self.length = -(-end // (group.nranks * ALIGN)) * ALIGN
        cut = paddle.zeros([self.length], "float32")
        self.cut = cut.cpu() if options.offloads else cut
        self.slices: list[Slice] = []
        for number in range(len(self.parameters)):
            self._take_over(number)
        self._trained = {i for i, parameter in enumerate(parameters) if not parameter.stop_gradient}
        self._gradient: Tensor | None = None
        self._whole: Tensor | None = None  # the gathered parameters
        self._gathering: Transfer | None = None
        self.is_current = False  # the model's parameters are whole and have the cuts' values
        self._flat: Tensor | None = None  # gradients on their way to the group
        self._filled: set[int] = set()  # parameters whose gradient is in it
        self._reducing: Transfer | None = None
        self._received = False  # the gradient of the cut holds something of this update
        self._seen: set[int] = set()  # parameters that have had a gradient in this update

    def attach(self, gradient: Tensor) -> None:
        """Names the place for the gradient of the cut, float32 [length], and listens for the parameters' gradients."""
        self._gradient = gradient
        if not (self._options.reduces_each_backward or self._options.dtypes.main_gradients):
            return
        myself = weakref.ref(self)  # what a hook holds, Python's garbage collection cannot see
        for number in sorted(self._trained):
            self.parameters[number]._register_backward_hook(lambda *_, n=number: _deliver(myself(), n))

    def _take_over(self, number: int) -> None:
        """Copies what this rank owns of a parameter into the cut and empties the parameter."""
        parameter, start = self.parameters[number], self._starts[number]
        if not parameter._is_initialized():
            parameter.initialize()  # built under LazyGuard: one parameter at a time has memory
        own = self._group.rank * self.length
        first, last = max(start, own), min(start + parameter.size, own + self.length)
        if first < last:
            piece = Slice(parameter, number, first - own, (first - start, last - start))
            values = view(self.cut, piece.at, [last - first])
            values.copy_(parameter.detach().flatten()[piece.flat[0] : piece.flat[1]].astype("float32"), True)
            values._share_buffer_to(piece)
            self.slices.append(piece)
        parameter._clear_data()

    # ---- parameters

    def start_gather(self) -> bool:
        """Starts the gather, unless the parameters are current or on their way; says whether. One all-gather."""
        if self.is_current or self._gathering is not None:
            return False
        if self._whole is None:
            self._whole = paddle.empty([self.length * self._group.nranks], self._options.dtypes.compute)
        cut = self.cut.astype(self._whole.dtype)
        if self._options.offloads:
            cut = cut._copy_to(self._whole.place, True)
        self._gathering = start_all_gather(self._whole, cut, self._group, self._options.overlaps_gather)
        return True

    def gather(self) -> None:
        """Makes the model's parameters whole, if they are not."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self.is_current = None, True
            for parameter, start, shape in zip(self.parameters, self._starts, self._shapes, strict=True):
                view(self._whole, start, shape)._share_buffer_to(parameter)

    def free(self) -> None:
        """Lets go of the whole parameters' memory."""
        self.is_current, self._whole = False, None
        for parameter in self.parameters:
            parameter._clear_data()

    def expire(self) -> None:
        """The cut has new values: the next `gather` really gathers."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._options.frees:
            self.free()
        self.is_current = False

    # ---- gradients

    def deliver(self, number: int) -> None:
        """Moves the gradient of a parameter into the flat buffer; at stages 2 and 3 the last one sends it off, and at stage 3
        frees."""
        self._collect(number)
        if self._options.reduces_each_backward and self._filled == self._trained:
            self._reduce()
            if self._options.frees:
                self.free()

    def finish(self) -> None:
        """Completes this update's gradient: what backward left over goes off (all of it at stage 1, else parameters of a
        unit of which some got no gradient), and every slice whose parameter has had a gradient gets its `.grad`."""
        assert self._gradient is not None
        for number in sorted(self._trained):
            self._collect(number)
        if self._flat is not None:
            self._reduce()
        self._settle()
        if not self._received:
            self._gradient.zero_()
        self.show_gradient(self._gradient)

    def show_gradient(self, gradient: Tensor) -> None:
        """Makes views of `gradient`, float32 [length], the `.grad` of every slice whose parameter has had one."""
        for piece in self.slices:
            if piece.number in self._seen:
                piece._copy_gradient_from(view(gradient, piece.at, piece.shape))

    def forget_gradients(self) -> None:
        """For the next update."""
        self._received = False
        self._seen.clear()
        for piece in self.slices:
            piece.clear_gradient(False)

    def _collect(self, number: int) -> None:
        gradient = self.parameters[number].grad
        if gradient is None:
            return
        with paddle.no_grad():
            if self._flat is None:
                dtypes = self._options.dtypes
                dtype = "float32" if dtypes.main_gradients else dtypes.reduce
                self._flat = paddle.zeros([self.length * self._group.nranks], dtype)
            place = view(self._flat, self._starts[number], self._shapes[number])
            value = gradient.astype(self._flat.dtype) if gradient.dtype != self._flat.dtype else gradient
            if number in self._filled:  # of an earlier backward pass
                place.add_(value)
            else:
                place.copy_(value, True)
        self.parameters[number].clear_gradient(False)
        self._filled.add(number)
        self._seen.add(number)

    def _reduce(self) -> None:
        """One reduce-scatter of the flat buffer."""
        assert self._flat is not None and self._gradient is not None
        self._settle()
        flat = self._flat.astype(self._options.dtypes.reduce)
        direct = not self._received and flat.dtype == self._gradient.dtype
        out = self._gradient if direct else paddle.empty([self.length], flat.dtype)
        self._reducing = start_reduce_scatter(out, flat, self._group, self._options.overlaps_reduce)
        self._flat = None
        self._filled.clear()
        if not self._options.overlaps_reduce:
            self._settle()

    def _settle(self) -> None:
        """Adds what the last reduction gave to the gradient of the cut."""
        if self._reducing is None:
            return
        out, self._reducing = self._reducing.wait(), None
        assert self._gradient is not None
        with paddle.no_grad():
            if self._received:
                self._gradient.add_(out.astype("float32"))
            elif out is not self._gradient:
                self._gradient.copy_(out.astype("float32"), True)
        self._received = True


def view(flat: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """A tensor of `shape` in the memory of `flat` from element `start` on."""
    part = flat._slice(start, start + math.prod(shape))
    part.get_tensor()._set_dims(list(shape))
    return part


def _lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each parameter begins, and the end of the last, in elements."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGN) * ALIGN
    return starts, end


def _deliver(unit: Unit | None, number: int) -> None:
    if unit is not None:
        unit.deliver(number)
