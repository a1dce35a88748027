"""`mp_degree: auto` and `sharding_degree: auto`, from the real launcher and from --nodes."""

from __future__ import annotations

import socket

import pytest

from tests.launch import Launch
from tests.training import REPO
from tools.train import main

AUTO = ["-c", str(REPO / "configs/debug/tiny_llama.yaml"), "-o", "Distributed.mp_degree=auto"]
AUTO += ["Distributed.sharding.sharding_degree=auto"]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_two_nodes_of_two_cards():
    master = f"127.0.0.1:{free_port()}"
    launches = []
    for rank in range(2):
        more = ["--nnodes", "2", "--master", master, "--rank", str(rank)]
        launches.append(Launch([REPO / "tests/cli/auto_worker.py", *AUTO], 2, launch_args=more))
    results = [job.wait(90) for job in launches]
    assert [result.returncode for result in results] == [0, 0], results
    assert [log.count("DEGREES 2 2") for result in results for log in result.logs] == [1] * 4


def test_nodes_of_a_dry_run(capsys):
    assert main([*AUTO, "--dry-run", "--world-size", "4", "--nodes", "2"]) == 0
    assert "mp_degree: 2" in capsys.readouterr().out
    assert main([*AUTO, "--explain", "Distributed.mp_degree", "--world-size", "2"]) == 0
    assert "Distributed.mp_degree = 2\n" in capsys.readouterr().out
    assert main([*AUTO, "--explain", "Distributed.mp_degree"]) == 0
    assert "Distributed.mp_degree = 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("more", ["--nodes 3 --world-size 8", "--nodes 2", "--nodes 0 --world-size 4"])
def test_nodes_that_cannot_be(more, capsys):
    assert main([*AUTO, "--dry-run", *more.split()]) == 2
    assert "--nodes" in capsys.readouterr().err
