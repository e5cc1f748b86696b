"""The local grid with real processes, running an app that knows nothing of flower_blsgd."""

import contextlib
import errno
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.engines.local import worker_process
from flower_blsgd.engines.local.grid import LocalGrid, _allow_open_files
from flower_blsgd.engines.local.shared_memory import Channel
from flower_blsgd.flower.app_call import PROCESS_ENDS
from flower_blsgd.flower.internals import (
    CRASHED,
    NODE_GONE,
    NOT_LOADED,
)
from flower_blsgd.protocol import Failure

from ..log_capture import captured_log
from .processes import (
    Held,
    answer_of,
    ask,
    ask_one,
    is_alive,
    left_behind,
    make_grid,
    needs_proc,
    order,
    process_ids,
    processes_below,
    query,
    report,
    wait_until,
)

pytestmark = pytest.mark.processes

CORES = usable_cores()
FIRST_CORE, LAST_CORE = CORES[:1], CORES[-1:]


def test_close_that_is_interrupted_is_repeated_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = LocalGrid([WorkerSpec("cpu")], "own:app", Path(), {})

    def interrupted(nodes: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("flower_blsgd.engines.local.grid._close_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grid.close()
    assert grid._finalizer.still_active()
    grid.close()
    assert not grid._finalizer.still_active()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After all tests of this file there is no more process."""
    before = processes_below()
    yield
    gc.collect()
    assert wait_until(lambda: processes_below() <= before), processes_below() - before


@pytest.fixture(scope="module")
def grid(app_dir: Path) -> Iterator[LocalGrid]:
    """Two CPU workers, for the tests that kill no process."""
    workers = [
        WorkerSpec("cpu", FIRST_CORE, tier="fast", name="quick"),
        WorkerSpec("cpu", LAST_CORE, tier="slow", steps=3, slowdown=2.5),
    ]
    with make_grid(app_dir, workers, epochs=3, rate=0.5, task="digits", nesterov=True) as grid:
        yield grid


def test_node_configs_count_the_workers_of_a_card(app_dir: Path) -> None:
    workers = [WorkerSpec("cuda:0"), WorkerSpec("cuda:0"), WorkerSpec("cuda:1"), WorkerSpec("cpu")]
    with make_grid(app_dir, workers) as grid:
        configs = [grid._context(rank, {}, {}).node_config for rank in range(4)]
    assert [config.get("workers-on-device") for config in configs] == [2, 2, None, None]


# --- messages -------------------------------------------------------------------------------


def test_send_and_receive_replies_match_their_orders(grid: LocalGrid) -> None:
    messages = [
        order(100 + i % 2, number=1.5, raw=b"\x00\xff", flags=[True, False], text=f"order {i}")
        for i in range(4)
    ]
    for message in messages:
        message.content["arrays"] = ArrayRecord({"w": Array(np.arange(6.0).reshape(2, 3))})
    sent = [dict(message.content["order"]) for message in messages]
    *replies, evaluated, asked = ask(
        grid, *messages, Message(RecordDict(), 101, "evaluate"), query(101)
    )
    assert answer_of(evaluated)["what"] == "evaluate"
    assert answer_of(asked)["node_id"] == 101
    for message, reply, values in zip(messages, replies, sent, strict=True):
        ours, theirs = message.metadata, reply.metadata
        assert theirs.reply_to_message_id == ours.message_id
        assert (theirs.src_node_id, theirs.dst_node_id) == (ours.dst_node_id, ours.src_node_id)
        assert (theirs.message_type, theirs.group_id) == ("train", "7")
        assert reply.content["order"] == ConfigRecord(values)
        got = reply.content["arrays"]["w"].numpy()
        np.testing.assert_array_equal(got, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert len({message.metadata.message_id for message in messages} - {""}) == 4


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


# --- what a worker's process is -------------------------------------------------------------


def test_node_config_and_run_config_reach_the_app(grid: LocalGrid) -> None:
    def config(node_id: int, kind: str) -> dict[str, object]:
        said = report(grid, node_id)
        return {k.removeprefix(kind): v for k, v in said.items() if k.startswith(kind)}

    for rank, worker in enumerate(grid.workers):
        mine = {"partition-id": rank, "num-partitions": 2, **worker.to_node_config()}
        assert config(100 + rank, "node:") == mine
    run_config = {"epochs": 3, "rate": 0.5, "task": "digits", "nesterov": True}
    assert config(101, "run:") == run_config


def test_no_process_before_the_first_message(app_dir: Path) -> None:
    before = processes_below()
    with make_grid(app_dir, 2) as grid:
        assert process_ids(grid) == {}
        assert processes_below() == before
        assert list(grid.get_node_ids()) == [100, 101]
        said = report(grid, 101)
        assert process_ids(grid) == {101: said["pid"]}


# --- what goes wrong in a handler -----------------------------------------------------------


@pytest.mark.parametrize("what", ["app", "setup"])
def test_app_that_does_not_load_or_setup_that_fails(app_dir: Path, what: str) -> None:
    def fail() -> None:
        raise LookupError("the data is not there")

    setup = fail if what == "setup" else None
    reason = "the data is not there" if setup else "not_an_app is a str, not a ClientApp"
    client_app = "foreign_client:not_an_app"
    with LocalGrid([WorkerSpec("cpu")], client_app, app_dir, {}, setup=setup) as grid:
        for reply in ask(grid, order(), query()):
            assert reply.error.code == NOT_LOADED
            assert "Traceback" in reply.error.reason
            assert reason in reply.error.reason
        assert set(process_ids(grid)) == set(grid.get_node_ids()) == {100}


# --- a process that dies --------------------------------------------------------------------


def test_process_that_dies_in_a_handler(app_dir: Path) -> None:
    with make_grid(app_dir, 2) as grid:
        ask(grid, order(100), order(101))
        before, other = process_ids(grid)[100], process_ids(grid)[101]
        ways = {"exit": "exit code 3", "sys-exit": "exit code 5", "segv": "signal SIGSEGV"}
        for round_, (do, how) in enumerate(ways.items(), 1):
            dying = order(100, do=do, print=f"first\nlast words of {do}")
            dead, queued, unaffected = ask(grid, dying, order(100), order(101))
            assert dead.error.code == CRASHED
            assert f"last words of {do}" in dead.error.reason
            assert dead.error.reason.splitlines()[-1].endswith(f"died ({how})")
            assert not is_alive(before)
            assert list(grid.get_node_ids()) == [100, 101]
            before = process_ids(grid)[100]
            assert answer_of(queued) == ConfigRecord({"count": 1, "pid": before})
            assert answer_of(unaffected) == ConfigRecord({"count": 1 + round_, "pid": other})
        assert answer_of(ask_one(grid, order(100)))["count"] == 2
        with captured_log() as log:
            lost = ask_one(grid, order(100, do="lose-the-accelerator"))
            assert (lost.error.code, Failure.of(lost.error).kind) == (PROCESS_ENDS, "raised")
            assert answer_of(ask_one(grid, order(100)))["count"] == 1
        (line,) = log.lines(30)
        assert line.endswith("starts again: the process died (exit code 1)")
        assert not is_alive(before)


def test_death_is_noticed_while_a_forked_child_lives(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a DataLoader's: it has inherited all that the dead process held open."""
    monkeypatch.setattr(worker_process, "_LAST_WORDS_SECONDS", 0.2)
    gate = tmp_path / "gate"
    with make_grid(app_dir) as grid:
        try:
            death = order(do="fork-and-exit", child_waits_for=str(gate))
            assert ask_one(grid, death).error.code == CRASHED
        finally:
            gate.touch()


def test_process_that_hangs_is_killed_when_its_time_is_over_and_starts_again(
    app_dir: Path,
) -> None:
    with make_grid(app_dir, 2) as grid:
        pids = [answer_of(reply)["pid"] for reply in ask(grid, order(100), order(101))]
        os.kill(pids[0], signal.SIGSTOP)
        (prompt,) = grid.send_and_receive([order(100), order(101)], timeout=3)
        assert answer_of(prompt) == ConfigRecord({"count": 2, "pid": pids[1]})
        fresh, other = map(answer_of, ask(grid, order(100), order(101)))
        assert (fresh["count"], other) == (1, ConfigRecord({"count": 3, "pid": pids[1]}))
        assert not is_alive(pids[0])
        # One that computes for ever, and one whose order waits behind another that it is late with.
        assert list(grid.send_and_receive([order(100, do="hold-the-gil")], timeout=0.2)) == []
        os.kill(pids[1], signal.SIGSTOP)
        (first,) = grid.push_messages([order(101)])
        assert list(grid.send_and_receive([order(101, text="never begun")], timeout=0.2)) == []
        os.kill(pids[1], signal.SIGCONT)  # nobody is late with the first: it was never given up
        (reply,) = pull(grid, first)
        assert answer_of(reply)["pid"] == pids[1]
        assert {answer_of(reply)["count"] for reply in ask(grid, order(100), order(101))} == {1, 5}


def test_kill_that_comes_with_the_reply_costs_the_next_message_nothing(
    app_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_grid(app_dir) as grid:
        (node,), mailbox = grid._nodes.values(), grid._mailbox
        for _ in range(3):
            killed = answer_of(ask_one(grid, order()))["pid"]
            assert wait_until(lambda: not node._handled)
            node._handled = "late"
            mailbox.expect("late")
            mailbox.give_up({"late": 100})
            node.stop_late()
            mailbox.settle(100)
            fresh = answer_of(ask_one(grid, order()))
            assert (fresh["count"], fresh["pid"] != killed) == (1, True)
        assert grid.take_deaths() == []


def test_process_killed_between_two_messages(app_dir: Path) -> None:
    with make_grid(app_dir) as grid:
        killed = answer_of(ask_one(grid, order()))["pid"]
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: not process_ids(grid))
        fresh = answer_of(ask_one(grid, order()))
        assert fresh["count"] == 1
        assert fresh["pid"] == process_ids(grid)[100] != killed
        assert (grid.take_deaths(), grid.take_deaths()) == ([100], [])


def test_process_that_cannot_start(app_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many processes or too little memory is an error reply, not silence."""

    def refuse(*_args: object, **_more: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    with make_grid(app_dir) as grid:
        monkeypatch.setattr(worker_process, "start_worker", refuse)
        reply = ask_one(grid, order())
        monkeypatch.undo()
        assert reply.has_error()


@pytest.mark.parametrize(("count", "limit"), [(150, 150), (1000, 200)])
def test_limit_of_open_files_goes_up_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, count: int, limit: int
) -> None:
    limits = [(100, 200)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    _allow_open_files(count)
    assert limits[1:] == [(limit, 200)]


PROGRAM = """
import threading, time
from flwr.app import Message
from flwr.clientapp import ClientApp
from flower_blsgd.flower.app_call import set_main_program

app = ClientApp()
app.train()(lambda message, context: Message(message.content, reply_to=message))
start = lambda context: threading.Thread(target=time.sleep, args=(90,)).start()
set_main_program(app, lambda context: start)
"""


def test_process_with_a_program_that_cannot_receive_or_does_not_end(tmp_path: Path) -> None:
    failed = tmp_path / "failed"

    def fail_once() -> None:
        receive, received = Channel.receive, []

        def receive_one(channel: Channel) -> object:
            if received and not failed.exists():
                failed.touch()
                raise OSError(24, "Too many open files")
            received.append(receive(channel))
            return received[-1]

        Channel.receive = receive_one  # type: ignore[method-assign]

    (tmp_path / "programs.py").write_text(PROGRAM)
    client = "programs:app", tmp_path, {}
    with LocalGrid([WorkerSpec("cpu")], *client, setup=fail_once) as grid:
        assert not ask_one(grid, order()).has_error()
        reason = ask_one(grid, order()).error.reason
        assert "Too many open files" in reason
        assert reason.endswith("died (exit code 1)")
        assert not ask_one(grid, order()).has_error()
        with captured_log() as log:
            assert grid.end_programs(0.2) == {100: -signal.SIGKILL}
        (line,) = log.warnings
        assert re.fullmatch(r"threads, .* of cpu \(node 100\) still run after .* are killed", line)


# --- the end --------------------------------------------------------------------------------


@needs_proc
def test_close_ends_all_processes_and_gives_everything_back(app_dir: Path) -> None:
    gc.collect()
    before = Held()
    grid = make_grid(app_dir, 3)
    ask(grid, order(100), order(101))  # the third one never starts
    pids = set(process_ids(grid).values())
    assert len(pids) == 2
    assert processes_below() - before.processes == pids

    grid.close()
    assert process_ids(grid) == {}
    assert processes_below() == before.processes
    assert left_behind(before) == {}
    grid.close()


def test_close_answers_those_who_still_wait(app_dir: Path, tmp_path: Path) -> None:
    grid, begun = make_grid(app_dir), tmp_path / "begun"
    busy = order(touch=str(begun), wait_for="/no such file")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: list(grid.send_and_receive([busy, order()])))
        assert wait_until(begun.exists)
        (pid,) = process_ids(grid).values()
        grid.close()
        assert not is_alive(pid)  # it was in the middle of a handler
        assert [reply.error.code for reply in waiting.result(60)] == [NODE_GONE, NODE_GONE]


def test_reply_that_cannot_be_taken_in_costs_that_message_only(
    app_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, for example; the process lives, but the way to it is broken."""

    def fail(connection: object) -> int:
        monkeypatch.undo()
        raise OSError(24, "Too many open files")

    def large() -> Message:
        message = order()
        message.content["arrays"] = ArrayRecord({"w": Array(np.ones(5000))})
        return message

    with make_grid(app_dir) as grid:
        first = answer_of(ask_one(grid, order()))
        monkeypatch.setattr("flower_blsgd.engines.local.shared_memory.recv_handle", fail)
        assert ask_one(grid, large()).error.code == CRASHED
        assert answer_of(ask_one(grid, large()))["pid"] != first["pid"]


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
    from tests.grids.processes import make_grid, order, process_ids

    folder, what = Path(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run behind &

    def work():
        with make_grid(Path({app_dir!r}), 3) as grid:
            starting, forever = [100, 101, 102], {{"wait_for": str(folder / "never")}}
            if what != "starting":
                begun = [folder / "begun-100", folder / "begun-101"]
                more = {{}} if what == "hold-the-gil" else forever
                grid.push_messages([
                    order(100, what, touch=str(begun[0]), **more),
                    order(101, touch=str(begun[1]), **forever),
                ])
                while not all(file.exists() for file in begun):
                    time.sleep(0.01)
                starting = [102]
            grid.push_messages(order(node, **forever) for node in starting)
            while len(process_ids(grid)) < 3:
                time.sleep(0.01)
            if what == "echo" and os.fork() == 0:  # such as a DataLoader's worker
                os.close(1)
                time.sleep(90)
                os._exit(0)
            print(*process_ids(grid).values(), flush=True)
            time.sleep(60)

    try:
        work()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


class Parent:
    """A program in a process group of its own that has a grid with three workers."""

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


@pytest.mark.parametrize("what", ["hold-the-gil", "echo"])
def test_parent_that_is_killed_takes_its_workers_along(
    app_dir: Path, tmp_path: Path, what: str
) -> None:
    """Two are in a handler, one starts; at "echo", a forked child of the parent has their pipes."""
    with Parent(app_dir, tmp_path, what) as parent:
        assert len(parent.workers) == 3
        assert not parent.none_alive()
        os.kill(parent.process.pid, signal.SIGKILL)
        assert parent.process.wait() == -signal.SIGKILL
        assert wait_until(parent.none_alive, seconds=30)


def test_ctrl_c_while_workers_start_leaves_nothing(app_dir: Path, tmp_path: Path) -> None:
    """`tests/faults` has it in a round."""
    with Parent(app_dir, tmp_path, "starting") as parent:
        assert not parent.none_alive()
        below = processes_below(parent.process.pid, helpers=True)
        os.killpg(parent.process.pid, signal.SIGINT)
        assert parent.process.wait(60) == 130
        assert parent.none_alive()
        assert wait_until(lambda: not any(map(is_alive, below)))  # multiprocessing's helpers too
