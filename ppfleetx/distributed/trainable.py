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
        is_first: no rank of lower number holds the same piece, so this one writes it to a checkpoint.
    """

    name: str
    tensor: paddle.Tensor
    box: Box
    flat: tuple[int, int] | None
    is_first: bool


class Dtypes(NamedTuple):
    """Types of a run's numbers.

    Attributes:
        compute: of the model's parameters, and so of a backward pass's gradients.
        reduce: in which gradients are summed over ranks.
        main_gradients: gradients of several backward passes add up in float32, whatever `compute` says.
    """

    compute: str = "float32"
    reduce: str = "float32"
    main_gradients: bool = False


FLOAT32 = Dtypes()


class Trainable(Protocol):
    """The interface. Every rank holds one and makes the same calls; an update is reduce, norm, scale, updating, after_update.

    Attributes:
        named: what the optimizer updates, by logical name.
        casts_model: the model's parameters have the type that it computes in, those of `named` are float32.
    """

    named: Mapping[str, paddle.Tensor]
    casts_model: bool

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
        self.casts_model, self._dtypes = dtypes.main_gradients, dtypes
        self._masters: list[WholeMaster] = []
        if dtypes.main_gradients:
            masters = {name: WholeMaster(parameter, dtypes.compute) for name, parameter in named.items()}
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
        """Each parameter's box; the first of the ranks that hold the same box is the first data rank, and for what mp does
        not cut the first tensor rank of it."""
        topology = self._context.topology
        mp = topology.mp_info
        first_data = all(topology.coordinate[axis] == 0 for axis in ("dp", "sharding", "sep"))
        return [
            Piece(
                name,
                parameter,
                parameter.spec.box(mp.rank, mp.size),
                None,
                first_data and is_first_copy(self._context, parameter.spec),
            )
            for name, parameter in self.named.items()
        ]

    def _sum(self, parameters: Sequence[paddle.Tensor], group: Group | None) -> None:
        if group is not None:
            average_gradients(parameters, group, scale=1.0, reduce_dtype=self._dtypes.reduce)


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
