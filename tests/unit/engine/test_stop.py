"""A signal that asks for a stop must not disturb what the process is doing."""

import ctypes
import os
import signal
import threading

import pytest

from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.engine.stop import SIGNALS, StopRequests


@pytest.mark.parametrize("number", SIGNALS)
def test_a_system_call_under_way_goes_on(tmp_path, number):
    """Paddle's store takes an interrupted `recv` for a broken connection, which would end the run without its last save: so C
    code that waits in the main thread, here for a byte in a pipe, must wait on when the signal comes."""
    stop = StopRequests(ParallelContext(Topology(0, 1), "cpu", {}, None), tmp_path)
    reading, writing = os.pipe()
    byte = ctypes.create_string_buffer(1)
    with stop.listening():
        assert stop.after_update(1) is None
        timers = [
            threading.Timer(0.2, os.kill, (os.getpid(), number)),
            threading.Timer(0.6, os.write, (writing, b"x")),
        ]
        for timer in timers:
            timer.start()
        read = ctypes.CDLL(None, use_errno=True).read(reading, byte, 1)
        assert (read, byte.value) == (1, b"x"), os.strerror(ctypes.get_errno())
        for timer in timers:
            timer.join()
        assert stop.after_update(2) == f"{signal.Signals(number).name} to rank 0"
    os.close(reading)
    os.close(writing)
