"""The thread that waits for many: calls back, forgets, ticks, ends."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from flower_blsgd.runtime.reactor import Reactor


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_calls_back_when_something_can_be_read(reactor: Reactor, pipe: tuple[int, int]) -> None:
    read = threading.Event()
    seen = []

    def on_readable() -> None:
        seen.append(os.read(pipe[0], 10))
        read.set()

    reactor.watch(pipe[0], on_readable)
    os.write(pipe[1], b"one")
    assert read.wait(60)
    assert seen == [b"one"]


def test_watches_more_while_it_waits(reactor: Reactor, pipe: tuple[int, int]) -> None:
    other = os.pipe()
    read = threading.Event()
    reactor.watch(pipe[0], lambda: None)
    time.sleep(0.05)  # it waits
    reactor.watch(other[0], lambda: (os.read(other[0], 10), read.set())[1])
    os.write(other[1], b"x")
    assert read.wait(60)
    reactor.forget(other[0])
    for end in other:
        os.close(end)


def test_what_is_forgotten_is_not_called(reactor: Reactor, pipe: tuple[int, int]) -> None:
    calls = []
    reactor.watch(pipe[0], lambda: calls.append(1))
    reactor.forget(pipe[0])
    reactor.forget(pipe[0])  # twice is no mistake
    os.write(pipe[1], b"x")
    time.sleep(0.3)
    assert calls == []


def test_ticks_while_nothing_comes(reactor: Reactor, pipe: tuple[int, int]) -> None:
    ticked = threading.Event()
    reactor.add_tick(ticked.set)
    reactor.watch(pipe[0], lambda: None)
    assert ticked.wait(60)


def test_close_ends_the_thread_and_may_be_called_twice(pipe: tuple[int, int]) -> None:
    before = threading.active_count()
    reactor = Reactor()
    reactor.watch(pipe[0], lambda: None)
    assert threading.active_count() == before + 1
    reactor.close()
    reactor.close()
    assert threading.active_count() == before


def test_without_anything_to_watch_there_is_no_thread() -> None:
    before = threading.active_count()
    reactor = Reactor()
    assert threading.active_count() == before
    reactor.close()
