"""The local grid with real processes, running an app that knows nothing of flower_blsgd."""

import contextlib
import errno
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower_blsgd.runtime import child_process
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.flower_internals import (
    CRASHED,
    NODE_GONE,
    NOT_LOADED,
    RAISED,
    become_server,
    empty_run,
)
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import usable_cores

from .processes import (
    answer_of,
    ask,
    ask_one,
    is_alive,
    make_app,
    make_grid,
    order,
    query,
    report,
    wait_until,
)

pytestmark = pytest.mark.processes

CORES = usable_cores()
FIRST_CORE, LAST_CORE = CORES[:1], CORES[-1:]
needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="this system has no /proc"
)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After all tests of this file there is no child process and no file in shared memory."""
    processes_before, shared_before = children(), shared_memory()
    yield
    gc.collect()
    assert wait_until(lambda: children() <= processes_before), children() - processes_before
    assert wait_until(lambda: not unused(shared_memory() - shared_before))


def children() -> set[int]:
    """Return the processes that this one started, dead ones that were not waited for included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def unused(names: set[str]) -> set[str]:
    """Leave out what some process still holds: other programs use shared memory as well."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:
            continue
        names = {name for name in names if name not in text}
    return names


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_app(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def grid(app_dir: Path) -> Iterator[LocalGrid]:
    """Two CPU workers, for the tests that kill no process."""
    workers = [
        WorkerSpec("cpu", FIRST_CORE, "fast", name="quick"),
        WorkerSpec("cpu", LAST_CORE, "slow", steps=3, slowdown=2.5),
    ]
    with make_grid(app_dir, workers, epochs=3, rate=0.5, task="digits", nesterov=True) as grid:
        yield grid


# --- messages -------------------------------------------------------------------------------


def test_send_and_receive_echoes_every_kind_of_record(grid: LocalGrid) -> None:
    message = order(text="hello", number=1.5, raw=b"\x00\xff", flags=[True, False])
    message.content["arrays"] = ArrayRecord({"w": Array(np.arange(6.0).reshape(2, 3))})
    reply = ask_one(grid, message)
    assert reply.content["order"] == ConfigRecord(
        {"do": "echo", "text": "hello", "number": 1.5, "raw": b"\x00\xff", "flags": [True, False]}
    )
    np.testing.assert_array_equal(
        reply.content["arrays"]["w"].numpy(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    )


def test_send_and_receive_replies_match_their_orders(grid: LocalGrid) -> None:
    messages = [order(100 + i % 2, text=f"order {i}") for i in range(6)]
    replies = ask(grid, *messages)
    assert [r.content["order"]["text"] for r in replies] == [f"order {i}" for i in range(6)]
    for message, reply in zip(messages, replies, strict=True):
        assert message.metadata.message_id
        assert reply.metadata.reply_to_message_id == message.metadata.message_id
        assert reply.metadata.src_node_id == message.metadata.dst_node_id
        assert reply.metadata.dst_node_id == message.metadata.src_node_id
        assert reply.metadata.message_type == "train"
        assert reply.metadata.group_id == "7"
    assert len({message.metadata.message_id for message in messages}) == 6


def test_send_and_receive_routes_by_message_type(grid: LocalGrid) -> None:
    evaluate = Message(RecordDict(), 101, "evaluate")
    replies = ask(grid, evaluate, query(101))
    assert answer_of(replies[0])["what"] == "evaluate"
    assert answer_of(replies[1])["node_id"] == 101


def test_send_and_receive_nothing(grid: LocalGrid) -> None:
    assert list(grid.send_and_receive([])) == []


def test_several_messages_to_one_node_are_served_in_turn(grid: LocalGrid, tmp_path: Path) -> None:
    log = tmp_path / "log"
    replies = ask(grid, *[order(100, text=f"{i}", log=str(log)) for i in range(5)])
    counts = [answer_of(reply)["count"] for reply in replies]
    assert counts == list(range(counts[0], counts[0] + 5))
    expected = [f"{what} {i}" for i in range(5) for what in ("begin", "end")]
    assert log.read_text().splitlines() == expected


def test_nodes_work_side_by_side(grid: LocalGrid, tmp_path: Path) -> None:
    """Each handler waits for a file that the other one makes."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    ask(grid, order(100, touch=a, wait_for=b), order(101, touch=b, wait_for=a))


