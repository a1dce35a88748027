"""GPT as `transformers`' GPT-2 (HFForm of `models/hf.py`). Its Conv1D weights are [in, out] like ours. Imports no Paddle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import UserError
from ppfleetx.models.hf import Link, Section, fitting, only, required

MODEL_TYPE = "gpt2"
NAMES: tuple[str, ...] = ("GPT", "GPT-cn")
PREFIX = "transformer."
NO_WEIGHTS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")

_WORD = "transformer.wte.weight"
#: the tanh form of GELU under the names that it has there, ours first
_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
#: and what that is in float32, as files have it that went through float32
_EPSILON = (1e-5, 9.999999747378752e-06)

#: inside a block: ours → theirs; each has a weight and a bias
_BLOCK = {
    ("norm1",): "ln_1",
    ("attention.q", "attention.k", "attention.v"): "attn.c_attn",
    ("attention.out",): "attn.c_proj",
    ("norm2",): "ln_2",
    ("mlp.up",): "mlp.c_fc",
    ("mlp.down",): "mlp.c_proj",
}
#: key of our section Model → key of config.json, for what both have in the same meaning
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
#: … and the default there
_OPTIONS = {
    "hidden_dropout_prob": ("resid_pdrop", 0.1),
    "attention_probs_dropout_prob": ("attn_pdrop", 0.1),
    "initializer_range": ("initializer_range", 0.02),
}
_EMBEDDING_DROPOUT = ("embd_pdrop", 0.1)
#: what our model computes; where two values are allowed they give the same numbers
_FIXED = {
    "activation_function": _GELU,
    "layer_norm_epsilon": _EPSILON,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def links(model: Mapping[str, Any]) -> list[Link]:
    """All tensors, in GPT-2's order; the head is the word embedding."""
    found = [
        Link(_WORD, ("embedding.word.weight",)),
        Link("transformer.wpe.weight", ("embedding.position.weight",)),
    ]
    for number in range(model["num_layers"]):
        for ours, theirs in _BLOCK.items():
            found += _pair(f"transformer.h.{number}.{theirs}", tuple(f"blocks.{number}.{one}" for one in ours))
    return [*found, *_pair("transformer.ln_f", ("norm",))]


def tied(model: Mapping[str, Any]) -> dict[str, str]:
    """The head, where files hold it too."""
    return {"lm_head.weight": _WORD}


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-2's config.json."""
    inner = model.get("ffn_hidden_size")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPE,
        **{theirs: model[ours] for ours, theirs in _SIZES.items()},
        "n_inner": None if inner == 4 * model["hidden_size"] else inner,
        **{theirs: model[ours] for ours, (theirs, _) in _OPTIONS.items()},
        "embd_pdrop": model["hidden_dropout_prob"],
        **{name: values[0] for name, values in _FIXED.items()},
        "reorder_and_upcast_attn": False,
        # the defaults there are those of the published GPT-2's vocabulary
        "bos_token_id": None,
        "eos_token_id": None,
    }


def from_config(config: Mapping[str, Any]) -> Section:
    """The section `Model`; what config.json leaves out has the default of `transformers`."""
    options = {**_OPTIONS, "": _EMBEDDING_DROPOUT}
    problems = [*required(config, tuple(_SIZES.values())), *fitting(config, options), *only(config, _FIXED)]
    if problems:
        raise UserError(*problems)
    model = {"name": NAMES[0], **{ours: config[theirs] for ours, theirs in _SIZES.items()}}
    inner = config.get("n_inner")
    model["ffn_hidden_size"] = 4 * model["hidden_size"] if inner is None else inner
    model |= {ours: config.get(theirs, default) for ours, (theirs, default) in _OPTIONS.items()}
    notes = []
    embedding = config.get(*_EMBEDDING_DROPOUT)
    if embedding != model["hidden_dropout_prob"]:
        notes.append(
            f"embd_pdrop {embedding} is dropped: Model.hidden_dropout_prob {model['hidden_dropout_prob']} (resid_pdrop) "
            "holds for the embedding as well"
        )
    return Section(model, notes)


def _pair(theirs: str, ours: tuple[str, ...]) -> list[Link]:
    return [Link(f"{theirs}.{kind}", tuple(f"{one}.{kind}" for one in ours)) for kind in ("weight", "bias")]
