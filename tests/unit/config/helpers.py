"""Small helpers for the tests of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.config import Config, Loaded, Problem, UserError, load_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "configs/nlp/gpt"

#: overrides that make a whole configuration: 4 layers, hidden 64, 4 heads, vocabulary 256, sequence 32
TINY = (
    "Global.local_batch_size=8",
    "Model.vocab_size=256",
    "Model.hidden_size=64",
    "Model.num_layers=4",
    "Model.num_attention_heads=4",
    "Data.Train.dataset.max_seq_len=32",
)


def tiny(*overrides: str, world_size: int = 1) -> Loaded:
    """The tiny GPT with some overrides."""
    return load_config([], [*TINY, *overrides], world_size)


def config_of(*overrides: str, world_size: int = 1) -> Config:
    return tiny(*overrides, world_size=world_size).config


def problems_of(*overrides: str, world_size: int = 1) -> tuple[Problem, ...]:
    """What is wrong with the tiny GPT after some overrides."""
    with pytest.raises(UserError) as caught:
        tiny(*overrides, world_size=world_size)
    return caught.value.problems


def problem_of(*overrides: str, world_size: int = 1) -> Problem:
    """The only thing that is wrong."""
    problems = problems_of(*overrides, world_size=world_size)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def write(folder: Path, name: str, text: str) -> Path:
    """A YAML file, with its folders."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
