"""The Profiler section on a tiny CPU loop."""

import json
import logging

import paddle
import pytest

from ppfleetx.config.schema import ProfilerConfig, ProfilerSummaryConfig
from ppfleetx.metrics import Profiling

NO_TABLES = ProfilerSummaryConfig(overview=False, model=False, kernel=False, op=False)


def loop(folder, updates, scheduler, **options):
    config = ProfilerConfig(**{"enable": True, "scheduler": scheduler, "summary": NO_TABLES, **options})
    layer = paddle.nn.Linear(4, 4)
    with Profiling(config, str(folder), rank=options.get("rank", 0)) as profiling:
        for _ in range(updates):
            layer(paddle.ones([2, 4])).sum().backward()
            profiling.step()


def profiled_updates(folder):
    (trace,) = (folder / "profiler_log").glob("rank0_*.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(int(name.split("#")[1].split("[")[0]) for name in names if name.startswith("ProfileStep#"))


@pytest.mark.parametrize(("scheduler", "right"), [([1, 3], [1, 2]), ([2, 3], [2])])
def test_updates_a_to_b_minus_1(tmp_path, scheduler, right, capfd):
    loop(tmp_path, 5, scheduler)
    assert profiled_updates(tmp_path) == right
    assert "Summary" not in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore:Profiler will record data")
def test_from_the_first_update_with_tables(tmp_path, capfd):
    loop(tmp_path, 3, [0, 2], summary=ProfilerSummaryConfig(model=False, kernel=False))
    assert profiled_updates(tmp_path) == [0, 1]
    out = capfd.readouterr().out
    assert "Overview Summary" in out and "Operator Summary" in out and "Model Summary" not in out


def test_a_run_that_ends_early(tmp_path, caplog):
    loop(tmp_path / "inside", 3, [1, 9])
    assert profiled_updates(tmp_path / "inside")[:2] == [1, 2]
    with caplog.at_level(logging.WARNING, logger="ppfleetx"):
        loop(tmp_path / "before", 1, [5, 9])
    assert "nothing was profiled" in caplog.text


def test_off(tmp_path):
    loop(tmp_path, 5, [1, 3], enable=False)
    assert not (tmp_path / "profiler_log").exists()
