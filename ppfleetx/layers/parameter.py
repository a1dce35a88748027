"""Creates the local part of logical parameters, with initial values that depend on neither layout nor device."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from ppfleetx.distributed import RNGStatesTracker
from ppfleetx.layers.dropout import CUT, REPLICATED
from ppfleetx.layers.edges import Edges
from ppfleetx.layers.spec import ParameterSpec


class ParameterMaker:
    """Makes parameters of one run.

    Args:
        specs: all logical parameters by name.
        tracker: source of the init streams (seeded).
        edges: this rank's edges; its place in the tensor group says which part of a parameter it holds.
    """

    def __init__(self, specs: dict[str, ParameterSpec], tracker: RNGStatesTracker, edges: Edges):
        self.specs = specs
        self.tracker = tracker
        self.edges = edges

    @property
    def residual_stream(self) -> str:
        """The random stream for dropout on the residual stream: another mask on each tensor rank only where it is cut."""
        return CUT if self.edges.sequence_parallel else REPLICATED

    def create(self, layer: nn.Layer, name: str) -> paddle.Tensor:
        """The parameter called `name` for `layer`, local shape, float32; it carries its spec as `.spec`."""
        spec = self.specs[name]
        box = spec.box(self.edges.mp_rank, self.edges.mp_size)
        shape = [stop - start for start, stop in box]
        parameter = layer.create_parameter(shape, default_initializer=StreamInitializer(spec, box, self.tracker))
        parameter.spec = spec
        return parameter


class StreamInitializer(nn.initializer.Initializer):
    """Fills a parameter from its init stream (only `forward` is overridden, so that LazyGuard defers it)."""

    def __init__(self, spec: ParameterSpec, box: tuple[tuple[int, int], ...], tracker: RNGStatesTracker):
        super().__init__()
        self.spec, self.box, self.tracker = spec, box, tracker

    def forward(self, var: paddle.Tensor, block: object = None) -> None:
        """Sets `var` (the local part, shape of the box)."""
        var.set_value(initial_values(self.spec, self.box, self.tracker))


def initial_values(spec: ParameterSpec, box: tuple[tuple[int, int], ...], tracker: RNGStatesTracker) -> np.ndarray:
    """The initial values of the part `box` (start, stop of each dim) of a parameter, float32 [box shape]."""
    shape = tuple(stop - start for start, stop in box)
    if spec.std == 0:
        return np.full(shape, spec.fill, np.float32)
    if spec.parts:
        return _interleaved(spec, box, tracker)
    rows = shape[0] if spec.rows is None else min(max(spec.rows - box[0][0], 0), shape[0])
    values = np.zeros(shape, np.float32)
    if rows:
        drawn = (spec.rows or spec.shape[0], *spec.shape[1:])
        kept = ((box[0][0], box[0][0] + rows), *box[1:])
        values[:rows] = tracker.init_stream(spec.name).normal(drawn, spec.std, _slices(kept))
    return values


def _interleaved(spec: ParameterSpec, box: tuple[tuple[int, int], ...], tracker: RNGStatesTracker) -> np.ndarray:
    """Each part from its own stream, so that fused and split query/key/value start from the same matrices."""
    *front, last = box
    first, end = (edge // sum(spec.part_widths) for edge in last)  # the box holds whole groups
    drawn = []
    for name, width in zip(spec.parts, spec.part_widths, strict=True):
        full, kept = (*spec.shape[:-1], spec.groups * width), (*front, (first * width, end * width))
        part = tracker.init_stream(name).normal(full, spec.std, _slices(kept))
        drawn.append(part.reshape(*part.shape[:-1], -1, width))
    return np.concatenate(drawn, axis=-1).reshape([stop - start for start, stop in box])


def _slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def logical_parameters(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """The parameters of a model by logical name, each once (tied ones under the name they are tied to)."""
    return {parameter.spec.name: parameter for parameter in model.parameters()}
