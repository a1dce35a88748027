"""What the optimizer updates on one rank, and what happens to it between backward and update.

Two forms with one interface: `WholeParameters` here, `ShardedParameters` in sharding.py. A parameter carries its logical
description as `.spec` (`ppfleetx.layers.spec.ParameterSpec`), which says whether tensor parallelism cuts it (`mp_dim`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import paddle

from ppfleetx.distributed.collectives import all_reduce_sum_, average_gradients
from ppfleetx.distributed.masters import WholeMaster

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group

    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.layers.spec import ParameterSpec

Box = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """The part of a logical parameter that `tensor` holds.

    Attributes:
        name: logical name.
        tensor: what the optimizer updates.
        box: (start, stop) of each dim of the global tensor.
        flat: (start, stop) within the box in row-major order, for a tensor that holds only that run of it; None: all.
        is_mine: of the ranks that hold the same piece, this one writes it to a checkpoint.
    """

    name: str
    tensor: paddle.Tensor
    box: Box
    flat: tuple[int, int] | None
    is_mine: bool


class Dtypes(NamedTuple):
    """Types of a run's numbers.

    Attributes:
        compute: of the model's parameters, and so of a backward pass's gradients.
        reduce: in which gradients are summed over ranks.
        main_gradients: gradients of several backward passes add up in float32, whatever `compute` says; without, they do in
            `compute` and become float32 when the last one is there.
    """

    compute: str = "float32"
    reduce: str = "float32"
    main_gradients: bool = False


FLOAT32 = Dtypes()


class Trainable(Protocol):
    """The interface. Every rank holds one and makes the same calls; an update is reduce, norm, scale, updating, after_update.

    Attributes:
        named: what the optimizer updates, by logical name; always float32, as are its gradients after `reduce`.
    """

    named: Mapping[str, paddle.Tensor]

    def reduce(self) -> None:
        """Sums gradients over the ranks that saw other data. Losses are divided by the global number of tokens already."""

    def norm(self) -> paddle.Tensor:
        """Global L2 norm of the gradients, float32 []; each element of the model counts once."""

    def scale(self, factor: float) -> None:
        """Multiplies every gradient by `factor`, in place."""

    def updating(self) -> AbstractContextManager[None]:
        """What the optimizer makes its step in, with gradients where it looks for them."""

    def after_update(self) -> None:
        """Makes the model compute with the updated values, and drops gradients."""

    def after_load(self) -> None:
        """Makes the model compute with values that were written, in place, into the tensors of `named` or `pieces`."""

    def pieces(self) -> list[Piece]:
        """What this rank holds of the model."""


class WholeParameters:
    """Every rank updates all that its tensor rank holds: no sharding. Implements `Trainable`.

    Args:
        context: this rank's groups.
        named: the model's parameters by logical name, tied ones once.
        sequence_parallel: parameters that no rank cuts saw only a part of the sequence on each tensor rank.
        dtypes: with main gradients, float32 masters are updated, and the model's parameters get the type `compute`; without,
            the model's parameters are updated as they are.
    """

    def __init__(
        self,
        context: ParallelContext,
        named: Mapping[str, paddle.Tensor],
        sequence_parallel: bool = False,
        dtypes: Dtypes = FLOAT32,
    ):
        self._dtypes = dtypes
        self._masters: list[WholeMaster] = []
        if dtypes.compute != "float32" or dtypes.main_gradients:
            masters = {name: WholeMaster(one, dtypes.compute, dtypes.main_gradients) for name, one in named.items()}
            self._masters, named = list(masters.values()), masters
        self.named: Mapping[str, paddle.Tensor] = named
        self._context = context
        self._parameters = list(named.values())
        self._whole = [parameter for parameter in self._parameters if parameter.spec.mp_dim is None]
        self._tensor_group = context.group("mp")
        self._sequence_parallel = sequence_parallel
        self._tied = [parameter for parameter in self._parameters if parameter.spec.at_both_ends]

    def reduce(self) -> None:
        """One all-reduce a bucket over the data ranks; with sequence parallel also one of whole parameters over mp."""
        for master in self._masters:
            master.collect()
        if self._sequence_parallel:
            self._sum(self._whole, self._tensor_group)
        self._sum(self._parameters, self._context.data_group)
        self._sum(self._tied, self._context.tied_group)

    def norm(self) -> paddle.Tensor:
        """One all-reduce of a number over the tensor group and one over the pipeline's stages."""
        counted = [parameter for parameter in self._parameters if is_first_copy(self._context, parameter.spec)]
        squares = sum_of_squares(counted)
        for axis in ("mp", "pp"):
            all_reduce_sum_(squares, self._context.group(axis))
        return squares.sqrt()

    def scale(self, factor: float) -> None:
        """Local."""
        with paddle.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.scale_(factor)

    def updating(self) -> AbstractContextManager[None]:
        """Nothing: all is in place."""
        return nullcontext()

    def after_update(self) -> None:
        """Local: drops gradients; the model holds the updated parameters themselves, or gets the masters' values."""
        for parameter in self._parameters:
            parameter.clear_gradient(False)
        self.after_load()

    def after_load(self) -> None:
        """Local: the model holds the parameters themselves, or gets the masters' values."""
        for master in self._masters:
            master.publish()

    def pieces(self) -> list[Piece]:
        """Each parameter's box; the data ranks, which hold the same ones, share the writing."""
        mp = self._context.topology.mp_info
        boxes = [(parameter, parameter.spec.box(mp.rank, mp.size), None) for parameter in self._parameters]
        return shared_pieces(self._context, boxes, ("dp", "sharding", "sep"))

    def _sum(self, parameters: Sequence[paddle.Tensor], group: Group | None) -> None:
        if group is not None:
            average_gradients(parameters, group, scale=1.0, reduce_dtype=self._dtypes.reduce)


def shared_pieces(
    context: ParallelContext,
    held: Sequence[tuple[paddle.Tensor, Box, tuple[int, int] | None]],
    replica_axes: Sequence[str],
) -> list[Piece]:
    """Pieces of (tensor, box, flat). The ranks along `replica_axes` hold the same ones and each writes about the same amount:
    the next piece goes to who has least so far. No communication: all of them come to the same answer."""
    replicas = context.topology.group_of(*replica_axes)
    loads = [0] * replicas.size
    pieces = []
    for tensor, box, flat in held:
        is_mine = False
        if is_first_copy(context, tensor.spec):
            writer = loads.index(min(loads))
            loads[writer] += tensor.size
            is_mine = writer == replicas.rank
        pieces.append(Piece(tensor.spec.name, tensor, box, flat, is_mine))
    return pieces


def is_first_copy(context: ParallelContext, spec: ParameterSpec) -> bool:
    """Whether no rank before this one on the axes mp and pp holds the same part of the parameter."""
    repeated_over_mp = spec.mp_dim is None and context.topology.mp_info.rank > 0
    repeated_over_pp = spec.at_both_ends and context.topology.pp_info.rank > 0
    return not (repeated_over_mp or repeated_over_pp)


def sum_of_squares(parameters: Sequence[paddle.Tensor]) -> paddle.Tensor:
    """Sum of the squares of all gradients, float32 []. Local."""
    with paddle.no_grad():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return paddle.zeros([], "float32")
        return paddle.stack([gradient.astype("float32").square().sum() for gradient in gradients]).sum()
