"""The ways in which a run computes in half precision, and how far rounding may take it from float32."""

from __future__ import annotations

import numpy as np

AMP = "Engine.mix_precision.enable=true"

#: unit roundoff: half the distance between 1 and the next number; float16 keeps 11 binary digits, bfloat16 8
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

LEVELS = {
    "O1": ("Engine.mix_precision.level=O1",),
    "O2": ("Engine.mix_precision.level=O2", "Engine.mix_precision.use_main_grad=false"),
    "main gradients": ("Engine.mix_precision.level=O2", "Engine.mix_precision.use_main_grad=true"),
}

#: "float16 O1", … → overrides
HALF = {
    f"{dtype} {level}": (AMP, f"Engine.mix_precision.dtype={dtype}", *overrides)
    for dtype in ROUNDOFF
    for level, overrides in LEVELS.items()
}

#: two blocks of the tiny model, two micro-batches an update
SMALL = ("Model.num_layers=2", "Global.micro_batch_size=4")


def roundoff(kind: str) -> float:
    """Unit roundoff of a key of `HALF`."""
    return ROUNDOFF[kind.partition(" ")[0]]


def distances(a: dict[str, np.ndarray], b: dict[str, np.ndarray], slot: str) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ of every stored tensor of that slot.

    Biases of keys are left out: they add the same number to all scores of a row, which a softmax does not see. Their gradient
    is 0 but for rounding.
    """
    wanted = [key for key in b if key.endswith(f".{slot}") and ".k.bias" not in key]
    assert wanted and set(wanted) <= a.keys()
    return {key: float(np.linalg.norm(a[key] - b[key]) / np.linalg.norm(b[key])) for key in wanted}
