"""Log lines and the progress bar, in processes of their own (loggers are global)."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

LINES = """
import logging, sys
from ppfleetx.metrics import ALL_RANKS_LOGGER, setup_logging
setup_logging({main}); setup_logging({main})
logging.getLogger("ppfleetx").info("info")
logging.getLogger("ppfleetx.part").warning("warning")
logging.getLogger(ALL_RANKS_LOGGER).info("asked for")
"""
BAR = """
import logging
from ppfleetx.metrics import Progress, setup_logging
setup_logging(True)
progress = Progress(total=10, done=4, enabled={enabled})
for done in range(5, 11):
    progress.update(done, loss=1.5)
    logging.getLogger("ppfleetx").info("line %d", done)
progress.close()
"""


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True, **options
    ).stdout


def test_form_and_levels():
    main = run(LINES.format(main=True)).splitlines()
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] "
    assert len(main) == 3
    assert re.fullmatch(stamp + r"\[    INFO\] - info", main[0])
    assert re.fullmatch(stamp + r"\[ WARNING\] - warning", main[1])
    assert [line.split(" - ")[1] for line in run(LINES.format(main=False)).splitlines()] == ["warning", "asked for"]


def test_importing_metrics_loads_neither_paddle_nor_visualdl():
    code = (
        "import sys, ppfleetx.metrics; print([name for name in ('paddle', 'visualdl', 'tqdm') if name in sys.modules])"
    )
    assert run(code) == "[]\n"


def test_no_bar_where_standard_error_is_no_terminal():
    done = subprocess.run(
        [sys.executable, "-c", BAR.format(enabled=True)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 6


def test_a_bar_on_a_terminal_does_not_tear_the_log():
    shown, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", BAR.format(enabled=True)], stdout=end, stderr=end)
    os.close(end)
    text = b""
    try:
        while chunk := os.read(shown, 65536):
            text += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(shown)
    assert process.wait(timeout=60) == 0
    assert b"10/10" in text and b"loss=1.5" in text
    for done in range(5, 11):  # each line begins a terminal line: nothing of the bar stands before it
        assert re.search(rb"(^|[\r\n])\[\d{4}-[^\r\n]*- line %d\r\n" % done, text), text
