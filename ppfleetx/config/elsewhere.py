"""Keys of PaddleFleetX that are known and answered, but not keys of ours."""

from __future__ import annotations

#: PaddleFleetX keys of parts that this project does not have, and what to tell who sets them. They are errors unless
#: their value is null, false, 0 or a block with `enable: False`.
ELSEWHERE = {
    "Compress": "pruning and quantisation are not part of ppfleetx",
    "Quantization": "quantisation is not part of ppfleetx",
    "Tuning": "the auto-parallel tuner is not part of ppfleetx",
    "Generation": "generation is not in this version",
    "Offline_Eval": "offline evaluation is not in this version",
    "Inference": "export and inference are not in this version",
    "Global.enable_auto_parallel": "the auto-parallel static engine is not part of ppfleetx",
    "Engine.balance_loss_weight": "mixture of experts is not part of ppfleetx",
    "Engine.verbose": "it belongs to the auto-parallel engine, which is not part of ppfleetx",
    "Engine.mix_precision.use_fp16_guard": "it belongs to the auto-parallel engine, which is not part of ppfleetx",
    "Engine.mix_precision.use_bf16_guard": "it belongs to the auto-parallel engine, which is not part of ppfleetx",
    "Model.num_experts": "mixture of experts is not part of ppfleetx",
    "Model.pretrained": "fine-tuning is not in this version",
    "Model.num_classes": "fine-tuning is not in this version",
    "Model.loss": "fine-tuning is not in this version",
    "Model.metric": "fine-tuning is not in this version",
}
