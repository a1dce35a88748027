"""GPT on paper: its logical parameters. Imports no Paddle."""

from __future__ import annotations

from ppfleetx.config import Config
from ppfleetx.layers.spec import ParameterSpec
from ppfleetx.models.spec import FINAL_NORM, attention, ends, linear, norm, residual_std

POSITION_EMBEDDING = "embedding.position.weight"


def parameters(config: Config) -> dict[str, ParameterSpec]:
    """All logical parameters by name, in model order."""
    model = config.Model
    word, head = ends(config, tied=True)
    positions = (model.max_position_embeddings, model.hidden_size)
    specs = [
        word,
        ParameterSpec(name=POSITION_EMBEDDING, shape=positions, std=model.initializer_range, is_lookup=True),
    ]
    for number in range(model.num_layers):
        specs += _block(config, f"blocks.{number}")
    specs += [*norm(FINAL_NORM, model.hidden_size, bias=True), head]
    return {spec.name: spec for spec in specs}


def _block(config: Config, path: str) -> list[ParameterSpec]:
    hidden, ffn, std = config.Model.hidden_size, config.derived.ffn_hidden_size, config.Model.initializer_range
    return [
        *norm(f"{path}.norm1", hidden, bias=True),
        *attention(config, f"{path}.attention", bias=True),
        *norm(f"{path}.norm2", hidden, bias=True),
        *linear(f"{path}.mlp.up", (hidden, ffn), std, 1, bias=True),
        *linear(f"{path}.mlp.down", (ffn, hidden), residual_std(config), 0, bias=True),
    ]
