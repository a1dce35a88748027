"""Combinations of settings that cannot work, refused at start in terms of the user's keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import suppress

from ppfleetx.config.coerce import default_of, to_tree
from ppfleetx.config.derive import Derived
from ppfleetx.config.errors import Problem
from ppfleetx.config.schema import LRConfig, Sections, SplitConfig
from ppfleetx.config.unknown import Stopped

Rule = Callable[[Sections, Derived], Iterator[Problem]]


def check(sections: Sections, derived: Derived) -> list[Problem]:
    """Every rule that the settings break; a rule that needs a value with a problem of its own ends there."""
    problems: list[Problem] = []
    for rule in RULES:
        with suppress(Stopped):
            for problem in rule(sections, derived):
                problems.append(problem)  # one by one: those before a stop count
    return problems


def warn(sections: Sections, derived: Derived) -> list[str]:
    """Settings that work but may not be what was meant."""
    texts, model, layout = [], sections.Model, sections.Distributed
    chunks = model.virtual_pp_degree * layout.pp_degree
    if layout.pp_degree == 1 and model.virtual_pp_degree > 1:
        texts.append(f"Model.virtual_pp_degree {model.virtual_pp_degree} is useless with pp_degree 1")
    if layout.pp_degree > 1 and model.virtual_pp_degree > 2:
        texts.append(f"Model.virtual_pp_degree {model.virtual_pp_degree}: more than 2 rarely pays")
    if layout.pp_degree > 1 and model.virtual_pp_degree == 1 and model.num_layers % chunks:
        texts.append(
            f"Model.num_layers {model.num_layers} is not a multiple of pp_degree {layout.pp_degree}: stages are uneven"
        )
    if layout.sharding.sharding_degree > 1 and layout.sharding.sharding_stage == 3 and layout.pp_degree > 1:
        texts.append("sharding_stage 3 with pp_degree above 1 gathers every block anew for every micro-batch")
    if sections.Optimizer.tensor_fusion:
        texts.append("Optimizer.tensor_fusion has no effect: parameters are updated one by one")
    if sections.Engine.run_mode == "step":
        texts += ends_early(sections.Optimizer.lr, sections.Engine.max_steps, "Engine.max_steps")
    for path, data in _splits(sections):
        if data.sampler.shuffle:
            texts.append(f"{path}.sampler.shuffle has no further effect: samples are shuffled within each epoch anyway")
    return texts


def ends_early(lr: LRConfig, num_updates: int, source: str) -> list[str]:
    """A warning if the rate reaches its lowest value before the run ends, and so stays there; none otherwise.

    Args:
        num_updates: updates of the run; `source` says what they are the number of.
    """
    decay = lr.decay_steps
    if decay is None or decay >= num_updates or lr.name == "ConstantWithWarmup" or lr.min_lr >= lr.max_lr:
        return []
    return [
        f"Optimizer.lr.decay_steps {decay} is less than {source} {num_updates}: from update {decay + 1} on the learning "
        f"rate stays at min_lr {lr.min_lr}; -o Optimizer.lr.decay_steps=null spreads it over the whole run"
    ]


def _family(sections: Sections, derived: Derived) -> Iterator[Problem]:
    model = sections.Model
    family = model.family
    if model.module not in (None, f"{family}Module"):
        yield Problem("Model.module", model.module, f"Model.name {model.name} goes with {family}Module", "leave it out")
    for field in dataclasses.fields(model):
        owner, value = field.metadata.get("family"), getattr(model, field.name)
        if owner and owner != family and value != default_of(field):
            rule = f"only {owner} has this key, and Model.name is {model.name}"
            yield Problem(f"Model.{field.name}", to_tree(value), rule, "remove the key")


def _key_value_heads(sections: Sections, derived: Derived) -> Iterator[Problem]:
    heads, shared = sections.Model.num_attention_heads, derived.num_key_value_heads
    mp, sep, path = sections.Distributed.mp_degree, sections.Distributed.sep_degree, "Model.num_key_value_heads"
    if heads % shared:
        rule = f"num_attention_heads {heads} must be a multiple of num_key_value_heads {shared}"
        yield Problem(path, shared, rule)
    elif shared != heads and shared % (mp * sep):
        by = f"mp_degree {mp}" + (f" × sep_degree {sep}" if sep > 1 else "")
        rule = (
            f"num_key_value_heads {shared} must be a multiple of {by}: they are cut over these ranks, never replicated"
        )
        yield Problem(path, shared, rule)


def _rotary(sections: Sections, derived: Derived) -> Iterator[Problem]:
    model = sections.Model
    if model.family != "Llama":
        return
    hidden, heads, scaling = model.hidden_size, model.num_attention_heads, model.rope_scaling
    if hidden % heads == 0 and hidden // heads % 2:
        rule = f"rotary positions turn pairs, so hidden_size {hidden} ÷ num_attention_heads {heads} must be even"
        yield Problem("Model.num_attention_heads", heads, rule)
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        rule = f"low_freq_factor {scaling.low_freq_factor} must be below high_freq_factor {scaling.high_freq_factor}"
        yield Problem("Model.rope_scaling.low_freq_factor", scaling.low_freq_factor, rule)


def _heads(sections: Sections, derived: Derived) -> Iterator[Problem]:
    hidden, heads = sections.Model.hidden_size, sections.Model.num_attention_heads
    if hidden % heads:
        yield Problem(
            "Model.num_attention_heads",
            heads,
            f"hidden_size {hidden} must be a multiple of num_attention_heads {heads}",
        )


def _heads_over_ranks(sections: Sections, derived: Derived) -> Iterator[Problem]:
    heads, mp, sep = sections.Model.num_attention_heads, sections.Distributed.mp_degree, sections.Distributed.sep_degree
    if heads % (mp * sep):
        by = f"mp_degree {mp}" + (f" × sep_degree {sep}" if sep > 1 else "")
        yield Problem("Model.num_attention_heads", heads, f"num_attention_heads {heads} must be a multiple of {by}")


def _ffn(sections: Sections, derived: Derived) -> Iterator[Problem]:
    ffn, mp = derived.ffn_hidden_size, sections.Distributed.mp_degree
    if ffn % mp:
        yield Problem("Model.ffn_hidden_size", ffn, f"ffn_hidden_size {ffn} must be a multiple of mp_degree {mp}")


def _positions(sections: Sections, derived: Derived) -> Iterator[Problem]:
    positions = sections.Model.max_position_embeddings
    for path, data in _splits(sections):
        length = data.dataset.max_seq_len
        if length > positions:
            rule = f"max_seq_len {length} must not exceed Model.max_position_embeddings {positions}"
            yield Problem(f"{path}.dataset.max_seq_len", length, rule)


def _sequence_over_ranks(sections: Sections, derived: Derived) -> Iterator[Problem]:
    layout, cut_by = sections.Distributed, []
    if sections.Model.sequence_parallel:
        cut_by.append(("mp_degree", layout.mp_degree))
    if layout.sep_degree > 1:
        cut_by.append(("sep_degree", layout.sep_degree))
    by = " × ".join(f"{name} {degree}" for name, degree in cut_by)
    for path, data in _splits(sections):
        length = data.dataset.max_seq_len
        if length % math.prod(degree for _, degree in cut_by):
            why = "with sequence_parallel " if sections.Model.sequence_parallel else ""
            yield Problem(
                f"{path}.dataset.max_seq_len", length, f"{why}max_seq_len {length} must be a multiple of {by}"
            )


def _end_of_document(sections: Sections, derived: Derived) -> Iterator[Problem]:
    size = sections.Model.vocab_size
    for path, data in _splits(sections):
        if (eos := data.dataset.eos_id) is not None and eos >= size:
            yield Problem(f"{path}.dataset.eos_id", eos, f"ids must lie in [0, Model.vocab_size = {size})")


def _shares(sections: Sections, derived: Derived) -> Iterator[Problem]:
    for path, data in _splits(sections):
        if sum(data.dataset.split) <= 0:
            yield Problem(f"{path}.dataset.split", list(data.dataset.split), "the sum of the shares must be above 0")


def _stages(sections: Sections, derived: Derived) -> Iterator[Problem]:
    layers, pp, vpp = sections.Model.num_layers, sections.Distributed.pp_degree, sections.Model.virtual_pp_degree
    if pp == 1:
        return
    interval, most = sections.Distributed.pp_recompute_interval, layers // (pp * vpp)
    if layers < pp * vpp:
        yield Problem(
            "Distributed.pp_degree", pp, f"num_layers {layers} is less than pp_degree {pp} × virtual_pp_degree {vpp}"
        )
    elif interval > most:
        yield Problem(
            "Distributed.pp_recompute_interval", interval,
            f"it must not exceed num_layers {layers} // (virtual_pp_degree {vpp} × pp_degree {pp}) = {most}",
        )  # fmt: skip


def _interleaved(sections: Sections, derived: Derived) -> Iterator[Problem]:
    path, layers, sharding = "Model.virtual_pp_degree", sections.Model.num_layers, sections.Distributed.sharding
    pp, vpp = sections.Distributed.pp_degree, sections.Model.virtual_pp_degree
    if pp == 1 or vpp == 1:
        return
    if pp == 2:
        yield Problem(path, vpp, "the interleaved schedule needs pp_degree above 2, and it is 2")
    if layers >= pp * vpp and layers % (pp * vpp):
        yield Problem(path, vpp, f"num_layers {layers} must be a multiple of virtual_pp_degree {vpp} × pp_degree {pp}")
    if sharding.sharding_degree > 1 and sharding.sharding_stage == 3:
        yield Problem(path, vpp, "sharding_stage 3 works with the plain pipeline schedule only (virtual_pp_degree 1)")
    if derived.accumulate_steps % pp:
        yield Problem(path, vpp, f"accumulate_steps {derived.accumulate_steps} must be a multiple of pp_degree {pp}")


def _order(sections: Sections, derived: Derived) -> Iterator[Problem]:
    order = sections.Distributed.order
    if len(set(order)) != len(order):
        yield Problem("Distributed.order", list(order), "each of dp, pp, sharding, mp, sep must stand in it once")


def _tensor_fusion(sections: Sections, derived: Derived) -> Iterator[Problem]:
    layout = sections.Distributed
    cut = {"mp_degree": layout.mp_degree, "pp_degree": layout.pp_degree, "sep_degree": layout.sep_degree}
    wrong = ", ".join(f"{name} {degree}" for name, degree in cut.items() if degree > 1)
    if sections.Optimizer.tensor_fusion and wrong:
        yield Problem(
            "Optimizer.tensor_fusion", True, f"tensor_fusion works with dp and sharding only, not with {wrong}"
        )


def _rates(sections: Sections, derived: Derived) -> Iterator[Problem]:
    lr = sections.Optimizer.lr
    if lr.name != "ConstantWithWarmup" and lr.min_lr > lr.max_lr:
        yield Problem("Optimizer.lr.min_lr", lr.min_lr, f"min_lr {lr.min_lr} must not exceed max_lr {lr.max_lr}")
    if lr.name == "WarmupStableDecay" and lr.warmup_rate + lr.decay_rate > 1:
        rule = f"warmup_rate {lr.warmup_rate} + decay_rate {lr.decay_rate} must not exceed 1"
        yield Problem("Optimizer.lr.decay_rate", lr.decay_rate, rule)


def _train_data(sections: Sections, derived: Derived) -> Iterator[Problem]:
    if sections.Data.Train is None:
        yield Problem("Data.Train", None, "training needs data", "-o Data.Train.dataset.input_dir=…")


def _steps(sections: Sections, derived: Derived) -> Iterator[Problem]:
    steps = sections.Engine.max_steps
    if steps == 0 or (steps < 0 and sections.Engine.run_mode == "step"):
        yield Problem("Engine.max_steps", steps, "it must be at least 1 (only with run_mode epoch, -1 means no limit)")


def _saves(sections: Sections, derived: Derived) -> Iterator[Problem]:
    if sections.Engine.save_load.save_epoch == 0:
        yield Problem("Engine.save_load.save_epoch", 0, "it must be at least 1 (-1 means 1)")
    if sections.Engine.save_load.save_steps == 0:
        yield Problem("Engine.save_load.save_steps", 0, "it must be at least 1; null or -1 saves only at the end")
    section = sections.Engine.save_load
    if section.keep_every is not None and section.keep_last is None:
        rule = "it exempts checkpoints from deletion, and without keep_last none is deleted"
        yield Problem("Engine.save_load.keep_every", section.keep_every, rule, "-o Engine.save_load.keep_last=2")
    if section.weights_only and section.ckpt_dir in (None, "auto"):
        rule = "it starts a new run from the weights of a checkpoint that ckpt_dir names; auto goes on with a run"
        yield Problem("Engine.save_load.weights_only", True, rule, "-o Engine.save_load.ckpt_dir=…/step_N")


def _profiler(sections: Sections, derived: Derived) -> Iterator[Problem]:
    profiler = sections.Profiler
    if profiler.enable and profiler.scheduler[0] >= profiler.scheduler[1]:
        yield Problem(
            "Profiler.scheduler", list(profiler.scheduler), "[a, b] profiles updates a to b-1, so a must be below b"
        )


def _fault(sections: Sections, derived: Derived) -> Iterator[Problem]:
    fault = sections.Debug.fault
    if fault is not None and fault.rank >= derived.world_size:
        yield Problem("Debug.fault.rank", fault.rank, f"ranks of this run are 0..{derived.world_size - 1}")


def _splits(sections: Sections) -> Iterator[tuple[str, SplitConfig]]:
    """The path and section of each use of data that is not off."""
    for mode in ("Train", "Eval", "Test"):
        data = getattr(sections.Data, mode)
        if data is not None:
            yield f"Data.{mode}", data


RULES: tuple[Rule, ...] = (
    _family, _heads, _heads_over_ranks, _key_value_heads, _rotary,
    _ffn, _positions, _sequence_over_ranks, _end_of_document, _shares, _stages, _interleaved, _order,
    _tensor_fusion, _rates, _train_data, _steps, _saves, _profiler, _fault,
)  # fmt: skip
