"""Sharded optimizer states, gradients and parameters (Rajbhandari et al. 2020, ZeRO) by blocks; stages 1, 2 and 3.

Every stage cuts what the optimizer updates over the sharding group. Collectives over that group, for N units:

    stage 1   gathers each unit once an update, full gradients accumulate, one reduce-scatter a unit and update
    stage 2   gathers each unit once an update, one reduce-scatter a unit and micro-batch
    stage 3   gathers before forward and before backward and frees after each; one reduce-scatter a unit and micro-batch

`reduce_overlap` reduces beside the backward pass, so after every micro-batch at stage 1 too; `broadcast_overlap` gathers the
next piece's units while a piece computes. `sharding_offload` keeps cuts and optimizer states in host memory: the gradient of
all cuts goes there before an update, which the host computes, and new values come back when a unit is gathered.

Fleet 3.3.1 has stages of its own: its clip at stage 3 forgets the tensor group, it gathers weight by weight, and stage 3 does
not work with a pipeline. Here one mechanism gives one clip, one form of checkpoint and every layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn

from ppfleetx.config.schema import ShardingConfig
from ppfleetx.distributed.collectives import all_reduce_sum_, average_gradients
from ppfleetx.distributed.sharding_unit import Unit, UnitOptions, view
from ppfleetx.distributed.trainable import FLOAT32, Dtypes, Piece, is_first_copy, shared_pieces, sum_of_squares

if TYPE_CHECKING:
    from paddle import Tensor

    from ppfleetx.distributed.context import ParallelContext

#: a piece of fewer elements than this part of the largest (a last norm) joins its neighbour's unit, to save collectives
SMALL = 1 / 32


class ShardedParameters:
    """This rank's cuts of the model's parameters. Implements `Trainable`; the sharding group must have several members.

    It takes over the parameters of `pieces` and wraps their `forward`; control flow must be the same on all ranks, since a
    unit's last gradient starts a collective.

    Args:
        context: this rank's groups.
        pieces: the layers of the model (of this pipeline stage), in the order they run; no other layer has parameters.
        section: stage, overlap and offload.
        sequence_parallel: parameters that tensor parallelism does not cut saw only a part of the sequence on each tensor rank.
        dtypes: of the model and its gradients; the cuts and their gradients are float32 always, so main gradients make a
            difference at stage 1 alone.
    """

    def __init__(
        self,
        context: ParallelContext,
        pieces: Sequence[nn.Layer],
        section: ShardingConfig,
        sequence_parallel: bool = False,
        dtypes: Dtypes = FLOAT32,
    ):
        group = context.group("sharding")
        assert group is not None, "nothing to shard over"
        self._context, self._sequence_parallel, self._dtypes = context, sequence_parallel, dtypes
        stage = section.sharding_stage
        assert stage < 3 or not (section.reduce_overlap or section.broadcast_overlap), "derive.py turns them off"
        assert not (section.sharding_offload and (section.reduce_overlap or section.broadcast_overlap)), "likewise"
        self._frees, self._prefetches, self._offloads = stage == 3, section.broadcast_overlap, section.sharding_offload
        options = UnitOptions(
            frees=stage == 3,
            reduces_each_backward=stage > 1 or section.reduce_overlap,
            overlaps_gather=section.broadcast_overlap,
            overlaps_reduce=section.reduce_overlap,
            offloads=section.sharding_offload,
            dtypes=dtypes,
        )
        tied_alone = context.tied_group is not None
        self._units = [Unit(parameters, group, options) for parameters in partition(pieces, tied_alone)]
        self._slices = [part for unit in self._units for part in unit.slices]
        self.named: Mapping[str, Tensor] = {part.spec.name: part for part in self._slices}
        self._gradients: Tensor | None = None  # of all cuts, end to end; made for the first update
        #: units that several pieces need: they stay from the first one's forward to the end of backward
        self._shared: set[Unit] = set()
        self._wrap_all(pieces)

    # ---- Trainable

    def reduce(self) -> None:
        """The reduce-scatters that backward left; then one all-reduce of this rank's cuts over dp × sep; with sequence
        parallel one, in buckets, of what tensor parallelism does not cut; one of a weight that two stages hold."""
        gradients = self._with_gradients()
        for unit in self._units:
            unit.finish()
        all_reduce_sum_(gradients, self._context.replica_group)
        if self._sequence_parallel:
            whole = [part for part in self._slices if part.spec.mp_dim is None]
            average_gradients(whole, self._context.group("mp"), scale=1.0, reduce_dtype=self._dtypes.reduce)
        tied = [part for part in self._slices if part.spec.at_both_ends]
        if self._context.tied_group is not None:
            average_gradients(tied, self._context.tied_group, scale=1.0, reduce_dtype=self._dtypes.reduce)

    def norm(self) -> Tensor:
        """One all-reduce of a number over each of sharding, mp and pp."""
        counted = [part for part in self._slices if is_first_copy(self._context, part.spec)]
        squares = sum_of_squares(counted)
        for axis in ("sharding", "mp", "pp"):
            all_reduce_sum_(squares, self._context.group(axis))
        return squares.sqrt()

    def scale(self, factor: float) -> None:
        """Local."""
        self._with_gradients().scale_(factor)  # every slice's gradient is a view of it

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Local. With offload the optimizer, and the states it makes, are on the host: as Fleet does, by the default device."""
        if not self._offloads:
            yield
            return
        for unit, gradient in self._by_unit(self._with_gradients().cpu()):
            unit.show_gradient(gradient)
        device = paddle.get_device()
        paddle.set_device("cpu")
        try:
            yield
        finally:
            paddle.set_device(device)

    def after_update(self) -> None:
        """Local: the model's parameters are gathered anew when they are next needed."""
        for unit in self._units:
            unit.forget_gradients()
            unit.expire()

    def after_load(self) -> None:
        """Local, as `after_update`."""
        for unit in self._units:
            unit.expire()

    def pieces(self) -> list[Piece]:
        """One for each parameter that overlaps this rank's cuts; the ranks along dp and sep, which hold the same ones, share
        the writing."""
        mp = self._context.topology.mp_info
        runs = [(part, part.spec.box(mp.rank, mp.size), part.flat) for part in self._slices]
        return shared_pieces(self._context, runs, ("dp", "sep"))

    def _by_unit(self, gradients: Tensor) -> Iterator[tuple[Unit, Tensor]]:
        """Each unit with its view of the gradient of all cuts."""
        start = 0
        for unit in self._units:
            yield unit, view(gradients, start, [unit.length])
            start += unit.length

    def _with_gradients(self) -> Tensor:
        """The gradient of all cuts; its memory is not there while the model is built, nor in an evaluation."""
        if self._gradients is None:
            self._gradients = paddle.zeros([sum(unit.length for unit in self._units)], "float32")
            for unit, gradient in self._by_unit(self._gradients):
                unit.attach(gradient)
        return self._gradients

    # ---- the model's side

    def _wrap_all(self, pieces: Sequence[nn.Layer]) -> None:
        unit_of = {id(parameter): unit for unit in self._units for parameter in unit.parameters}
        needs = [list(dict.fromkeys(unit_of[id(each)] for each in piece.parameters())) for piece in pieces]
        self._shared = {unit for unit in self._units if sum(unit in units for units in needs) > 1}
        following = [*needs[1:], []]
        for piece, units, next_units in zip(pieces, needs, following, strict=True):
            self._wrap(piece, units, next_units if self._prefetches else [])

    def _wrap(self, piece: nn.Layer, units: Sequence[Unit], next_units: Sequence[Unit]) -> None:
        """Makes `piece` open its units before it computes, and, at stage 3, again before its backward pass.

        Not by Layer's hooks, which do not run where a caller uses `.forward`.
        """
        compute: Callable[..., Tensor] = piece.forward

        def open_units(gradient: Any = None) -> None:
            for unit in units:
                unit.gather()

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if paddle.is_grad_enabled():
                self._with_gradients()
            self._make_room(units)
            open_units()
            for unit in next_units:
                unit.start_gather()
            output = compute(*args, **kwargs)
            if self._frees and not output.stop_gradient:
                output.register_hook(open_units)
            return output

        piece.forward = forward

    def _make_room(self, units: Sequence[Unit]) -> None:
        """Stage 3: frees the block before when a piece is about to gather; so the last block stays for its backward: a unit
        of several pieces (the last norm and the head) does not displace it."""
        if self._frees and any(not unit.is_current and unit not in self._shared for unit in units):
            for unit in self._units:
                if unit.is_current and unit not in self._shared and unit not in units:
                    unit.free()


