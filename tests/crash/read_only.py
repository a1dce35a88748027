"""`tools/train.py`, but output_dir loses its write permission after step 2 was saved."""

from __future__ import annotations

import os
import sys

from ppfleetx.checkpoint.manager import CheckpointManager
from tools.train import main

save = CheckpointManager.save


def strike(self, step, state):
    """In place of `CheckpointManager.save`."""
    if step == 3:
        self.wait()
        self.output_dir.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # no permission stops root
    save(self, step, state)


if __name__ == "__main__":
    CheckpointManager.save = strike
    raise SystemExit(main(sys.argv[1:]))
