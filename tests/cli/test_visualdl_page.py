"""The real VisualDL server shows a run: page, scripts and data (issue 2).

Requests name no language, as those of curl: without `--language` VisualDL answers them with status 500.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest

from ppfleetx.metrics import EvalRecord, MetricsWriter, TrainRecord, visualdl_command

LOSSES = [5.5451774, 4.25, 1 / 3]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with MetricsWriter(str(folder), wall_clock=lambda: 1700000000.25) as writer:
        for step, loss in enumerate(LOSSES, start=1):
            writer.write(TrainRecord(
                step=step, epoch=0, updates=1, loss=loss, learning_rate=1e-3, grad_norm=1.0, found_inf=0, avg_batch_cost_s=0.1,
                tokens_per_second=100.0, tokens_per_second_per_device=100.0, mfu=None,
            ))  # fmt: skip
        writer.write(EvalRecord(step=3, loss=2.0, batches=1, avg_batch_cost_s=0.1))
    return folder


@pytest.fixture(scope="module")
def get(run_folder):
    """A function path → body of the running server's answer, which must be 200."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *options = visualdl_command(str(run_folder))
    command = [os.path.join(os.path.dirname(sys.executable), program), *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-telemetry"]
    with open(run_folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_open(server, port)
        yield lambda path: _get(f"http://127.0.0.1:{port}{path}")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=10)


def _wait_until_open(server, port, limit_s=30):
    end = time.monotonic() + limit_s
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the VisualDL server did not open its port (exit code {server.poll()})")


def _get(url):
    with urllib.request.urlopen(url, timeout=15) as answer:  # raises for 4xx and 5xx
        assert answer.status == 200
        return answer.read()


def _api(get, method, **query):
    answer = json.loads(get(f"/app/api/{method}?{urllib.parse.urlencode(query)}"))
    assert answer["status"] == 0, answer
    return answer["data"]


def test_page_and_scripts(get):
    page = get("/app/index").decode()
    assert "<title>VisualDL</title>" in page
    parts = re.findall(r'(?:src|href)="?(/app/[^">\s]+)', page)
    assert sum(part.endswith(".js") for part in parts) >= 2, page
    for part in parts:
        assert get(part)


def test_scalars_are_the_logged_points(get, run_folder):
    run = str(run_folder / "visualdl")
    assert _api(get, "runs") == [run]
    assert _api(get, "component_tabs") == ["scalar"]  # the page opens on the curves
    (tags,) = _api(get, "scalar/tags")["tags"]
    assert {
        "train/loss",
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "eval/loss",
        "eval/ppl",
    } <= set(tags)
    points = _api(get, "scalar/list", run=run, tag="train/loss")
    assert points == [[1700000000250, step, float(np.float32(loss))] for step, loss in enumerate(LOSSES, start=1)]
