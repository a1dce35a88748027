"""Computes operators and their gradients on the pretend device and on the CPU, and prints how far apart they are, as JSON."""

from __future__ import annotations

import itertools
import json

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.distributed import get_rng_state_tracker
from ppfleetx.layers.attention import AttentionOptions, CoreAttention
from ppfleetx.layers.dropout import CUT, Dropout

FLOAT32, FLOAT16, BFLOAT16 = "float32", "float16", "bfloat16"
MASK = np.triu(np.full([32, 32], -1e30, "float32"), 1)

#: name → (function, shapes of what it is differentiated by)
OPERATORS = {
    "add": (lambda a, b: a + b, [3, 4], [4]),
    "subtract": (lambda a, b: a - b, [3, 4], [4]),
    "multiply": (lambda a, b: a * b, [3, 4], [4]),
    "multiply by a constant": (lambda a: a * paddle.full([4], 3.0, a.dtype), [3, 4]),
    "divide": (lambda a: a / paddle.full([4], 4.0, a.dtype), [3, 4]),
    "scale": (lambda a: a * 0.5, [3, 4]),
    "square": (lambda a: a.square(), [3, 4]),
    "rsqrt": (lambda a: paddle.rsqrt(a.square() + 1.0), [3, 4]),
    "mean": (lambda a: a.mean(-1, keepdim=True), [3, 4]),
    "sum": (lambda a: a.sum(-1), [3, 4]),
    "where": (lambda a, b: paddle.where(paddle.to_tensor([True, False, True, False]), a, b), [3, 4], [3, 4]),
    "matmul": (lambda a, b: paddle.matmul(a, b), [2, 3, 4], [4, 2]),
    "linear": (lambda x, w, b: F.linear(x, w, b), [2, 3, 4], [4, 2], [2]),
    "softmax": (lambda a: F.softmax(a), [3, 4]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, [8], w, b), [3, 8], [8], [8]),
    "gelu": (lambda a: F.gelu(a, True), [3, 4]),
    "swiglu": (lambda a: F.swiglu(a), [3, 4]),
    "embedding": (lambda w: F.embedding(paddle.to_tensor([1, 2, 1]), w), [4, 3]),
    "expand": (lambda a: a.unsqueeze(1).expand([-1, 2, -1]), [3, 4]),
    "flatten": (lambda a: a.flatten(0, 1), [3, 4]),
    "squeeze": (lambda a: a.unsqueeze(1).squeeze(1), [3, 4]),
    "transpose": (lambda a: a.transpose([1, 0]), [3, 4]),
    "split": (lambda a: a.split([1, 2, 1], axis=1)[1], [3, 4]),
    "concat": (lambda a: paddle.concat(a.chunk(2, -1)[::-1], -1), [3, 4]),
    "stack": (lambda a, b: paddle.stack([a, b]), [3, 4], [3, 4]),
    "slice": (lambda a: a[1:2], [3, 4]),
    "cast": (lambda a: a.astype("float32") * 2.0, [3, 4]),
}


def compute(function, inputs, dtype, device):
    """The result and the gradients of its sum with random weights, as float32 arrays."""
    paddle.set_device(device)
    tensors = [paddle.to_tensor(value).astype(dtype) for value in inputs]
    for tensor in tensors:
        tensor.stop_gradient = False
    result = function(*tensors)
    weights = np.random.default_rng(1).standard_normal(result.shape, "float32")
    (result.astype("float32") * paddle.to_tensor(weights)).sum().backward()
    found = [result, *(tensor.grad for tensor in tensors)]
    assert all(device in str(tensor.place) for tensor in found), [tensor.place for tensor in found]
    return [tensor.astype("float32").numpy() for tensor in found]


def distance(function, inputs, dtype, expected=None):
    """Largest |a − b| / max |b| of the result and the gradients, b in float32 on the CPU."""
    rounded = [paddle.to_tensor(value).astype(dtype).astype("float32").numpy() for value in inputs]
    right = compute(expected or function, rounded, FLOAT32, "cpu")
    found = compute(function, inputs, dtype, "npu")
    assert [value.shape for value in found] == [value.shape for value in right]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, right, strict=True))


def main():
    random = np.random.default_rng(0)
    found = {}
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        for name, (function, *shapes) in OPERATORS.items():
            inputs = [random.standard_normal(shape, "float32") for shape in shapes]
            found[f"{dtype} {name}"] = distance(function, inputs, dtype)
        scores = random.standard_normal([2, 2, 32, 32], "float32")
        found[f"{dtype} fused softmax"] = distance(
            lambda a: paddle.incubate.softmax_mask_fuse_upper_triangle(a),
            [scores], dtype, lambda a: F.softmax(a + paddle.to_tensor(MASK)),
        )  # fmt: skip
    print(json.dumps({"distances": found, "fused": fused_lengths()}))


def fused_lengths():
    """Lengths of sequences for which attention takes the fused softmax, in every block and not in the first alone."""
    calls, fused = [], paddle.incubate.softmax_mask_fuse_upper_triangle
    paddle.incubate.softmax_mask_fuse_upper_triangle = lambda scores: calls.append(scores) or fused(scores)
    for block, length in itertools.product((0, 5), (24, 32, 36, 40)):
        random = np.random.default_rng(length)
        q, k, v = (random.standard_normal([length, 2, 3, 4], "float32") for _ in range(3))
        found = {}
        for device in ("npu", "cpu"):
            paddle.set_device(device)
            options = AttentionOptions(heads=3, kv_heads=3, head_dim=4, qk_divisor=block + 1, fused_softmax=True)
            attention = CoreAttention(options, Dropout(0.0, CUT, get_rng_state_tracker()))
            tensors = (
                paddle.to_tensor(value).astype("float16" if device == "npu" else "float32") for value in (q, k, v)
            )
            found[device] = attention(*tensors).astype("float32").numpy()
        np.testing.assert_allclose(found["npu"], found["cpu"], atol=8 * 2.0**-11)
    assert all(scores.dtype == paddle.float32 for scores in calls)
    return [scores.shape[-1] for scores in calls]


if __name__ == "__main__":
    main()
