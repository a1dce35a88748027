"""A rank's state in host memory, as a save writes it while training goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.layout import PieceLayout
from ppfleetx.checkpoint.shards import DTYPES, NAMES

if TYPE_CHECKING:
    import paddle

    from ppfleetx.distributed.trainable import Piece


@dataclass
class TrainingState:
    """All that a run needs to go on, as one rank holds it.

    Attributes:
        pieces: what this rank holds of the model.
        optimizer: moments of these pieces, `<logical name>.<slot>`.
        streams: the random streams of this rank (JSON values).
        progress: step, consumed samples, scaler and the like (JSON values).
        run: what writes it: resolved config, layout, versions (JSON values).
    """

    pieces: Sequence[Piece]
    optimizer: Mapping[str, paddle.Tensor]
    streams: dict[str, Any]
    progress: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)


class Held(NamedTuple):
    """A slot of a piece that this rank writes.

    Attributes:
        slot: "" the weight, or moment1, …
        layout: of the piece.
        dtype: F32, BF16, …
        memory: its values, 1-D, bfloat16 as uint16.
    """

    slot: str
    layout: PieceLayout
    dtype: str
    memory: np.ndarray


class Snapshot(NamedTuple):
    """What a rank writes; knows nothing of Paddle."""

    held: Sequence[Held]
    streams: dict[str, Any]
    progress: dict[str, Any]
    run: dict[str, Any]


class Snapshots:
    """Takes snapshots. The memory is kept and used again, because touching new memory takes several times as long as copying:
    a snapshot is good until the next one is taken."""

    def __init__(self) -> None:
        self._buffers: list[paddle.Tensor] = []

    def take(self, state: TrainingState) -> Snapshot:
        """Copies what this rank writes of the state to host memory; returns when that is done. No communication."""
        owned = list(_owned(state))
        self._buffers = [
            host_copy(tensor, buffer) for (_, _, tensor), buffer in zip(owned, self._room(len(owned)), strict=True)
        ]
        held = [
            Held(slot, layout, _name_of_dtype(buffer), memory_of(buffer))
            for (slot, layout, _), buffer in zip(owned, self._buffers, strict=True)
        ]
        return Snapshot(held, state.streams, state.progress, state.run)

    def _room(self, count: int) -> list[paddle.Tensor | None]:
        """The buffers of last time, as many as are wanted."""
        return [*self._buffers[:count], *[None] * (count - len(self._buffers))]


def host_copy(tensor: paddle.Tensor, buffer: paddle.Tensor | None = None) -> paddle.Tensor:
    """A copy in host memory; in that of `buffer`, an earlier one, if it has the same shape and type."""
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        tensor = tensor.detach()
        return tensor.clone() if tensor.place.is_cpu_place() else tensor.cpu()
    buffer.copy_(tensor, True)
    return buffer


def memory_of(tensor: paddle.Tensor) -> np.ndarray:
    """The memory of a tensor on the host: 1-D, shared with it, writable; bfloat16 as uint16, which NumPy does not know."""
    return np.asarray(_Memory(tensor))


class _Memory:
    """Tells NumPy where a tensor lies, and keeps it alive. (What NumPy 2.0 takes by DLPack is read-only, and Paddle's own
    `numpy()` copies.)"""

    def __init__(self, tensor: paddle.Tensor):
        self._tensor = tensor.detach()
        assert tensor.place.is_cpu_place() and tensor.is_contiguous()
        self.__array_interface__ = {
            "data": (self._tensor.data_ptr() if tensor.size else 0, False),
            "shape": (tensor.size,),
            "typestr": dtype_of(tensor).str,
            "version": 3,
        }


def _owned(state: TrainingState) -> Iterator[tuple[str, PieceLayout, paddle.Tensor]]:
    """(slot, layout, tensor) of all that this rank writes."""
    slots: dict[str, dict[str, paddle.Tensor]] = defaultdict(dict)
    for key, tensor in state.optimizer.items():
        name, _, slot = key.rpartition(".")
        slots[name][slot] = tensor
    for piece in state.pieces:
        if piece.is_mine:
            layout = PieceLayout(piece.tensor.spec, piece.box, piece.flat)
            for slot, tensor in {"": piece.tensor, **slots[piece.name]}.items():
                yield slot, layout, tensor


def dtype_of(tensor: paddle.Tensor) -> np.dtype[Any]:
    """What NumPy reads a tensor's values as; bfloat16 as uint16."""
    return DTYPES[_name_of_dtype(tensor)]


def _name_of_dtype(tensor: paddle.Tensor) -> str:
    """Its type's name in files."""
    return NAMES[str(tensor.dtype).removeprefix("paddle.")]
