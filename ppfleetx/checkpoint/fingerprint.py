"""A number for the values of a checkpoint, whatever the layout that wrote it. Imports no Paddle."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.stream import pieces, stored


class Fingerprint(NamedTuple):
    """SHA-256, 64 hexadecimal digits each.

    Attributes:
        weights: of the parameters alone.
        state: of the parameters and what the optimizer keeps for them.
        tensors: of each tensor, by its key (`<name>` or `<name>.<slot>`).
    """

    weights: str
    state: str
    tensors: dict[str, str]


def fingerprint(saved: Checkpoint) -> Fingerprint:
    """Reads the whole checkpoint in pieces.

    A tensor counts with its name, slot, dtype, global shape without padding, and its values in row-major order; query, key
    and value count as three whether or not the run had them in one. Step, schedule and random streams do not count.

    Raises:
        Damaged: a file is not what the manifest says.
    """
    tensors: dict[str, str] = {}
    weights, state = hashlib.sha256(), hashlib.sha256()
    for (name, slot), entry in sorted(stored(saved).items()):
        shape = "×".join(map(str, entry.shape))
        digest = hashlib.sha256(f"{name}\n{slot}\n{entry.dtype}\n{shape}\n".encode())
        for piece in pieces(saved, entry):
            digest.update(memoryview(piece))  # type: ignore[arg-type]  # NumPy's stubs do not say that arrays are buffers
        tensors[entry.key] = digest.hexdigest()
        state.update(digest.digest())
        if not slot:
            weights.update(digest.digest())
    return Fingerprint(weights.hexdigest(), state.hexdigest(), tensors)
