"""Snapshots of tensors on a GPU. Not run where no GPU is."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.snapshot import host_copy, memory_of

pytestmark = pytest.mark.skipif(
    not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0, reason="needs a GPU"
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_copies_are_made_and_made_again(dtype):
    paddle.set_device("gpu:0")
    first, second = (paddle.randn([17, 5]).astype(dtype) for _ in range(2))
    buffer = host_copy(first)
    assert buffer.place.is_cpu_place() and memory_of(buffer).tobytes() == first.numpy().tobytes()
    again = host_copy(second, buffer)
    assert again is buffer and again.place.is_cpu_place()
    assert memory_of(again).tobytes() == second.numpy().tobytes() and np.any(memory_of(again))
