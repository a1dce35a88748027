"""Llama as `transformers` has it (HFForm of `models/hf.py`). Imports no Paddle.

Its matrices are torch's [out, in], ours [in, out]. Rotary positions turn dim i of a head with dim i + d/2 in both, so columns
of queries and keys stay in place (Meta's own files turn neighbours; the converter of `transformers` has moved them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.models.hf import Link, Section, fitting, only, required

MODEL_TYPE = "llama"
NAMES: tuple[str, ...] = ("Llama",)
PREFIX = "model."
NO_WEIGHTS = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

_WORD, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: inside a block: ours → theirs
_BLOCK = {
    "norm1": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
#: key of our section Model → key of config.json, for what both have in the same meaning
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
#: … and the default there
_OPTIONS = {
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "initializer_range": ("initializer_range", 0.02),
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
}
#: what our model computes; swish is another name of silu
_FIXED = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1,)}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def links(model: Mapping[str, Any]) -> list[Link]:
    """All tensors, in Llama's order."""
    found = [Link(_WORD, ("embedding.word.weight",))]
    for number in range(model["num_layers"]):
        for ours, theirs in _BLOCK.items():
            name = f"blocks.{number}.{ours}.weight"
            found.append(Link(f"model.layers.{number}.{theirs}.weight", (name,), transposed="norm" not in ours))
    found.append(Link("model.norm.weight", ("norm.weight",)))
    return found if model.get("tie_word_embeddings") else [*found, Link(_HEAD, ("head.weight",))]


def tied(model: Mapping[str, Any]) -> dict[str, str]:
    """The head, where it is the embedding and files hold it too."""
    return {_HEAD: _WORD} if model.get("tie_word_embeddings") else {}


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's config.json, rotary settings as `transformers` 4 writes and 5 still reads them."""
    heads = model["num_attention_heads"]
    sizes = {**model, "ffn_hidden_size": model.get("ffn_hidden_size") or 4 * model["hidden_size"]}
    scaling = model.get("rope_scaling")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        **{theirs: sizes[ours] for ours, theirs in _SIZES.items()},
        "num_key_value_heads": model.get("num_key_value_heads") or heads,
        "head_dim": model["hidden_size"] // heads,
        **{theirs: model[ours] for ours, (theirs, _) in _OPTIONS.items()},
        "rope_theta": model["rope_theta"],
        "rope_scaling": scaling and {"rope_type": "llama3", **{name: scaling[name] for name in _SCALING}},
        **{name: values[0] for name, values in _FIXED.items()},
        # the defaults there are those of the first Llama's vocabulary
        "bos_token_id": None,
        "eos_token_id": None,
    }


def from_config(config: Mapping[str, Any]) -> Section:
    """The section `Model`; what config.json leaves out has the default of `transformers`."""
    problems = [*required(config, tuple(_SIZES.values())), *fitting(config, _OPTIONS), *only(config, _FIXED)]
    rotary, wrong = _rotary(config)
    if problems := [*problems, *wrong]:
        raise UserError(*problems)
    model = {"name": NAMES[0], **{ours: config[theirs] for ours, theirs in _SIZES.items()}}
    heads, width = model["num_attention_heads"], config.get("head_dim")
    if width is not None and width != model["hidden_size"] / heads:
        rule = f"our heads are hidden_size {model['hidden_size']} ÷ num_attention_heads {heads} wide"
        raise UserError(Problem("config.json: head_dim", width, rule))
    model["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    model |= {ours: config.get(theirs, default) for ours, (theirs, default) in _OPTIONS.items()}
    return Section({**model, "hidden_dropout_prob": 0.0, **rotary}, [])  # theirs drops nothing there


def _rotary(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Our rotary keys, from `rope_scaling` and `rope_theta` (transformers 4), or `rope_parameters` (5, which takes the older
    ones first where they are given as well)."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(key) or {}
    if not isinstance(settings, dict):
        return {}, [Problem(f"config.json: {key}", settings, "it must be an object or null")]
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "llama3"):
        rule = "our model computes rope_type 'default' or 'llama3' only"
        return {}, [Problem(f"config.json: {key}.rope_type", kind, rule)]
    theta = settings.get("rope_theta", config.get("rope_theta", 10000.0))
    scaling = {name: settings.get(name) for name in _SCALING} if kind == "llama3" else None
    places = {"rope_theta": theta, **{f"{key}.{name}": value for name, value in (scaling or {}).items()}}
    problems = [
        Problem(f"config.json: {place}", value, "config.json lacks it" if value is None else "it must be a number")
        for place, value in places.items()
        if not isinstance(value, (int, float)) or isinstance(value, bool)
    ]
    return ({}, problems) if problems else ({"rope_theta": float(theta), "rope_scaling": scaling}, [])
