"""What every checkpoint made from another program's files has. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import ppfleetx
from ppfleetx.checkpoint.files import FileSum, write_text
from ppfleetx.checkpoint.manifest import Entry
from ppfleetx.checkpoint.weights import write_weights_manifest
from ppfleetx.config import Config, load_config

#: the section Model that fits, beside converted weights
MODEL_YAML = "model.yaml"


def model_config(model: Mapping[str, Any]) -> Config:
    """A section Model as a whole configuration: all that our rules say of a model holds.

    Raises:
        UserError: a key is unknown, or a rule is broken.
    """
    smallest_run = ("Global.local_batch_size=1", "Data.Train.dataset.max_seq_len=1")
    return load_config([], [*smallest_run, *(f"Model.{key}={value}" for key, value in model.items())]).config


def write_converted(
    folder: Path, files: Mapping[str, FileSum], entries: Sequence[Entry], model: Mapping[str, Any], source: str
) -> None:
    """Makes files of weights a checkpoint, with the section Model beside it.

    The section's file is not one that is checked: a person may change it.
    """
    config = yaml.safe_load(model_config(model).to_yaml())
    run = {"config": {"Model": config["Model"]}, "versions": {"ppfleetx": ppfleetx.__version__}}
    write_text(folder / MODEL_YAML, yaml.safe_dump({"Model": dict(model)}, sort_keys=False))
    write_weights_manifest(folder, files, entries, run, source)
