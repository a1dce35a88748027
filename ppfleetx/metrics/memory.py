"""Peak memory, from the allocator's own statistic: RSS counts freed pages and shared libraries as well."""

from __future__ import annotations


def peak_memory_bytes(device: str) -> int | None:
    """Most bytes of tensors live at once in this process on its device; None where Paddle does not count them.

    Args:
        device: `Global.device`.
    """
    import paddle

    if device == "cpu":
        return int(paddle.base.core.host_memory_stat_peak_value("Allocated", 0))
    if device in ("gpu", "rocm"):
        return int(paddle.device.cuda.max_memory_allocated())
    return None
