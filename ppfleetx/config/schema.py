"""Every YAML key of a run: one frozen dataclass a section, attribute names equal to the YAML keys.

`configs/README.md` is generated from this file (`python -m ppfleetx.config.reference`). Sizes are those of the whole
run unless a line says otherwise. Values that follow from others are worked out in `derive.py` and found in
`Config.derived`.
"""

# A table: one key a line, however long (and RUF009 does not know that `key` and `section` are dataclass fields).
# ruff: noqa: E501, RUF009
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppfleetx.config.fields import REQUIRED, key, optional_section, section

DEVICES = ("gpu", "xpu", "rocm", "npu", "cpu", "mlu")
Number = int | float
AXES = ("dp", "pp", "sharding", "mp", "sep")
#: `Model.name` → model family
FAMILIES = {"GPT": "GPT", "GPT-cn": "GPT", "Llama": "Llama"}


@dataclass(frozen=True, kw_only=True)
class GlobalConfig:
    """What the whole run shares."""

    device: str = key("gpu", "device kind", choices=DEVICES)
    seed: int = key(1024, "base of every random stream and of the sample order", at_least=0)
    global_batch_size: int | None = key(
        None, "samples in one update, over all ranks", unit="samples", at_least=1,
        derived="local_batch_size × dp_degree × sharding_degree",
    )
    local_batch_size: int | None = key(
        None, "samples in one update on one data rank", unit="samples", at_least=1,
        derived="global_batch_size ÷ (dp_degree × sharding_degree)",
    )
    micro_batch_size: int = key(1, "samples in one forward pass; divides local_batch_size", unit="samples", at_least=1)
    cpu_threads: int | None = key(
        None, "threads a process on device cpu; null: OMP_NUM_THREADS if above 1, else the cores it may use ÷ the processes here, but 1 for very small models",
        unit="threads", at_least=1,
    )
    cpu_kernels: str = key("auto", "auto: fast kernels of Paddle's MKL on AMD, by MKL_DEBUG_CPU_TYPE unless the environment has it; off: the environment as it is", choices=("auto", "off"))
    flags: dict[str, Any] = key({}, "Paddle flags (FLAGS_*) set before anything else")
    enable_partial_send_recv: bool = key(True, "kept for old files: stages send whole messages; off with sequence_parallel")


