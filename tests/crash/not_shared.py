"""`tools/train.py` with an output_dir of its own for each rank, as on nodes that share no disk."""

from __future__ import annotations

import os
import sys

from ppfleetx.engine import output_dir
from tools.train import main

if __name__ == "__main__":
    output_dir.VISIBLE_S = 0.5
    folder = f"{sys.argv[1]}/node{os.environ['PADDLE_TRAINER_ID']}"
    raise SystemExit(main([*sys.argv[2:], f"Engine.save_load.output_dir={folder}"]))
