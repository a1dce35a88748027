"""Like tests/parity/worker.py, but a run that resumes first saves what it has restored.

Where the checkpoint is of another folder, that save is then moved to `output_dir/previous-1`: the run does not continue it.
"""

from __future__ import annotations

import json
import sys

from ppfleetx.engine import Engine
from tools.train import main

fit = Engine.fit


def save_and_fit(engine, data):
    """In place of `Engine.fit`."""
    if engine.resumed_from is not None:
        engine.save(data)
        engine.checkpoints.wait()
    return fit(engine, data)


if __name__ == "__main__":
    Engine.fit = save_and_fit
    codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
    print("codes", codes, flush=True)
    raise SystemExit(max(codes))
