import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, get_ident
from types import SimpleNamespace

import pytest

from flower_blsgd.algorithm import shared_work
from flower_blsgd.algorithm.shared_work import num_threads, share, threads_for


@pytest.mark.parametrize("threads", [1, 2, 8, 100])
@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_share_takes_every_piece_once(threads: int, count: int) -> None:
    done: list[int] = []
    share(range(count), done.extend, threads)
    assert sorted(done) == list(range(count))


def test_share_with_one_thread_works_in_the_caller_and_in_order() -> None:
    done: list[tuple[int, int]] = []
    share(range(5), lambda pieces: done.extend((get_ident(), piece) for piece in pieces), 1)
    assert done == [(get_ident(), piece) for piece in range(5)]


def test_share_works_in_several_threads_at_once() -> None:
    together = Barrier(3)

    def work(pieces: Iterator[int]) -> None:
        for _ in pieces:
            together.wait(timeout=60)  # raises unless three come

    share(range(3), work, 3)


def test_share_raises_what_a_piece_raises_and_begins_no_other() -> None:
    begun: list[int] = []

    def work(pieces: Iterator[int]) -> None:
        for piece in pieces:
            begun.append(piece)
            raise IndexError("of a piece")

    with pytest.raises(IndexError, match="of a piece"):
        share(range(100), work, 2)
    assert 1 <= len(begun) <= 2


def test_share_raises_what_another_thread_raises_and_waits_for_it() -> None:
    caller, both = get_ident(), Barrier(2)

    def work(pieces: Iterator[int]) -> None:
        for _ in pieces:
            both.wait(timeout=60)
            if get_ident() != caller:
                time.sleep(0.05)
                raise ValueError("in a helper")

    with pytest.raises(ValueError, match="in a helper"):
        share(range(2), work, 2)


def test_share_does_all_by_itself_where_no_thread_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    monkeypatch.setattr(shared_work, "_pool", lambda process: ended)
    done: list[int] = []
    share(range(10), done.extend, 4)
    assert done == list(range(10))


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_share_works_in_a_fork() -> None:
    """Which has none of the threads that its parent had."""
    share(range(10), list, 4)
    child = os.fork()
    if child == 0:
        together = Barrier(2)
        try:
            share(range(2), lambda pieces: [together.wait(60) for _ in pieces], 2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("cores", "told", "expected"), [(4, 2, 2), (2, 64, 2), (64, 64, 8), (1, 1, 1)]
)
def test_num_threads_is_what_the_machine_and_torch_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, told: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: told))
    assert num_threads() == expected


def test_num_threads_does_not_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert num_threads() == 3
    assert "torch" not in sys.modules


def test_threads_for_little_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "num_threads", lambda: 4)
    assert threads_for(5_400_000) == 1  # four models of ResNet20, and their average
    assert threads_for(220_000_000) == 4
