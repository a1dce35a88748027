"""Lets tests import `tests.launch` and, without an installation, `ppfleetx`; the option --full; the CPU's kernels."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.distributed.cpu import choose_kernels

choose_kernels()  # Paddle is not imported yet: runs in this process compute the bits of those that are launched

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a suite in the background; what it starts is to hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="whole matrices of layouts, longer runs")
