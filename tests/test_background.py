"""Work beside the training: nothing lost, in order, errors told once."""

import threading
from collections.abc import Callable

import pytest
from flwr.app import Message

from flower_blsgd.background import Background, Later, Readers, TellingWhenSent

WAIT_SECONDS = 60.0


def fails(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


# --- Later


def test_later_is_computed_once_whoever_asks() -> None:
    calls: list[threading.Thread] = []
    value = Later(lambda: calls.append(threading.current_thread()) or 7)
    assert [value.result() for _ in range(3)] == [7, 7, 7]
    assert calls == [threading.current_thread()]


def test_later_that_has_begun_is_computed_elsewhere() -> None:
    ran: list[threading.Thread] = []
    began, go_on = threading.Event(), threading.Event()

    def compute() -> int:
        ran.append(threading.current_thread())
        began.set()
        assert go_on.wait(WAIT_SECONDS)
        return 7

    value = Later(compute)
    value.begin()
    assert began.wait(WAIT_SECONDS)
    go_on.set()
    assert value.result() == 7
    assert len(ran) == 1
    assert ran[0] is not threading.current_thread()


def test_later_raises_whenever_it_is_asked_for_and_not_before() -> None:
    value: Later[int] = Later(fails(LookupError("no")))  # type: ignore[arg-type]
    value.settle()
    for _ in range(2):
        with pytest.raises(LookupError, match="no"):
            value.result()


def test_readers_settle_reads_before_what_it_is_read_from_changes() -> None:
    table = [1]
    readers = Readers()
    first = readers.add(lambda: table[0])
    readers.settle()
    table[0] = 2
    second = readers.add(lambda: table[0])
    readers.begin()
    readers.settle()
    table[0] = 3
    assert (first.result(), second.result()) == (1, 2)


# --- Background


def test_work_waits_for_its_time_and_keeps_its_order() -> None:
    done: list[int] = []
    work = Background()
    for number in range(50):
        work.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    work.start()
    work.put(lambda: done.append(50))
    work.flush()
    assert done == list(range(51))
    work.close()


def test_work_that_was_put_after_start_waits_for_the_next() -> None:
    done: list[str] = []
    first = threading.Event()
    work = Background()
    work.put(lambda: (done.append("first"), first.set()))
    work.start()
    work.put(lambda: done.append("second"))
    assert first.wait(WAIT_SECONDS)
    assert done == ["first"]
    work.start()
    work.flush()
    assert done == ["first", "second"]
    work.close()


def test_start_does_not_wait() -> None:
    go_on = threading.Event()
    done: list[bool] = []
    work = Background()
    work.put(lambda: done.append(go_on.wait(WAIT_SECONDS)))
    work.start()
    assert done == []
    go_on.set()
    work.flush()
    assert done == [True]
    work.close()


def test_without_a_thread_of_its_own_it_works_at_once() -> None:
    threads: list[threading.Thread] = []
    work = Background(own_thread=False)
    work.put(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    with pytest.raises(OSError, match="disk full"):
        work.put(fails(OSError("disk full")))
    work.start()
    work.flush()
    work.close()


def test_without_a_thread_to_be_had_flush_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    work = Background()
    work.put(lambda: done.append(1))
    with pytest.raises(RuntimeError):
        work.start()
    work.flush()
    assert done == [1]
    readers = Readers()
    value = readers.add(lambda: 5)
    readers.begin()
    assert value.result() == 5


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["os", "ctrl-c"])
def test_first_error_is_raised_once_and_the_rest_is_done(error: BaseException) -> None:
    done: list[int] = []
    work = Background()
    for piece in (
        lambda: done.append(1),
        fails(error),
        fails(ValueError()),
        lambda: done.append(2),
    ):
        work.put(piece)
    with pytest.raises(type(error)):
        work.flush()
    assert done == [1, 2]
    work.put(lambda: done.append(3))
    work.flush()
    assert done == [1, 2, 3]
    work.close()


def test_error_is_raised_by_the_next_call() -> None:
    failed = threading.Event()
    work = Background()
    work.put(fails(OSError("disk full")))
    work.put(failed.set)
    work.start()
    assert failed.wait(WAIT_SECONDS)
    with pytest.raises(OSError, match="disk full"):
        work.put(lambda: None)
    work.put(lambda: None)
    work.close()


def test_too_much_work_makes_the_giver_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_blsgd.background._MOST_KEPT", 3)
    most = 0
    work = Background()

    def look() -> None:
        nonlocal most
        most = max(most, len(work._kept))

    for _ in range(30):
        work.put(look)
    work.flush()
    assert 0 < most <= 3
    work.close()


def test_closed_work_leaves_no_thread() -> None:
    work = Background()
    work.put(lambda: None)
    work.start()
    work.flush()
    thread = work._thread
    assert thread is not None
    work.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    work.close()


# --- TellingWhenSent


def test_messages_tell_once_when_the_last_is_taken() -> None:
    told: list[int] = []
    taken: list[int] = []
    messages = TellingWhenSent([1, 2, 3], lambda: told.append(len(taken)))  # type: ignore[list-item]
    assert len(messages) == 3
    for message in messages:
        taken.append(message)  # type: ignore[arg-type]
        assert told == []
    assert told == [3]
    assert list(messages) == [1, 2, 3]  # Flower's own grid goes through them twice
    assert told == [3]


def test_messages_nobody_takes_tell_nobody() -> None:
    told: list[int] = []
    messages: list[Message] = TellingWhenSent([], lambda: told.append(1))
    assert told == []
    assert list(messages) == []
    assert told == [1]
