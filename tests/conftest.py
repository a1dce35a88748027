"""Lets tests import `tests.launch` and, without an installation, `ppfleetx`; the option --full."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="whole matrices of layouts, longer runs")