def partition(pieces: Sequence[nn.Layer], tied_alone: bool = False) -> list[list[Tensor]]:
    """The parameters of each unit: a unit a piece, but a small piece joins the next one (the last joins the one before), and
    a piece that shares a parameter with an earlier one (a tied head) joins that one's unit.

    Args:
        pieces: of the model, in order.
        tied_alone: a parameter at both ends of the model makes a unit of its own, so that both stages cut it alike.
    """
    units: list[list[Tensor]] = []
    home: dict[int, list[Tensor]] = {}
    for segment in _segments(pieces):
        parameters = [parameter for piece in segment for parameter in piece.parameters()]
        own = [one for one in parameters if tied_alone and one.spec.at_both_ends and id(one) not in home]
        for parameter in own:
            units.append([parameter])
            home[id(parameter)] = []  # nobody joins it
        unit = next((home[id(parameter)] for parameter in parameters if home.get(id(parameter))), [])
        if not unit:
            units.append(unit)
        for parameter in parameters:
            if id(parameter) not in home:
                home[id(parameter)] = unit
                unit.append(parameter)
    return [unit for unit in units if unit]


def _segments(pieces: Sequence[nn.Layer]) -> list[list[nn.Layer]]:
    sizes = [sum(parameter.size for parameter in piece.parameters()) for piece in pieces]
    segments: list[list[nn.Layer]] = []
    waiting: list[nn.Layer] = []
    for piece, size in zip(pieces, sizes, strict=True):
        waiting.append(piece)
        if size > SMALL * max(sizes):
            segments.append(waiting)
            waiting = []
    if waiting:
        segments[-1].extend(waiting)
    return segments
