"""The device a run asks for (`Global.device`), checked against what this Paddle build can do."""

from __future__ import annotations

import os

import paddle

from ppfleetx.config.errors import Problem, UserError

#: every kind that `Global.device` may name (rule B37)
DEVICE_KINDS = ("gpu", "xpu", "rocm", "npu", "cpu", "mlu")


def check_device(device: str) -> None:
    """UserError unless `device` is a known kind that this Paddle build supports and that is present. Local."""
    if device not in DEVICE_KINDS:
        raise _refused(device, f"must be one of {', '.join(DEVICE_KINDS)}")
    if device == "cpu":
        return
    if device in ("npu", "mlu"):
        if device not in paddle.device.get_all_custom_device_type():
            raise _refused(device, f"Paddle has no {device} plug-in here (paddle.device.get_all_custom_device_type())")
        return
    name = {"gpu": "GPU", "xpu": "XPU", "rocm": "ROCm"}[device]
    test = {"gpu": "is_compiled_with_cuda", "xpu": "is_compiled_with_xpu", "rocm": "is_compiled_with_rocm"}[device]
    if not getattr(paddle, test)():
        raise _refused(device, f"this Paddle build has no {name} support (paddle.{test}() is False)")
    if device != "xpu" and paddle.device.cuda.device_count() == 0:
        raise _refused(device, "this Paddle build supports it, but no such device is visible")


def set_device(device: str) -> str:
    """Make this process's own device current and give its Paddle name, such as `cpu` or `gpu:3`.

    Which one it is comes from the launcher (`FLAGS_selected_gpus` and its like); alone, the first.
    """
    if device == "cpu":
        return _set("cpu")
    kind = "gpu" if device == "rocm" else device  # Paddle's ROCm build calls its device gpu
    selected = os.environ.get(f"FLAGS_selected_{kind}s", "").split(",")[0]
    return _set(f"{kind}:{selected or 0}")


def _set(name: str) -> str:
    paddle.set_device(name)
    return name


def _refused(device: str, rule: str) -> UserError:
    return UserError(Problem("Global.device", device, rule, "-o Global.device=cpu"))