@dataclass(frozen=True, kw_only=True)
class MixPrecisionConfig:
    """Mixed precision; on a CPU the run falls back to float32 with one warning."""

    enable: bool = key(False, "use half precision")
    dtype: str = key("float16", "half precision type; float16 trains with a loss scaler", choices=("float16", "bfloat16"))
    level: str = key("O2", "O1 casts operators, O2 also the parameters (with float32 masters)", choices=("O1", "O2"))
    scale_loss: float = key(32768.0, "first loss scale of float16 for one data rank, × data ranks for all; bfloat16 always uses 1", above=0)
    custom_black_list: list[str] | None = key(None, "operators that stay in float32")
    custom_white_list: list[str] | None = key(None, "operators that always run in half precision")
    use_main_grad: bool | None = key(
        None, "add up the gradients of micro-batches in float32 where parameters are half (level O2); sharding stages 2 and 3 always do",
        derived="true at level O2 with float16 or accumulate_steps above 1",
    )
    reduce_dtype: str = key("float32", "type that gradients are summed over ranks in", choices=("float32", "float16", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class SaveLoadConfig:
    """Checkpoints."""

    save_steps: int | None = key(None, "updates between checkpoints; null or -1: only the last", unit="updates", at_least=-1)
    save_epoch: int = key(1, "epochs between checkpoints when run_mode is epoch; -1: 1", unit="epochs", at_least=-1)
    output_dir: str = key("./output", "folder of everything that the run writes")
    ckpt_dir: str | None = key(None, "checkpoint to resume from: a step_N folder, or auto for the newest complete one")
    async_save: bool = key(True, "write checkpoints while training goes on; it stands still only for the copy to host memory")
    consolidate: bool = key(False, "one file of whole tensors a checkpoint, made by rank 0, instead of one a rank")
    keep_last: int | None = key(None, "newest checkpoints that stay; null: all", at_least=1)
    keep_every: int | None = key(None, "with keep_last: checkpoints of steps that this divides stay too", unit="updates", at_least=1)
    stop_after_s: float | None = key(None, "the run saves and ends after so long; null: no limit", unit="seconds", at_least=0)
    strict: bool = key(True, "the checkpoint must hold the model's parameters and no others; false: those that it lacks stay as they are")
    weights_only: bool = key(False, "take only the weights of ckpt_dir and start a new run from them")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The training loop."""

    run_mode: str = key("step", "what ends the run: step (max_steps) or epoch (num_train_epochs)", choices=("step", "epoch"))
    max_steps: int = key(500000, "updates to run; with run_mode epoch an upper limit, -1: none", unit="updates", at_least=-1)
    num_train_epochs: int = key(1, "passes over the data when run_mode is epoch", unit="epochs", at_least=1)
    accumulate_steps: int | None = key(
        None, "micro-batches in one update; a given number is ignored with a warning", derived="local_batch_size ÷ micro_batch_size",
    )
    logging_freq: int = key(1, "updates between log lines", unit="updates", at_least=1)
    eval_freq: int = key(-1, "updates (run_mode epoch: epochs) between evaluations; 0 or less: none while training (tools/eval.py evaluates all the same)")
    eval_iters: int = key(0, "batches in one evaluation, while training or by tools/eval.py; 0: none", unit="global batches", at_least=0)
    test_iters: int | None = key(None, "batches that tools/eval.py --split test evaluates", unit="global batches", at_least=0, derived="10 × eval_iters")
    max_skipped_steps: int = key(50, "updates in a row that float16 may skip for overflow before the run stops", at_least=1)
    visualdl: bool = key(True, "write VisualDL scalars to output_dir/visualdl (as well as metrics.jsonl)")
    mix_precision: MixPrecisionConfig = section(MixPrecisionConfig, "mixed precision")
    save_load: SaveLoadConfig = section(SaveLoadConfig, "checkpoints")


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Rotary frequencies for longer contexts than those of the first training (Llama 3.1)."""

    rope_type: str = key("llama3", "form of the scaling", choices=("llama3",))
    factor: float = key(8.0, "low frequencies are divided by this", at_least=1)
    low_freq_factor: float = key(1.0, "wavelengths above original_max_position_embeddings ÷ this are divided in full", above=0)
    high_freq_factor: float = key(4.0, "wavelengths below original_max_position_embeddings ÷ this stay as they are", above=0)
    original_max_position_embeddings: int = key(8192, "context of the first training", unit="tokens", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network; it has the same meaning under every layout."""

    name: str = key("GPT", "model family; keys of another family are refused", choices=tuple(FAMILIES))
    module: str | None = key(None, "what is trained", choices=("GPTModule", "LlamaModule"), derived="the module of name")
    vocab_size: int = key(REQUIRED, "tokens of the vocabulary, before padding", unit="tokens", at_least=1)
    vocab_size_divisible_unit: int = key(128, "the vocabulary is padded to a multiple of this × mp_degree", at_least=1)
    hidden_size: int = key(REQUIRED, "width of the residual stream", at_least=1)
    num_layers: int = key(REQUIRED, "transformer blocks", at_least=1)
    num_attention_heads: int = key(REQUIRED, "attention heads; divides hidden_size", at_least=1)
    num_key_value_heads: int | None = key(
        None, "heads of keys and values, each shared by as many query heads; a multiple of mp_degree × sep_degree", at_least=1,
        derived="num_attention_heads", family="Llama",
    )
    ffn_hidden_size: int | None = key(None, "width inside the MLP", at_least=1, derived="4 × hidden_size")
    hidden_dropout_prob: float = key(
        None, "dropout after the embedding, the attention and the MLP", at_least=0, below=1, derived="0.1 for GPT, 0 for Llama",
    )
    attention_probs_dropout_prob: float = key(
        None, "dropout on attention probabilities", at_least=0, below=1, derived="0.1 for GPT, 0 for Llama",
    )
    max_position_embeddings: int = key(1024, "longest sequence (GPT: learned positions); at least max_seq_len", unit="tokens", at_least=1)
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=1, family="Llama")
    rope_scaling: RopeScalingConfig | None = optional_section("rotary frequencies for longer contexts", family="Llama")
    rms_norm_eps: float = key(1e-5, "added to the mean square in RMSNorm", above=0, family="Llama")
    tie_word_embeddings: bool = key(False, "the head is the embedding (GPT: always)", family="Llama")
    type_vocab_size: int = key(16, "kept for old files; GPT has no token types", at_least=0)
    initializer_range: float = key(0.02, "σ of the normal initial weights; σ/√(2·num_layers) for what ends in the residual stream", above=0)
    use_recompute: bool = key(False, "compute activations again in the backward pass to save memory")
    recompute_granularity: str | None = key(
        None, "what is computed again", choices=("full", "full_attn", "core_attn"), derived="full if use_recompute",
    )
    no_recompute_layers: list[Any] | None = key(None, "numbers of the blocks that are not recomputed, from 0", derived="[]")
    virtual_pp_degree: int = key(1, "model chunks a pipeline stage holds (interleaved schedule)", at_least=1)
    sequence_parallel: bool = key(False, "cut activations outside attention and MLP over mp along the sequence")
    fused_linear: bool = key(False, "fused matmul + bias kernels (GPU)")
    fuse_attn_qkv: bool = key(True, "one matmul for query, key and value; the weights are the same either way")
    fused_softmax_with_triangular: bool = key(True, "fused causal mask + softmax kernel (GPU)")
    use_flash_attn: bool = key(False, "flash attention (GPU)")
    scale_qk_by_layer_num: bool = key(True, "divide q·k by the block number before, multiply after the cast to float32 (float16 range)")

    @property
    def family(self) -> str:
        """The model family that `name` belongs to."""
        return next(family for name, family in FAMILIES.items() if self.name == name)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where samples come from."""

    name: str = key("GPTDataset", "kind of dataset", choices=("GPTDataset",))
    input_dir: str = key("./data/", "folder whose corpora are all used, or the prefix of one corpus")
    split: list[Number] = key([969, 30, 1], "shares of the documents for Train, Eval and Test", at_least=0, length=3)
    max_seq_len: int = key(1024, "tokens a sample predicts", unit="tokens", at_least=1)
    eos_id: int | None = key(
        None,
        "token that ends a document, masked out of the loss where it is the input",
        at_least=0,
        derived="from the corpus (X_meta.json); unknown: nothing is masked",
    )


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How samples form batches."""

    name: str = key("GPTBatchSampler", "kept for old files", choices=("GPTBatchSampler", "DistributedBatchSampler"))
    shuffle: bool = key(False, "kept for old files; samples are always shuffled within an epoch, keyed by Global.seed")
    drop_last: bool = key(True, "drop the last partial batch of a finite pass; otherwise it is padded with masked samples")
    batch_size: int | None = key(None, "samples in one update on one data rank", unit="samples", derived="local_batch_size")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are read."""

    num_workers: int = key(1, "threads that read ahead; 0: read when needed", at_least=0, below=257)
    return_list: bool = key(False, "kept for old files")
    collate_fn: str | None = key("gpt_collate_fn", "kept for old files")


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """One of Train, Eval and Test."""

    dataset: DatasetConfig = section(DatasetConfig, "where samples come from")
    sampler: SamplerConfig = section(SamplerConfig, "how samples form batches")
    loader: LoaderConfig = section(LoaderConfig, "how batches are read")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of each use; a use that is absent is off."""

    Train: SplitConfig | None = optional_section("training data")
    Eval: SplitConfig | None = optional_section("evaluation data")
    Test: SplitConfig | None = optional_section("test data, for tools/eval.py --split test; training only looks that they are there")


@dataclass(frozen=True, kw_only=True)
class LRConfig:
    """Learning rate as a function of the updates done; the first update of a warm-up uses rate 0."""

    name: str = key(
        "CosineAnnealingWithWarmupDecay", "shape of the schedule",
        choices=("CosineAnnealingWithWarmupDecay", "LinearDecayWithWarmup", "ConstantWithWarmup", "WarmupStableDecay"),
    )
    max_lr: float = key(5e-5, "peak rate", at_least=0)
    min_lr: float = key(1e-5, "rate after decay_steps", at_least=0)
    warmup_rate: float = key(0.01, "share of decay_steps spent warming up", at_least=0, below=1)
    decay_steps: int | None = key(None, "updates until min_lr, where the rate stays afterwards", unit="updates", at_least=1, derived="the updates of the run")
    decay_rate: float = key(0.1, "WarmupStableDecay: share of decay_steps spent falling to min_lr, at their end", above=0)
    use_increments: bool = key(False, "kept for old files; decay_steps counts updates either way")
    run_mode: str = key("step", "kept for old files", choices=("step", "epoch"))


@dataclass(frozen=True, kw_only=True)
class GradClipConfig:
    """Gradient clipping; no block: none."""

    name: str = key("ClipGradByGlobalNorm", "kind of clipping", choices=("ClipGradByGlobalNorm",))
    clip_norm: float = key(1.0, "largest global L2 norm of the gradients; 0: none", at_least=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. FusedAdamW is AdamW (Paddle chooses its fused kernel by device)."""

    name: str = key("FusedAdamW", "algorithm", choices=("AdamW", "FusedAdamW", "Adam", "Momentum", "SGD"))
    weight_decay: float = key(0.01, "decay of matrices; vectors (biases, norms) never decay", at_least=0)
    beta1: float = key(0.9, "Adam: decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.999, "Adam: decay of the second moment", at_least=0, below=1)
    betas: list[float] | None = key(None, "Adam: beta1 and beta2 in one list, instead of the two keys", at_least=0, below=1, length=2)
    epsilon: float = key(1e-8, "Adam: added to the root of the second moment", above=0)
    momentum: float = key(0.9, "Momentum: share of the last step", at_least=0, below=1)
    lr: LRConfig = section(LRConfig, "learning rate")
    grad_clip: GradClipConfig | None = optional_section("gradient clipping")
    tensor_fusion: bool = key(False, "kept for old files: parameters are updated one by one; not with mp, pp and sep")
    multi_precision: bool | None = key(None, "kept for old files: what the optimizer updates is always float32", derived="mix_precision.enable")


@dataclass(frozen=True, kw_only=True)
class ProfilerSummaryConfig:
    """Which tables the profiler prints."""

    overview: bool = key(True, "time by kind of work")
    device: bool = key(False, "use of each device")
    model: bool = key(True, "time by part of a step")
    dist: bool = key(False, "communication")
    kernel: bool = key(True, "time by kernel")
    op: bool = key(True, "time by operator")
    mem: bool = key(False, "memory by operator")
    memcpy: bool = key(False, "copies")


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Paddle's profiler over a range of updates."""

    enable: bool = key(False, "profile the run")
    scheduler: list[int] = key([1, 5], "[a, b]: updates a to b-1 are profiled, counted from 0", at_least=0, length=2)
    profiler_log: str = key("profiler_log", "folder of the traces, inside output_dir unless absolute")
    detailed: bool = key(False, "print all tables")
    record_shapes: bool = key(True, "record operator shapes")
    profile_memory: bool = key(True, "record memory")
    summary: ProfilerSummaryConfig = section(ProfilerSummaryConfig, "tables to print")


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Sharded optimizer states (stage 1), gradients (2) and parameters (3)."""

    sharding_degree: int = key(1, "ranks that share one copy of the states; auto: the number of nodes", at_least=1, words=("auto",))
    sharding_stage: int = key(2, "what is cut; has a meaning only when sharding_degree > 1", choices=(1, 2, 3))
    sharding_offload: bool = key(False, "keep optimizer states in host memory and update there, to save the device's")
    reduce_overlap: bool = key(False, "reduce gradients while the backward pass runs; not with stage 3 or offload")
    broadcast_overlap: bool = key(False, "fetch parameters while the forward pass runs; not with stage 3, offload or logging_freq 1")
    comm_overlap: bool = key(False, "old name, not read")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The layout: dp × pp × sharding × mp × sep processes."""

    dp_degree: int | None = key(None, "data parallel", at_least=1, derived="world size ÷ the other degrees")
    mp_degree: int = key(1, "tensor (model) parallel; auto: the cards of a node", at_least=1, words=("auto",))
    pp_degree: int = key(1, "pipeline stages", at_least=1)
    sep_degree: int = key(1, "sequence split over attention heads (all-to-all)", at_least=1)
    order: list[str] = key(list(AXES), "axes from the outermost (slowest rank) to the innermost", choices=AXES, length=5)
    sharding: ShardingConfig = section(ShardingConfig, "sharded states")
    fuse_sequence_parallel_allreduce: bool = key(False, "kept for old files: these sums travel in buckets anyway; off with use_main_grad")
    use_main_grad: bool | None = key(None, "same as Engine.mix_precision.use_main_grad", derived="that")
    pp_recompute_interval: int = key(1, "kept for old files: every recomputed block is a point of its own", at_least=1)
    hcg: str = key("HybridCommunicateGroup", "kept for old files", choices=("HybridCommunicateGroup",))


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """A failure made on purpose, for tests."""

    rank: int = key(REQUIRED, "global rank that fails", at_least=0)
    step: int = key(REQUIRED, "update it fails in, from 1", at_least=1)
    kind: str = key(REQUIRED, "how it fails", choices=("raise", "exit", "kill", "hang", "nan_weight", "inf_grad"))


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Ways to look inside and to provoke failures; all off by default."""

    log_sample_ids: bool = key(False, "each rank logs the sample ids of every update")
    fault: FaultConfig | None = optional_section("a failure made on purpose")
    deterministic: bool = key(False, "ask Paddle for deterministic kernels (GPU)")


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The YAML file."""

    Global: GlobalConfig = section(GlobalConfig, "what the whole run shares")
    Engine: EngineConfig = section(EngineConfig, "the training loop")
    Model: ModelConfig = section(ModelConfig, "the network")
    Data: DataConfig = section(DataConfig, "training, evaluation and test data")
    Optimizer: OptimizerConfig = section(OptimizerConfig, "optimizer, learning rate and clipping")
    Profiler: ProfilerConfig = section(ProfilerConfig, "profiling")
    Distributed: DistributedConfig = section(DistributedConfig, "the layout")
    Debug: DebugConfig = section(DebugConfig, "debugging")
