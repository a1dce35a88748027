"""Random generators' states as plain JSON values, for checkpoints: nothing is pickled.

A Paddle generator's state becomes `{"seed": int, "offset": int, "engine": text}`. On CPU the numbers come from the
engine, a 64-bit Mersenne Twister whose text form is 312 words and a position; on GPU from (seed, offset).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle

_ENGINE_WORDS = 312
_UINT64_STOP = 2**64


def generator_index() -> int:
    """Which entry of `paddle.get_rng_state()`, a list with one state a visible device, belongs to this process."""
    _, _, index = paddle.get_device().partition(":")
    return int(index) if index else 0


def encode_generator(state: Any) -> dict[str, Any]:
    """The JSON form of one Paddle GeneratorState."""
    _, seed, offset, engine = state.__getstate__()
    return {"seed": seed, "offset": offset, "engine": bytes(engine).decode("ascii")}


def decode_generator(value: Any, like: Any) -> Any:
    """A GeneratorState with the content of `value`, on the device of the GeneratorState `like`.

    Raises:
        ValueError: `value` is not what `encode_generator` makes. (Paddle itself takes any text and draws on.)
    """
    if not isinstance(value, dict) or set(value) != {"seed", "offset", "engine"}:
        raise ValueError("a generator state must hold exactly seed, offset and engine")
    for key in ("seed", "offset"):
        if not _is_uint64(value[key]):
            raise ValueError(f"the {key} of a generator state must be an integer from 0 to 2^64 - 1")
    engine = value["engine"]
    words = engine.split(" ") if isinstance(engine, str) and engine.isascii() else []
    if len(words) != _ENGINE_WORDS + 1 or not all(word.isdigit() and int(word) < _UINT64_STOP for word in words):
        raise ValueError(f"the engine of a generator state must be {_ENGINE_WORDS} words and a position")
    if int(words[-1]) > _ENGINE_WORDS:
        raise ValueError(f"the position of a generator's engine must be at most {_ENGINE_WORDS}")
    kind: Any = type(like)
    state = kind.__new__(kind)
    state.__setstate__((like.__getstate__()[0], value["seed"], value["offset"], list(engine.encode("ascii"))))
    return state


def encode_host() -> dict[str, Any]:
    """The JSON form of the states of Python's and NumPy's global generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def restore_host(value: Any) -> None:
    """Put back what `encode_host` gave; ValueError where it is malformed, with nothing changed."""
    before = random.getstate(), np.random.get_state()
    try:
        version, words, gauss = value["python"]
        name, keys, position, has_gauss, cached = value["numpy"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        random.setstate(before[0])
        np.random.set_state(before[1])  # NumPy itself leaves half of a bad state behind
        raise ValueError(f"the state of Python's and NumPy's generators is malformed: {error}") from error


def _is_uint64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _UINT64_STOP
