"""Llama on paper: its logical parameters. Imports no Paddle."""

from __future__ import annotations

from ppfleetx.config import Config
from ppfleetx.layers.spec import ParameterSpec
from ppfleetx.models.spec import FINAL_NORM, attention, ends, linear, norm, residual_std


def parameters(config: Config) -> dict[str, ParameterSpec]:
    """All logical parameters by name, in model order; no biases."""
    word, head = ends(config, config.Model.tie_word_embeddings)
    specs = [word]
    for number in range(config.Model.num_layers):
        specs += _block(config, f"blocks.{number}")
    specs += [*norm(FINAL_NORM, config.Model.hidden_size, bias=False), head]
    return {spec.name: spec for spec in specs}


def _block(config: Config, path: str) -> list[ParameterSpec]:
    hidden, ffn, std = config.Model.hidden_size, config.derived.ffn_hidden_size, config.Model.initializer_range
    # one group a tensor rank, so that each holds its columns of the gate, then its columns of the up matrix
    (gate_up,) = linear(f"{path}.mlp.gate_up", (hidden, 2 * ffn), std, 1, bias=False)
    parts = (f"{path}.mlp.gate.weight", f"{path}.mlp.up.weight")
    return [
        *norm(f"{path}.norm1", hidden, bias=False),
        *attention(config, f"{path}.attention", bias=False),
        *norm(f"{path}.norm2", hidden, bias=False),
        gate_up.fused(parts, config.Distributed.mp_degree),
        *linear(f"{path}.mlp.down", (ffn, hidden), residual_std(config), 0, bias=False),
    ]
