"""Lets tests import `tests.launch` and, without an installation, `ppfleetx`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
