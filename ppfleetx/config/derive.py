"""Values that follow from others, worked out once (rules B of PaddleFleetX in their intended form)."""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ppfleetx.config.errors import Problem
from ppfleetx.config.fields import key
from ppfleetx.config.schema import Sections
from ppfleetx.config.unknown import UNKNOWN, Stopped


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What the rest of the code reads instead of keys that may be null."""

    world_size: int = key(1, "processes of the run")
    dp_degree: int = key(1, "data parallel degree")
    data_degree: int = key(1, "data ranks: dp_degree × sharding_degree")
    global_batch_size: int = key(1, "samples in one update", unit="samples")
    local_batch_size: int = key(1, "samples in one update on one data rank", unit="samples")
    accumulate_steps: int = key(1, "micro-batches in one update on one data rank")
    ffn_hidden_size: int = key(1, "width inside the MLP")
    num_key_value_heads: int = key(1, "heads of keys and values")
    padded_vocab_size: int = key(1, "rows of the embedding", unit="tokens")
    recompute_granularity: str | None = key(None, "what is recomputed; null: nothing")
    no_recompute_layers: tuple[int, ...] = key((), "blocks that are not recomputed")
    beta1: float = key(0.9, "Adam: decay of the first moment")
    beta2: float = key(0.999, "Adam: decay of the second moment")
    multi_precision: bool = key(False, "half-precision parameters have float32 masters")
    use_main_grad: bool = key(False, "gradients of micro-batches add up in float32 where parameters are half")
    decay_steps: int | None = key(
        None, "updates until min_lr; null: the updates of the epochs, known when the data is open", unit="updates"
    )
    warmup_steps: float | None = key(None, "updates of the warm-up", unit="updates")
    test_iters: int = key(0, "batches that tools/eval.py --split test evaluates")
    num_samples_train: int | None = key(None, "samples that training reads; null: those of the epochs", unit="samples")
    num_samples_eval: int | None = key(
        0, "samples that all evaluations together read; null: depends on the epochs", unit="samples"
    )
    num_samples_test: int = key(0, "samples that the test reads", unit="samples")
    save_steps: int | None = key(None, "updates between checkpoints; null: only the last", unit="updates")
    save_epoch: int = key(1, "epochs between checkpoints when run_mode is epoch", unit="epochs")


class Deriver:
    """Works out `Derived`, forces keys that cannot be as they are (with a warning) and notes what cannot work at all.

    Attributes:
        sections: the typed sections, with forced keys changed.
        values: the fields of `Derived`; `UNKNOWN` until found, and for good where a problem is in the way.
        reasons: for each of them (and for each forced key, by path), the computation in words.
        problems, warnings: what the user must, or should, know.
    """

    def __init__(self, sections: Sections, world_size: int, num_nodes: int | None = 1):
        self.sections = sections
        self.world_size, self.num_nodes = world_size, num_nodes
        self.values: dict[str, Any] = {field.name: UNKNOWN for field in dataclasses.fields(Derived)}
        self.reasons: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def run(self) -> Derived:
        """Everything, in the order in which one value needs another; a step that meets `UNKNOWN` ends there."""
        steps = (
            self._auto_degrees, self._degrees, self._batch_sizes, self._micro_batches, self._sampler_sizes, self._model,
            self._dropout, self._recompute, self._betas, self._multi_precision, self._schedule, self._sample_counts,
            self._checkpoints, self._force_sequence_keys, self._main_gradients, self._force_overlap_keys,
        )  # fmt: skip
        for step in steps:
            with suppress(Stopped):
                step()
        return Derived(**self.values)

    def set(self, name: str, value: Any, reason: str) -> None:
        """Notes a derived value."""
        self.values[name] = value
        self.reasons[name] = reason

    def force(self, path: str, value: Any, reason: str) -> None:
        """Changes a key that cannot be as the user wrote it, with a warning."""
        self.fill(path, value, reason)
        self.warnings.append(f"{path} is {value}: {reason}")

    def fill(self, path: str, value: Any, reason: str) -> None:
        """Gives a key that says `auto`, or nothing where families differ, its value: the rest of the code sees that only."""
        self.sections = replace_at(self.sections, path.split("."), value)
        self.reasons[path] = f"{value}, since {reason}"

    def refuse(self, path: str, value: Any, rule: str, fix: str = "") -> None:
        """Notes a problem."""
        self.problems.append(Problem(path, value, rule, fix))

    def _auto_degrees(self) -> None:
        world, nodes = self.world_size, self.num_nodes
        degrees = {
            "Distributed.sharding.sharding_degree": (nodes, "auto is the number of nodes"),
            "Distributed.mp_degree": (
                world // (nodes or 1),
                f"auto is the cards of a node: {world} on {nodes} node(s)",
            ),
        }
        for path, (degree, reason) in degrees.items():
            value: Any = self.sections
            for name in path.split("."):
                value = getattr(value, name)
            if value is UNKNOWN or value != "auto":
                continue
            if nodes is None or not 1 <= nodes <= world or world % nodes:
                rule = f"auto needs as many processes on every node, and there are {world} on {nodes or 'uneven'} nodes"
                self.refuse(path, value, rule, "give a number")
                self.sections = replace_at(self.sections, path.split("."), UNKNOWN)
            else:
                self.fill(path, degree, reason)

    def _degrees(self) -> None:
        layout, world = self.sections.Distributed, self.world_size
        if world < 1:
            return self.refuse("--world-size", world, "a run has at least 1 process")
        self.set("world_size", world, "from the launch")
        mp, pp, sharding, sep = layout.mp_degree, layout.pp_degree, layout.sharding.sharding_degree, layout.sep_degree
        others = mp * pp * sharding * sep
        named = f"mp_degree {mp} × pp_degree {pp} × sharding_degree {sharding} × sep_degree {sep}"
        dp = layout.dp_degree
        if dp is None and world % others:
            return self.refuse(
                "Distributed.dp_degree", dp,
                f"the world size {world} (number of processes) must be a multiple of {named} = {others}",
                f"start a multiple of {others} processes (--dry-run: --world-size {others})",
            )  # fmt: skip
        if dp is not None and dp * others != world:
            start = f"start {dp * others} processes (--dry-run: --world-size {dp * others})"
            return self.refuse(
                "Distributed.dp_degree", dp,
                f"dp_degree {dp} × {named} = {dp * others} must equal the world size {world} (number of processes)",
                start if world % others else f"-o Distributed.dp_degree={world // others}, or {start}",
            )  # fmt: skip
        self.set("dp_degree", world // others, "as given" if dp else f"world size {world} ÷ ({named})")
        self.set("data_degree", world // others * sharding, f"dp_degree {world // others} × sharding_degree {sharding}")

    def _batch_sizes(self) -> None:
        sizes, degree = self.sections.Global, self.values["data_degree"]
        total, local = sizes.global_batch_size, sizes.local_batch_size
        known = f"dp_degree × sharding_degree = {degree}"
        if total is None and local is None:
            return self.refuse(
                "Global.global_batch_size", None, "global_batch_size or local_batch_size should be set",
                f"-o Global.global_batch_size={degree * sizes.micro_batch_size}",
            )  # fmt: skip
        if total is not None and total % degree:
            return self.refuse(
                "Global.global_batch_size", total, f"global_batch_size {total} must be a multiple of {known}",
                f"-o Global.global_batch_size={-(-total // degree) * degree}",
            )  # fmt: skip
        if total is not None and local is not None and total != local * degree:
            return self.refuse(
                "Global.global_batch_size", total,
                f"global_batch_size {total} must equal local_batch_size {local} × ({known}) = {local * degree}",
                "set one of the two to null: -o Global.local_batch_size=null",
            )  # fmt: skip
        by_local, by_total = f"local_batch_size {local} × ({known})", f"global_batch_size {total} ÷ ({known})"
        self.set("global_batch_size", total or local * degree, "as given" if total else by_local)
        self.set("local_batch_size", local or total // degree, "as given" if local else by_total)

    def _micro_batches(self) -> None:
        total, local = self.values["global_batch_size"], self.values["local_batch_size"]
        micro, given = self.sections.Global.micro_batch_size, self.sections.Engine.accumulate_steps
        if local % micro:
            return self.refuse(
                "Global.micro_batch_size", micro,
                f"local_batch_size {local} must be a multiple of micro_batch_size {micro} "
                f"(global_batch_size {total}, dp_degree × sharding_degree = {self.values['data_degree']})",
                f"-o Global.micro_batch_size={math.gcd(local, micro)}",
            )  # fmt: skip
        steps, reason = local // micro, f"local_batch_size {local} ÷ micro_batch_size {micro}"
        self.set("accumulate_steps", steps, reason)
        if given not in (None, steps):
            self.warnings.append(f"Engine.accumulate_steps {given} is ignored: it is {reason} = {steps}")
            self.sections = replace_at(self.sections, ["Engine", "accumulate_steps"], None)

    def _sampler_sizes(self) -> None:
        local = self.values["local_batch_size"]
        for mode in ("Train", "Eval", "Test"):
            data = getattr(self.sections.Data, mode)
            if data is not None and data.sampler.batch_size not in (None, local):
                self.refuse(
                    f"Data.{mode}.sampler.batch_size", data.sampler.batch_size,
                    f"it must equal local_batch_size {local}", "leave it out",
                )  # fmt: skip

    def _model(self) -> None:
        model, mp = self.sections.Model, self.sections.Distributed.mp_degree
        given = model.ffn_hidden_size
        self.set(
            "ffn_hidden_size",
            given or 4 * model.hidden_size,
            "as given" if given else f"4 × hidden_size {model.hidden_size}",
        )
        heads = model.num_key_value_heads
        self.set(
            "num_key_value_heads", heads or model.num_attention_heads, "as given" if heads else "num_attention_heads"
        )
        unit = model.vocab_size_divisible_unit * mp
        self.set(
            "padded_vocab_size", -(-model.vocab_size // unit) * unit,
            f"vocab_size {model.vocab_size} rounded up to a multiple of vocab_size_divisible_unit "
            f"{model.vocab_size_divisible_unit} × mp_degree {mp}",
        )  # fmt: skip

    def _dropout(self) -> None:
        family = self.sections.Model.family
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if (given := getattr(self.sections.Model, name)) is not UNKNOWN and given is None:
                self.fill(f"Model.{name}", 0.1 if family == "GPT" else 0.0, f"that is the family's, {family}")

    def _recompute(self) -> None:
        model = self.sections.Model
        granularity = (model.recompute_granularity or "full") if model.use_recompute else None
        self.set("recompute_granularity", granularity, f"use_recompute {model.use_recompute}")
        layers = model.no_recompute_layers or ()
        wrong = [
            one
            for one in layers
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < model.num_layers
        ]
        if wrong:
            return self.refuse(
                "Model.no_recompute_layers", list(layers),
                f"block numbers are whole numbers in 0..{model.num_layers - 1}, and {wrong[0]!r} is not",
            )  # fmt: skip
        self.set("no_recompute_layers", tuple(sorted(set(layers))), "sorted, each once")
        pp = self.sections.Distributed.pp_degree
        if layers and granularity == "full" and pp > 1:
            self.refuse(
                "Model.no_recompute_layers", list(layers),
                f"with pp_degree {pp} it needs recompute_granularity full_attn or core_attn",
            )  # fmt: skip

    def _betas(self) -> None:
        optimizer = self.sections.Optimizer
        betas = optimizer.betas or (optimizer.beta1, optimizer.beta2)
        if (optimizer.beta1, optimizer.beta2) not in ((0.9, 0.999), tuple(betas)):
            self.refuse(
                "Optimizer.betas", list(betas), f"it differs from beta1 {optimizer.beta1} and beta2 {optimizer.beta2}",
                "give either betas or beta1 and beta2",
            )  # fmt: skip
        self.set("beta1", betas[0], "betas.0 or beta1")
        self.set("beta2", betas[1], "betas.1 or beta2")

    def _multi_precision(self) -> None:
        given, half = self.sections.Optimizer.multi_precision, self.sections.Engine.mix_precision.enable
        if given not in (None, half):
            self.refuse(
                "Optimizer.multi_precision", given, f"it must equal Engine.mix_precision.enable {half}", "leave it out"
            )
        self.set("multi_precision", half, f"Engine.mix_precision.enable {half}")

    def _schedule(self) -> None:
        lr, engine = self.sections.Optimizer.lr, self.sections.Engine
        decay, reason = lr.decay_steps, "as given"
        if decay is None:
            decay = engine.max_steps if engine.run_mode == "step" else None
            reason = "the updates of the run" + ("" if decay is None else f": max_steps {decay}")
        self.set("decay_steps", decay, reason)
        warmup = None if decay is None else lr.warmup_rate * decay
        self.set("warmup_steps", warmup, f"warmup_rate {lr.warmup_rate} × decay_steps {decay or ''}".rstrip())

    def _sample_counts(self) -> None:
        engine, data, batch = self.sections.Engine, self.sections.Data, self.values["global_batch_size"]
        steps, freq, iters = engine.max_steps, engine.eval_freq, engine.eval_iters
        by_step = engine.run_mode == "step"
        if by_step:
            self.set("num_samples_train", batch * steps, f"global_batch_size {batch} × max_steps {steps}")
        else:
            self.set("num_samples_train", None, "those of the epochs")
        if freq <= 0 or iters == 0 or data.Eval is None:
            self.set("num_samples_eval", 0, "no evaluation")
        elif by_step:
            reason = f"global_batch_size {batch} × (max_steps {steps} // eval_freq {freq} + 1) × eval_iters {iters}"
            self.set("num_samples_eval", batch * (steps // freq + 1) * iters, reason)
        else:
            self.set("num_samples_eval", None, "those of the epochs")
        tests = 10 * iters if engine.test_iters is None else engine.test_iters
        self.set("test_iters", tests, f"10 × eval_iters {iters}" if engine.test_iters is None else "as given")
        if data.Test is None:
            self.set("num_samples_test", 0, "no Test data")
        else:
            self.set("num_samples_test", batch * tests, f"global_batch_size {batch} × test_iters {tests}")

    def _checkpoints(self) -> None:
        steps, epoch = self.sections.Engine.save_load.save_steps, self.sections.Engine.save_load.save_epoch
        self.set("save_steps", None if steps == -1 else steps, f"Engine.save_load.save_steps {steps}")
        self.set("save_epoch", 1 if epoch == -1 else epoch, f"Engine.save_load.save_epoch {epoch}")

    def _force_sequence_keys(self) -> None:
        model, layout = self.sections.Model, self.sections.Distributed
        if model.sequence_parallel and layout.mp_degree == 1:
            self.force("Model.sequence_parallel", False, "it cuts over mp and mp_degree is 1")
        if (
            self.sections.Model.sequence_parallel
            and layout.pp_degree > 1
            and self.sections.Global.enable_partial_send_recv
        ):
            self.force(
                "Global.enable_partial_send_recv", False,
                "with sequence_parallel what one stage sends to the next is already 1/mp of the sequence",
            )  # fmt: skip

    def _main_gradients(self) -> None:
        layout, section = self.sections.Distributed, self.sections.Engine.mix_precision
        given = {layout.use_main_grad, section.use_main_grad} - {None}
        if len(given) > 1:
            rule = f"it differs from Engine.mix_precision.use_main_grad {section.use_main_grad}"
            return self.refuse("Distributed.use_main_grad", layout.use_main_grad, rule, "set one of the two to null")
        if layout.fuse_sequence_parallel_allreduce and True in given:
            self.force("Distributed.fuse_sequence_parallel_allreduce", False, "it cannot work with use_main_grad")
        if given:
            return self.set("use_main_grad", given.pop(), "as given")
        dtype, level, steps = section.dtype, section.level, self.values["accumulate_steps"]
        half = section.enable and level == "O2"
        why = f"mix_precision.enable {section.enable}, level {level}, dtype {dtype}, accumulate_steps {steps}"
        self.set("use_main_grad", half and (dtype == "float16" or steps > 1), why)

    def _force_overlap_keys(self) -> None:
        sharding = self.sections.Distributed.sharding
        if sharding.comm_overlap:
            self.warnings.append("Distributed.sharding.comm_overlap is an old name and is not read; use reduce_overlap")
        if sharding.sharding_degree == 1:
            return
        for name in ("reduce_overlap", "broadcast_overlap"):
            if getattr(sharding, name) and (sharding.sharding_stage == 3 or sharding.sharding_offload):
                why = "sharding_stage 3" if sharding.sharding_stage == 3 else "sharding_offload"
                self.force(f"Distributed.sharding.{name}", False, f"it cannot work with {why}")
        if self.sections.Distributed.sharding.broadcast_overlap and self.sections.Engine.logging_freq == 1:
            self.force("Distributed.sharding.broadcast_overlap", False, "logging_freq 1 waits for every update anyway")


def replace_at(section: Any, path: list[str], value: Any) -> Any:
    """A copy of a frozen section with the value at `path` changed."""
    name, rest = path[0], path[1:]
    return dataclasses.replace(section, **{name: replace_at(getattr(section, name), rest, value) if rest else value})
