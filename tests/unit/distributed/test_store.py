"""The job's store and the meetings on it, with two or three ranks as threads of this process."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.distributed import store as store_module
from ppfleetx.distributed.agreement import Meetings
from ppfleetx.distributed.store import JobStore, free_port, open_job_store, poll, serve_store, tcp_store


@pytest.fixture
def stores():
    """Three ranks' views of one store."""
    import paddle

    paddle.set_flags({"FLAGS_tcp_store_using_libuv": False})
    master, port = serve_store("127.0.0.1")
    clients = [tcp_store("127.0.0.1", port, is_master=False) for _ in range(2)]
    return [JobStore(transport, rank, 3) for rank, transport in enumerate([master, *clients])]


def on_all(stores, work):
    """`work(store)` for every rank at once; results or exceptions by rank."""

    def guarded(store):
        try:
            return work(store)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(guarded, stores))


def test_put_and_take(stores):
    def work(store):
        if store.rank == 1:
            time.sleep(0.1)
            store.put("k", "é\nx")
        return store.take("k", 10, "k")

    assert on_all(stores, work) == ["é\nx"] * 3


def test_deadlines_name_what_was_awaited(stores):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 waited 0.2 s for the moon \(0 of 1 came\)"):
        stores[1].take("nothing", 0.2, "the moon")
    assert 0.15 < time.monotonic() - start < 2


def test_a_lost_rank0_is_named_late(stores, monkeypatch):
    monkeypatch.setattr(store_module, "QUIET_END_S", 0.3)
    stores[1].count("k")
    stores[0].transport = None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0, which serves the job's store, has ended"):
        stores[1].take("k", 10, "k")
    assert time.monotonic() - start > 0.25


def test_jobs_that_meet_on_one_port_do_not_see_each_other(stores, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
    other = JobStore(stores[0].transport, 0, 3)
    other.put("k", "theirs")
    assert stores[1].count("k/there", 0) == 0


def test_requests_are_fast(stores):
    start = time.perf_counter()
    for _ in range(50):
        stores[1].count("n")
    assert (time.perf_counter() - start) / 50 < 0.01  # 0.044 s with Nagle's algorithm


def test_agree_without_a_problem_is_a_barrier(stores):
    arrived = []

    def work(store):
        meetings = Meetings(store)
        for _ in range(3):
            time.sleep(0.03 * store.rank)
            arrived.append(store.rank)
            meetings.agree(None, 10)
            assert len(arrived) >= 3
        return len(arrived)

    assert on_all(stores, work) == [9, 9, 9]


def test_all_ranks_raise_the_lowest_ranks_problem(stores):
    def work(store):
        problem = None
        if store.rank:
            problem = UserError(
                Problem("Data.path", f"/rank{store.rank}", "must exist", "make it"), Problem("b", 1, "r")
            )
        Meetings(store).agree(problem, 10)

    errors = on_all(stores, work)
    text = "Data.path = '/rank1'\n  rule: must exist\n  fix:  make it\nb = 1\n  rule: r"
    assert [type(error) for error in errors] == [UserError] * 3
    assert [str(error) for error in errors] == [text] * 3


def test_values_that_differ_are_told_on_all_ranks(stores):
    """Rank 1 is the lowest that differs: in a value and in one that it alone has; a tuple is the list that travelled."""

    def work(store):
        own = [{"a": [1, 2], "b": 1}, {"a": (1, 2), "b": 2, "c": None, "d": 0}, {"a": [1, 2], "b": 3}][store.rank]
        meetings = Meetings(store)
        meetings.same({"equal": 1.5}, 10)
        meetings.same(own, 10)

    errors = on_all(stores, work)
    assert all([(one.key, repr(one.value)) for one in error.problems] == [("b", "2"), ("d", "0")] for error in errors)
    assert all("rank 1 (on " in str(error) and "rank 0 has 1," in str(error) for error in errors)


def test_agree_gives_up_in_time(stores):
    with pytest.raises(RuntimeError, match="rank 1 to agree"):
        Meetings(stores[0]).agree(None, 0.2)


def test_rank0_first(stores):
    done = []

    def work(store):
        def build():
            time.sleep(0.2)
            done.append(store.rank)
            return 7

        result = Meetings(store).rank0_first("index", build)
        return result, list(done)

    assert on_all(stores, work) == [(7, [0])] * 3


@pytest.mark.parametrize("error", [UserError(Problem("a", 1, "r")), OSError("disk full")])
def test_rank0_first_fails_everywhere(stores, error):
    def work(store):
        def fail():
            raise error

        Meetings(store).rank0_first("save", fail)

    first, *others = on_all(stores, work)
    assert first is error
    if isinstance(error, UserError):
        assert [(type(one), str(one)) for one in others] == [(UserError, str(error))] * 2
    else:
        text = "rank 0 failed in phase 'save': OSError: disk full"
        assert [(type(one), str(one)) for one in others] == [(RuntimeError, text)] * 2


def test_rank0_says_farewell_last(stores):
    left = []

    def work(store):
        time.sleep(0.1 * store.rank)
        Meetings(store).farewell(10)
        left.append(store.rank)

    on_all(stores, work)
    assert sorted(left) == [0, 1, 2] and left.index(0) > 0


def test_a_lost_port_race_is_run_again(stores, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(store_module, "free_port", lambda: next(ports))
        transport, port = serve_store("127.0.0.1")
    assert port != taken and transport.add("k", 1) == 1


def test_a_bound_port_is_a_user_error_that_names_it_c79(stores, monkeypatch):
    monkeypatch.setattr(store_module, "BIND_TIMEOUT_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("PADDLE_MASTER", address)
        with pytest.raises(UserError) as caught:
            open_job_store(0, 2, "cpu", 1)
    (problem,) = caught.value.problems
    assert problem.key == "PADDLE_MASTER" and problem.value == address
    assert address.split(":")[1] in problem.rule


def test_a_port_that_becomes_free_is_taken(stores, monkeypatch):
    taken = socket.socket()
    taken.bind(("", 0))
    monkeypatch.setenv("PADDLE_MASTER", f"127.0.0.1:{taken.getsockname()[1]}")
    threading.Timer(0.3, taken.close).start()
    assert open_job_store(0, 1, "cpu", 10).count("arrived", 0) == 1


def test_ranks_that_never_come_are_counted(stores, monkeypatch):
    monkeypatch.setenv("PADDLE_MASTER", f"127.0.0.1:{free_port()}")
    with pytest.raises(RuntimeError, match=r"all 2 processes to reach 127.0.0.1:\d+ \(1 of 2 came\)"):
        open_job_store(0, 2, "cpu", 0.2)


def test_a_rank0_that_never_comes_is_named(stores, monkeypatch):
    port = free_port()
    monkeypatch.setenv("PADDLE_MASTER", f"127.0.0.1:{port}")
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port} did not answer within 0.2 s"):
        open_job_store(1, 2, "cpu", 0.2)


def test_poll_asks_at_least_once():
    assert poll(lambda: True, 0) and not poll(lambda: False, 0)