def test_timeout_returns_the_replies_that_are_there(grid: LocalGrid, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ask(grid, order(100), order(101))  # both processes run
    for seconds in (0.5, 5.0, 50.0):  # as this machine allows
        late = order(100, wait_for=str(gate))
        replies = list(grid.send_and_receive([late, order(101, text="prompt")], timeout=seconds))
        if replies:
            break
    assert [reply.content["order"].get("text") for reply in replies] == ["prompt"]

    gate.touch()
    # The same worker serves in turn: when this reply is here, the late one has come before.
    assert ask_one(grid, order(100, text="next")).content["order"]["text"] == "next"
    assert list(grid.pull_messages([late.metadata.message_id])) == []


def pull(grid: LocalGrid, *message_ids: str, expected: int = 1) -> list[Message]:
    """Pull until the expected number of replies has come."""
    pulled: list[Message] = []

    def all_here() -> bool:
        pulled.extend(grid.pull_messages(iter(message_ids)))
        return len(pulled) >= expected

    assert wait_until(all_here)
    return pulled


def test_push_and_pull_returns_each_reply_once(grid: LocalGrid, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    (first,) = grid.push_messages([order(100, text="first", wait_for=str(gate))])
    assert list(grid.pull_messages([first])) == []
    (second,) = grid.push_messages([order(101, text="second")])
    gate.touch()
    pulled = pull(grid, first, second, "no such message", expected=2)
    texts = {r.metadata.reply_to_message_id: r.content["order"]["text"] for r in pulled}
    assert texts == {first: "first", second: "second"}
    assert list(grid.pull_messages([first, second])) == []


def test_two_threads_get_their_own_replies(grid: LocalGrid) -> None:
    got: dict[int, list[object]] = {}

    def send(who: int) -> None:
        replies = [ask_one(grid, order(100 + n % 2, text=f"{who}-{n}")) for n in range(10)]
        got[who] = [reply.content["order"]["text"] for reply in replies]

    threads = [threading.Thread(target=send, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {who: [f"{who}-{n}" for n in range(10)] for who in range(3)}


def test_push_to_an_unknown_node(grid: LocalGrid) -> None:
    with pytest.raises(ValueError, match=r"node 555 is not on this grid: \[100, 101\]"):
        grid.push_messages([order(555)])


def test_create_message_and_run(grid: LocalGrid) -> None:
    message = grid.create_message(RecordDict(), "query", 101, "5", ttl=60.0)
    assert message.metadata.dst_node_id == 101
    assert message.metadata.message_type == "query"
    assert message.metadata.group_id == "5"
    assert message.metadata.ttl == 60.0
    assert grid.run.run_id == message.metadata.run_id == 1
    with make_grid(Path()) as other:
        other.set_run(empty_run(8))
        assert other.run.run_id == 8


# --- what a worker's process is -------------------------------------------------------------


@needs_affinity
def test_cpu_affinity_is_that_of_the_spec(app_dir: Path, grid: LocalGrid) -> None:
    assert report(grid, 100)["affinity"] == list(FIRST_CORE)
    assert report(grid, 101)["affinity"] == list(LAST_CORE)
    with make_grid(app_dir, [WorkerSpec("cpu", CORES[:2]), WorkerSpec("cuda:0")]) as other:
        assert report(other, 100)["affinity"] == list(CORES[:2])
        assert report(other, 101)["affinity"] == list(CORES)  # an accelerator's is not pinned


@needs_affinity
@needs_proc
def test_cpu_affinity_holds_for_the_threads_of_libraries(app_dir: Path) -> None:
    if len(CORES) == 1:
        pytest.skip("with one core every thread is where it should be")
    with make_grid(app_dir, [WorkerSpec("cpu", LAST_CORE)], threads=2) as grid:
        said = report(grid)
    # Numpy's BLAS starts its threads when it is imported: a process that is pinned only then has
    # them anywhere. One that is pinned before may start none for a single core.
    assert set(said["native_affinity"]) <= set(LAST_CORE)


def test_threads_are_one_per_core(app_dir: Path, grid: LocalGrid) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    assert [report(grid, 100)[name] for name in names] == ["1", "1", "1"]
    with make_grid(app_dir, [WorkerSpec("cpu", CORES)]) as other:
        assert [report(other)[name] for name in names] == [str(len(CORES))] * 3
    with make_grid(app_dir, [WorkerSpec("cpu", CORES)], threads=5) as other:
        assert [report(other)[name] for name in names] == ["5", "5", "5"]


def test_gpus_are_hidden_from_cpu_workers_only(
    app_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with make_grid(app_dir, [WorkerSpec("cpu"), WorkerSpec("cuda:1")]) as grid:
        assert report(grid, 100)["CUDA_VISIBLE_DEVICES"] == ""
        assert report(grid, 101)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_torch_is_left_to_the_app(grid: LocalGrid) -> None:
    assert report(grid)["torch_imported"] is False


def test_node_config_says_which_worker_it_is(grid: LocalGrid) -> None:
    def node_config(node_id: int) -> dict[str, object]:
        said = report(grid, node_id)
        return {key[5:]: value for key, value in said.items() if key.startswith("node:")}

    assert node_config(100) == {
        "partition-id": 0,
        "num-partitions": 2,
        "device": f"cpu:{FIRST_CORE[0]}",
        "tier": "fast",
        "name": "quick",
    }
    assert node_config(101) == {
        "partition-id": 1,
        "num-partitions": 2,
        "device": f"cpu:{LAST_CORE[0]}",
        "tier": "slow",
        "steps": 3,
        "slowdown": 2.5,
    }


def test_run_config_reaches_the_app(grid: LocalGrid) -> None:
    said = report(grid)
    assert {key: said[f"run:{key}"] for key in ("epochs", "rate", "task", "nesterov")} == {
        "epochs": 3,
        "rate": 0.5,
        "task": "digits",
        "nesterov": True,
    }


def test_state_and_process_survive_from_message_to_message(grid: LocalGrid) -> None:
    before = answer_of(ask_one(grid, order(101)))
    after = answer_of(ask_one(grid, order(101)))
    assert after["count"] == before["count"] + 1
    assert after["pid"] == before["pid"] == grid.process_ids[101] != os.getpid()


def test_no_process_before_the_first_message(app_dir: Path) -> None:
    before = children()
    with make_grid(app_dir, 2) as grid:
        assert grid.process_ids == {}
        assert children() == before
        assert list(grid.get_node_ids()) == [100, 101]
        said = report(grid, 101)
        assert grid.process_ids == {101: said["pid"]}


def test_app_folder_comes_before_the_current_one(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_client.py").write_text("raise RuntimeError('the wrong app')\n")
    monkeypatch.chdir(tmp_path)
    with make_grid(app_dir) as grid:
        assert not ask_one(grid, order()).has_error()


def test_current_folder_does_not_shadow_the_standard_library(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the command ``blsgd`` itself, which runs well in a folder with a queue.py."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not the standard library')\n")
    monkeypatch.chdir(tmp_path)
    with make_grid(app_dir) as grid:
        reply = ask_one(grid, order())
    assert not reply.has_error(), reply.error.reason


# --- what goes wrong in a handler -----------------------------------------------------------


def test_handler_that_raises(grid: LocalGrid) -> None:
    before = report(grid, 100)["pid"]
    bad, good = ask(grid, order(100, do="raise"), order(101))
    assert bad.has_error()
    assert bad.error.code == RAISED == 2
    assert "Traceback (most recent call last)" in bad.error.reason
    assert "foreign_client.py" in bad.error.reason
    assert bad.error.reason.rstrip().endswith("ValueError: raised on purpose")
    assert bad.metadata.src_node_id == 100
    assert not good.has_error()

    assert not ask_one(grid, order(100)).has_error()
    assert report(grid, 100)["pid"] == before
    assert set(grid.get_node_ids()) == {100, 101}


def test_handler_that_raises_leaves_no_state_of_the_failed_call(app_dir: Path) -> None:
    with make_grid(app_dir) as grid:
        ask_one(grid, order(do="raise"))
        assert answer_of(ask_one(grid, order()))["count"] == 1


def test_message_without_a_handler(grid: LocalGrid) -> None:
    reply = ask_one(grid, Message(RecordDict(), 100, "query.profile"))
    assert reply.error.code == RAISED
    # The roster knows a foreign app by these words of Flower.
    assert "No query function registered with name 'profile'" in reply.error.reason


@pytest.mark.parametrize("do", ["return-none", "return-the-order"])
def test_handler_that_returns_no_reply(app_dir: Path, do: str) -> None:
    with make_grid(app_dir) as grid:
        reply = ask_one(grid, order(do=do))
        assert reply.has_error()
        assert answer_of(ask_one(grid, order()))["count"] >= 1


def test_reply_that_only_the_app_can_read(app_dir: Path) -> None:
    """An Array of the app's own class. Whatever the answer is, one comes; the node serves on."""
    with make_grid(app_dir) as grid:
        ask_one(grid, order(do="return-own-array"))
        assert not ask_one(grid, order()).has_error()


def test_message_that_cannot_be_sent(app_dir: Path) -> None:
    class Local(Array):
        """Cannot be pickled: it has no name that another process could import."""

    message = order()
    message.content["arrays"] = ArrayRecord()
    message.content["arrays"]["w"] = Local("float64", (2,), "other.form", bytes(16))
    with make_grid(app_dir) as grid:
        # An error for the sender, or an error reply; but not silence.
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            assert ask_one(grid, message).has_error()
        assert not ask_one(grid, order()).has_error()


@pytest.mark.parametrize(
    ("client_app", "reason"),
    [
        ("broken:app", "No module named 'not_installed_anywhere'"),
        ("no_such_module:app", "No module named 'no_such_module'"),
        ("foreign_client:no_such_app", "no_such_app"),
        ("foreign_client:not_an_app", "foreign_client:not_an_app is a str, not a ClientApp"),
        ("foreign_client", "Missing attribute"),
    ],
)
def test_app_that_does_not_load(app_dir: Path, client_app: str, reason: str) -> None:
    (app_dir / "broken.py").write_text("import not_installed_anywhere\n")
    with make_grid(app_dir, client_app=client_app) as grid:
        for reply in (ask_one(grid, order()), ask_one(grid, query())):
            assert reply.error.code == NOT_LOADED == 1
            assert "Traceback" in reply.error.reason
            assert reason in reply.error.reason
        assert set(grid.process_ids) == set(grid.get_node_ids()) == {100}


# --- a process that dies --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "how"),
    [("exit", "exit code 3"), ("sys-exit", "exit code 5"), ("segv", "signal SIGSEGV")],
)
def test_process_that_dies_in_a_handler(app_dir: Path, do: str, how: str) -> None:
    with make_grid(app_dir, 2) as grid:
        first = answer_of(ask(grid, order(100), order(101))[0])
        other = grid.process_ids[101]

        dead, unaffected = ask(grid, order(100, do=do), order(101))
        assert dead.error.code == CRASHED
        assert how in dead.error.reason
        assert answer_of(unaffected) == ConfigRecord({"count": 2, "pid": other})
        assert not is_alive(first["pid"])
        assert list(grid.get_node_ids()) == [100, 101]

        again, unaffected = ask(grid, order(100), order(101))
        assert answer_of(again)["count"] == 1
        assert answer_of(again)["pid"] == grid.process_ids[100] != first["pid"]
        assert answer_of(unaffected) == ConfigRecord({"count": 3, "pid": other})


def test_messages_queued_behind_a_death_are_served(app_dir: Path) -> None:
    with make_grid(app_dir) as grid:
        replies = ask(grid, order(do="exit"), order(text="a"), order(text="b"))
    assert replies[0].error.code == CRASHED
    assert [answer_of(reply)["count"] for reply in replies[1:]] == [1, 2]


def test_last_words_of_a_process_are_in_the_error(
    app_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly they are logged: the handler's listener may lag behind."""
    monkeypatch.setattr(child_process, "_LAST_WORDS_SECONDS", 30.0)

    class SlowTerminal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.1)

    log, terminal = logging.getLogger("flower_blsgd.runtime"), SlowTerminal()
    level = log.level
    log.addHandler(terminal)
    log.setLevel(logging.INFO)
    try:
        with make_grid(app_dir) as grid:
            lines = "\n".join(f"line {i}" for i in range(8))
            reason = ask_one(grid, order(do="exit", print=lines)).error.reason
    finally:
        log.removeHandler(terminal)
        log.setLevel(level)
    assert "line 7" in reason
    assert reason.splitlines()[-1].endswith("died (exit code 3)")


def test_death_is_noticed_while_a_forked_child_lives(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a DataLoader's: it has inherited all that the dead process held open."""
    monkeypatch.setattr(child_process, "_LAST_WORDS_SECONDS", 0.2)
    gate = tmp_path / "gate"
    with make_grid(app_dir) as grid:
        try:
            death = order(do="fork-and-exit", child_waits_for=str(gate))
            assert ask_one(grid, death, timeout=40).error.code == CRASHED
        finally:
            gate.touch()


def test_three_deaths_in_a_row_take_a_worker_off_the_grid(app_dir: Path) -> None:
    with make_grid(app_dir, 2) as grid:
        ask(grid, order(100), order(101))
        for _ in range(2):  # two deaths and an answer: not in a row
            ask(grid, order(100, do="exit"), order(100, do="exit"), order(100))
        assert list(grid.get_node_ids()) == [100, 101]

        replies = ask(grid, *[order(100, do="exit") for _ in range(3)], order(101))
        assert [reply.error.code for reply in replies[:3]] == [CRASHED] * 3
        assert not replies[3].has_error()
        assert wait_until(lambda: list(grid.get_node_ids()) == [101])
        assert set(grid.process_ids) == {101}

        gone, served = ask(grid, order(100), order(101))
        assert gone.error.code == NODE_GONE
        assert "3 times" in gone.error.reason
        assert not served.has_error()


def test_app_that_ends_its_process_on_import(app_dir: Path) -> None:
    (app_dir / "ends.py").write_text("import os\nos._exit(4)\n")
    with make_grid(app_dir, client_app="ends:app") as grid:
        replies = ask(grid, *[order() for _ in range(4)])
        assert [reply.error.code for reply in replies] == [CRASHED] * 3 + [NODE_GONE]
        assert "exit code 4" in replies[0].error.reason
        assert list(grid.get_node_ids()) == []


def kill(grid: LocalGrid, node_id: int) -> int:
    pid = grid.process_ids[node_id]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: node_id not in grid.process_ids)
    return pid


def test_process_killed_between_two_messages(app_dir: Path) -> None:
    with make_grid(app_dir, 2) as grid:
        ask(grid, order(100), order(100), order(101))
        killed = kill(grid, 100)
        fresh = answer_of(ask_one(grid, order(100)))
        assert fresh["count"] == 1
        assert fresh["pid"] == grid.process_ids[100] != killed
        assert answer_of(ask_one(grid, order(101)))["count"] == 2


def test_worker_that_dies_for_the_third_time_between_two_messages(app_dir: Path) -> None:
    """The message that finds it dead gets an answer, whatever it is."""
    with make_grid(app_dir) as grid:
        ask(grid, order(do="exit"), order(do="exit"))
        assert wait_until(lambda: 100 in grid.process_ids)
        kill(grid, 100)
        ask(grid, order())


def test_process_that_cannot_start(app_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many processes or too little memory is an error reply, not silence."""

    def refuse(*_args: object, **_more: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    with make_grid(app_dir) as grid:
        monkeypatch.setattr(subprocess, "Popen", refuse)
        reply = ask_one(grid, order())
        monkeypatch.undo()
        assert reply.has_error()


# --- the end --------------------------------------------------------------------------------


@needs_proc
def test_close_ends_all_processes_and_gives_everything_back(app_dir: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    files, threads, before = open_files(), threading.active_count(), children()
    grid = make_grid(app_dir, 3)
    ask(grid, order(100), order(101))  # the third one never starts
    pids = list(grid.process_ids.values())
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    assert children() - before == set(pids)

    grid.close()
    assert not any(is_alive(pid) for pid in pids)
    assert grid.process_ids == {}
    assert children() == before
    assert wait_until(lambda: (open_files(), threading.active_count()) == (files, threads))
    grid.close()


def test_close_tells_those_who_still_wait(app_dir: Path, tmp_path: Path) -> None:
    grid, begun = make_grid(app_dir), tmp_path / "begun"
    replies: list[Message] = []
    waiting = threading.Thread(
        target=lambda: replies.extend(
            grid.send_and_receive([order(touch=str(begun), wait_for="/no such file"), order()])
        )
    )
    waiting.start()
    assert wait_until(begun.exists)
    grid.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert [reply.error.code for reply in replies] == [NODE_GONE, NODE_GONE]


def test_reply_that_cannot_be_taken_in_costs_that_message_only(
    app_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, for example; the process lives, but the way to it is broken."""
    from flower_blsgd.runtime import channel

    with make_grid(app_dir) as grid:
        first = answer_of(ask_one(grid, order()))
        take = channel.recv_handle

        def fail(connection: object) -> int:
            monkeypatch.setattr(channel, "recv_handle", take)
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(channel, "recv_handle", fail)
        message = order()
        message.content["arrays"] = ArrayRecord({"w": Array(np.ones(5000))})
        assert ask_one(grid, message).error.code == CRASHED
        again = order()
        again.content["arrays"] = ArrayRecord({"w": Array(np.ones(5000))})
        assert answer_of(ask_one(grid, again))["pid"] != first["pid"]


def test_close_before_the_first_message(app_dir: Path) -> None:
    grid = make_grid(app_dir, 2)
    grid.close()
    grid.close()
    assert grid.process_ids == {}


def test_with_block_closes_when_it_raises(app_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), make_grid(app_dir) as grid:  # noqa: PT012
        pid = report(grid)["pid"]
        raise RuntimeError("mine")
    assert not is_alive(pid)


def test_close_ends_a_process_in_the_middle_of_a_handler(app_dir: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with make_grid(app_dir) as grid:
        grid.push_messages([order(touch=str(begun), wait_for="/no such file"), order()])
        assert wait_until(begun.exists)
        (pid,) = grid.process_ids.values()
    assert not is_alive(pid)


def test_close_kills_a_process_that_does_not_go(
    app_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_CLOSE_SECONDS", 0.5)
    with make_grid(app_dir) as grid:
        pid = answer_of(ask_one(grid, order(do="ignore-sigterm")))["pid"]
    assert not is_alive(pid)


def test_forgotten_grid_ends_its_processes(app_dir: Path) -> None:
    """The grid has a finalizer, so what nobody refers to any more must be collectable."""
    grid = make_grid(app_dir)
    pid = report(grid)["pid"]
    forgotten = weakref.ref(grid)
    del grid
    gc.collect()
    if (survivor := forgotten()) is not None:
        survivor.close()
        pytest.fail("something still refers to the grid")
    assert wait_until(lambda: not is_alive(pid))


PARENT = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from tests.runtime.processes import ask, make_grid, order

    folder, when, do = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run behind &

    def work():
        with make_grid(Path({app_dir!r}), 2) as grid:
            if when == "serving":
                ask(grid, order(100), order(101))
            begun = [folder / "begun-100", folder / "begun-101"]
            grid.push_messages(
                order(100 + i, do, touch=str(file), wait_for=str(folder / "never"))
                if do == "echo" else order(100 + i, do, touch=str(file))
                for i, file in enumerate(begun)
            )
            while len(grid.process_ids) < 2:
                time.sleep(0.01)
            while when == "serving" and not all(file.exists() for file in begun):
                time.sleep(0.01)
            if when == "serving" and "fork" in sys.argv:
                if os.fork() == 0:  # such as a DataLoader's worker
                    os.close(1)
                    time.sleep(90)
                    os._exit(0)
            print(*grid.process_ids.values(), flush=True)
            time.sleep(60)

    try:
        work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


class Parent:
    """A program in a process group of its own that has a grid with two busy workers."""

    def __init__(self, app_dir: Path, folder: Path, *arguments: str) -> None:
        script = folder / "parent.py"
        repository = str(Path(__file__).parents[2])
        script.write_text(textwrap.dedent(PARENT).format(tests=repository, app_dir=str(app_dir)))
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.workers = [int(pid) for pid in self.process.stdout.readline().split()]

    def __enter__(self) -> "Parent":
        return self

    def __exit__(self, *_error: object) -> None:
        """Clean up after a test that failed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def none_alive(self) -> bool:
        return not any(is_alive(pid) for pid in self.workers)


@pytest.mark.parametrize(
    ("when", "do", "more"),
    [
        ("starting", "echo", ()),
        ("serving", "echo", ()),
        ("serving", "hold-the-gil", ()),
        ("serving", "echo", ("fork",)),
    ],
    ids=["starting", "in-a-handler", "in-a-handler-that-holds-the-gil", "with-a-forked-child"],
)
def test_parent_that_is_killed_takes_its_workers_along(
    app_dir: Path, tmp_path: Path, when: str, do: str, more: tuple[str, ...]
) -> None:
    with Parent(app_dir, tmp_path, when, do, *more) as parent:
        assert len(parent.workers) == 2
        assert not parent.none_alive()
        os.kill(parent.process.pid, signal.SIGKILL)
        assert parent.process.wait() == -signal.SIGKILL
        assert wait_until(parent.none_alive, seconds=30)


@pytest.mark.parametrize("when", ["starting", "serving"])
def test_ctrl_c_leaves_nothing(app_dir: Path, tmp_path: Path, when: str) -> None:
    with Parent(app_dir, tmp_path, when, "echo") as parent:
        assert len(parent.workers) == 2
        assert not parent.none_alive()
        os.killpg(parent.process.pid, signal.SIGINT)
        assert parent.process.wait(60) == 130
        assert parent.none_alive()
        with pytest.raises(ProcessLookupError):
            os.killpg(parent.process.pid, 0)


def test_sigint_does_not_end_a_worker(app_dir: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group; what becomes of it is the parent's to decide."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    # Tests that run behind & ignore SIGINT, and what they start would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with make_grid(app_dir) as grid:
            (message_id,) = grid.push_messages([order(touch=str(begun), wait_for=str(gate))])
            assert wait_until(begun.exists)
            (pid,) = grid.process_ids.values()
            os.kill(pid, signal.SIGINT)
            gate.touch()
            (reply,) = pull(grid, message_id)
            assert answer_of(reply)["pid"] == pid
    finally:
        signal.signal(signal.SIGINT, before)


# --- Flower's own strategies ----------------------------------------------------------------


def test_fedavg_of_flower_runs_unchanged(app_dir: Path) -> None:
    """Each round adds (1 x 1 + 3 x 5) / 4 = 4; the mean step is the same 4."""
    workers = [WorkerSpec("cpu", FIRST_CORE), WorkerSpec("cpu", LAST_CORE)]
    start = ArrayRecord({"w": Array(np.zeros((2, 3), np.float32))})
    with make_grid(app_dir, workers, client_app="foreign_client:fedavg_app") as grid:
        result = FedAvg().start(grid, start, num_rounds=2, timeout=100)
        pids = set(grid.process_ids.values())
    np.testing.assert_array_equal(result.arrays["w"].numpy(), np.full((2, 3), 8.0))
    assert {r: dict(m) for r, m in result.train_metrics_clientapp.items()} == {
        1: {"step": 4.0},
        2: {"step": 4.0},
    }
    assert {r: dict(m) for r, m in result.evaluate_metrics_clientapp.items()} == {
        1: {"mean": 4.0},
        2: {"mean": 8.0},
    }
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_grid_lets_its_program_make_messages(app_dir: Path) -> None:
    become_server(run_id=99)  # somebody else, to be replaced
    with make_grid(app_dir):
        assert order().metadata.run_id == 1
