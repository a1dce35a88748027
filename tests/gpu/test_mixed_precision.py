"""Mixed precision on a real GPU: bfloat16, float16 with its scaler, main gradients, flash attention. Skipped without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() == 0,
    reason="no GPU, or a CPU build of Paddle",
)


def losses(tmp_path, name, *overrides):
    """The losses of 20 updates of the tiny model on the GPU."""
    output = tmp_path / name
    command = [
        sys.executable, "tools/train.py", "-c", "configs/debug/tiny_gpt.yaml", "-o", "Global.device=gpu", "Engine.max_steps=20",
        "Engine.eval_freq=0", "Engine.visualdl=false", "Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0",
        f"Engine.save_load.output_dir={output}", *overrides,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


AMP = "Engine.mix_precision.enable=true"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_follows_float32(tmp_path, dtype, level):
    full = losses(tmp_path, "full")
    half = losses(tmp_path, "half", AMP, f"Engine.mix_precision.dtype={dtype}", f"Engine.mix_precision.level={level}")
    # bfloat16 keeps 8 bits: a relative error of 2^-8 = 0.4 % a value, less in the mean over 256 tokens
    assert half == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_main_gradients_follow_float32(tmp_path, dtype):
    common = ("Global.micro_batch_size=1", f"Engine.mix_precision.dtype={dtype}")
    full = losses(tmp_path, "full", *common)
    main = losses(tmp_path, "main", *common, AMP, "Engine.mix_precision.use_main_grad=true")
    assert main == pytest.approx(full, rel=0.02)


def test_flash_attention_follows_the_plain_one(tmp_path):
    common = (AMP, "Engine.mix_precision.dtype=bfloat16")
    plain = losses(tmp_path, "plain", *common)
    assert losses(tmp_path, "flash", *common, "Model.use_flash_attn=true") == pytest.approx(plain, rel=0.02)


def test_llama_in_bfloat16_follows_float32(tmp_path):
    """Grouped-query heads of 64 dims in the flash kernel; norms and rotary positions compute in float32 inside autocast."""
    llama = (
        "Model.name=Llama", "Model.hidden_size=512", "Model.num_layers=2", "Model.num_attention_heads=8",
        "Model.num_key_value_heads=2", "Model.scale_qk_by_layer_num=false",
    )  # fmt: skip
    full = losses(tmp_path, "full", *llama)
    for flash in ("false", "true"):
        half = (AMP, "Engine.mix_precision.dtype=bfloat16", f"Model.use_flash_attn={flash}")
        assert losses(tmp_path, f"half-{flash}", *llama, *half) == pytest.approx(full, rel=0.02)


def test_float16_overflow_skips_the_update_and_counts_it(tmp_path):
    # a scale of 2^40 overflows float16 (largest value 65504) in the first updates until the scaler has halved it enough
    losses(tmp_path, "overflow", AMP, "Engine.mix_precision.scale_loss=1099511627776", "Engine.max_steps=40")
    records = [json.loads(line) for line in (tmp_path / "overflow" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["found_inf"] and not records[-1]["found_inf"]
    assert records[-1]["loss_scale"] < 2**40
