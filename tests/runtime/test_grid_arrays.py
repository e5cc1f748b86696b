"""Arrays on the local grid with real processes: shared where that is safe, private elsewhere."""

import contextlib
import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_blsgd.array_view import ArrayView, view_record
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime import memory
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.flower_internals import CRASHED, RAISED
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import usable_cores

from .channels import mapped_sizes, open_files
from .processes import answer_of, ask, ask_one, is_alive, wait_until

pytestmark = pytest.mark.processes

CORES = usable_cores()
FOREIGN, VIEWING = "arrays_client:app", "arrays_client:viewing_app"
SIZE = 5000
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="this system has no /proc"
)


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    shutil.copy(Path(__file__).with_name("arrays_client.py"), folder)
    return folder


def start(
    app_dir: Path,
    client_app: str,
    workers: int | Sequence[WorkerSpec] = 1,
    processes_per_device: int = 0,
) -> LocalGrid:
    if isinstance(workers, int):
        workers = [WorkerSpec("cpu")] * workers
    return LocalGrid(workers, client_app, app_dir, {}, 0, processes_per_device)


@pytest.fixture(scope="module")
def foreign(app_dir: Path) -> Iterator[LocalGrid]:
    """Two nodes of an app that knows nothing of views."""
    with start(app_dir, FOREIGN, 2) as grid:
        yield grid


@pytest.fixture(scope="module")
def viewing(app_dir: Path) -> Iterator[LocalGrid]:
    """Two nodes of an app that accepts views."""
    with start(app_dir, VIEWING, 2) as grid:
        yield grid


def order(
    do: str, arrays: ArrayRecord | None = None, node_id: int = 100, **values: object
) -> Message:
    content = RecordDict({"order": ConfigRecord({"do": do, **values})})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content, node_id, "train")


def plain(value: float, size: int = SIZE) -> ArrayRecord:
    return ArrayRecord({"x": Array(np.full(size, float(value)))})


def views(value: float, size: int = SIZE) -> ArrayRecord:
    return view_record({"x": np.full(size, float(value))})


# --- apps that know nothing of views --------------------------------------------------------


@pytest.mark.parametrize("make", [plain, views])
@pytest.mark.parametrize("size", [10, SIZE], ids=["pickled", "shared"])
@pytest.mark.parametrize("processes_per_device", [0, 1])
def test_what_a_foreign_app_writes_is_seen_nowhere_else(
    app_dir: Path, foreign: LocalGrid, make: object, size: int, processes_per_device: int
) -> None:
    with contextlib.ExitStack() as stack:
        grid = foreign
        if processes_per_device:
            grid = stack.enter_context(start(app_dir, FOREIGN, 2, processes_per_device))
        model = make(1.0, size)  # type: ignore[operator]
        for _ in range(2):
            replies = ask(
                grid,
                order("scribble", model, 100),
                order("scribble", model, 100),
                order("scribble", model, 101),
            )
            for reply in replies:
                said = answer_of(reply)
                assert (said["first"], said["last"]) == (1.0, 1.0)
                assert said["seen-after"] == 1.0  # of Flower's arrays every numpy() is a copy
                assert not said["is-a-view"]
            assert model == plain(1.0, size)


def test_what_a_foreign_app_keeps_in_its_state_stays_private(foreign: LocalGrid) -> None:
    """It came as an array of Flower's, and behaves as one, also after it was kept."""
    ask_one(foreign, order("keep-in-state", views(3.0)))
    for _ in range(2):
        assert answer_of(ask_one(foreign, order("scribble-state")))["kept"] == 3.0


def test_a_foreign_apps_reply_may_be_what_it_got(foreign: LocalGrid) -> None:
    for value in range(5):
        reply = ask_one(foreign, order("echo", plain(value)))
        assert reply.content["arrays"] == plain(value)


@pytest.mark.parametrize("client_app", [FOREIGN, VIEWING])
def test_every_lane_of_an_accelerator_keeps_to_the_apps_wish(
    app_dir: Path, client_app: str
) -> None:
    """Nodes of one process on an accelerator are served by a thread each."""
    with start(app_dir, client_app, [WorkerSpec("mps")] * 3, 1) as grid:
        model = plain(1.0)
        said = [
            answer_of(reply)
            for reply in ask(grid, *[order("look", model, 100 + i) for i in (0, 1, 2)])
        ]
        assert [one["is-a-view"] for one in said] == [client_app == VIEWING] * 3
        assert len({one["pid"] for one in said}) == 1
        if client_app == FOREIGN:
            ask(grid, *[order("scribble", model, 100 + i) for i in (0, 1, 2)])
            for i in (0, 1, 2):
                assert answer_of(ask_one(grid, order("look", model, 100 + i)))["first"] == 1.0


# --- apps that accept views -----------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, views])
def test_an_app_that_accepts_views_sees_one(viewing: LocalGrid, make: object) -> None:
    said = answer_of(ask_one(viewing, order("look", make(4.0))))  # type: ignore[operator]
    assert said["is-a-view"]
    assert (said["first"], said["last"]) == (4.0, 4.0)


def test_replies_are_views_for_the_server_of_any_app(
    foreign: LocalGrid, viewing: LocalGrid
) -> None:
    for grid in (foreign, viewing):
        (array,) = ask_one(grid, order("double", plain(4.0))).content["arrays"].values()
        assert type(array) is ArrayView
        assert array == Array(np.full(SIZE, 8.0))


def test_replies_that_the_server_keeps_stay_as_they_are(viewing: LocalGrid) -> None:
    kept = [
        ask_one(viewing, order("double", views(i))).content["arrays"]["x"].numpy()[1:]
        for i in range(8)
    ]
    assert [(array.min(), array.max()) for array in kept] == [(2 * i, 2 * i) for i in range(8)]


def test_views_that_a_client_keeps_stay_as_they_are(app_dir: Path) -> None:
    with start(app_dir, VIEWING) as grid:
        for i in range(4):
            ask_one(grid, order("look", views(i)))
        one = grid.shared_bytes
        for i in range(3):
            ask_one(grid, order("keep-view", views(10 + i)))
        for i in range(4):
            ask_one(grid, order("look", views(50 + i)))
        assert grid.shared_bytes == 3 * 8 * SIZE + one
        ask_one(grid, order("drop-views"))
        for i in range(12):
            ask_one(grid, order("look", views(i)))
            assert grid.shared_bytes == 3 * 8 * SIZE + one  # used again, none new


@needs_proc
def test_fifty_rounds_take_no_more_than_five(viewing: LocalGrid) -> None:
    seen = set()
    model = views(0)
    for i in range(50):
        replies = ask(viewing, *[order("double", model, node) for node in (100, 101)])
        got = [reply.content["arrays"]["x"].numpy() for reply in replies]
        model = view_record({"x": (got[0] + got[1]) / 4 + 1})
        assert model["x"].numpy()[0] == i + 1
        del replies, got
        if i >= 5:
            pid = viewing.process_ids[100]
            seen.add((viewing.shared_bytes, open_files(), len(mapped_sizes(pid))))
    assert len(seen) == 1


@needs_proc
@pytest.mark.parametrize("do", ["raise-after-changes", "return-none", "no such record"])
def test_failures_take_no_memory(viewing: LocalGrid, do: str) -> None:
    """A traceback refers to the frames, and they to the arrays."""
    seen = set()
    for i in range(12):
        message = order(do, views(i))
        if do == "no such record":
            del message.content["order"]
        reply = ask_one(viewing, message)
        assert reply.error.code == RAISED
        assert "Traceback" in reply.error.reason
        if i >= 4:
            seen.add((viewing.shared_bytes, open_files()))
    assert len(seen) <= 2
    assert answer_of(ask_one(viewing, order("look", views(7))))["first"] == 7.0


def test_state_is_as_before_a_call_that_raised(app_dir: Path) -> None:
    """Also what the call changed where it was."""
    with start(app_dir, FOREIGN) as grid:
        assert answer_of(ask_one(grid, order("calls")))["count"] == 1
        assert ask_one(grid, order("raise-after-changes")).error.code == RAISED
        said = answer_of(ask_one(grid, order("calls")))
        assert (said["count"], said["list"], said["names"]) == (2, [0], ["calls"])


@needs_proc
def test_a_worker_unmaps_the_blocks_of_a_model_that_is_sent_no_more(app_dir: Path) -> None:
    large, small = 4 << 20, SIZE  # elements: 32 MiB
    with start(app_dir, VIEWING) as grid:
        for _ in range(2):
            ask_one(grid, order("look", views(1, large)))
        pid = grid.process_ids[100]
        assert 8 * large in mapped_sizes(pid)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        for _ in range(2):
            ask_one(grid, order("look", views(1, small)))
        gc.collect()
        assert 8 * large not in mapped_sizes(pid)
        assert 8 * large not in mapped_sizes()
        assert len(os.listdir(f"/proc/{pid}/fd")) <= files
        assert grid.shared_bytes < 8 * large


# --- momentum: what a node keeps as views ---------------------------------------------------


def test_momentum_lies_in_shared_memory_and_is_the_nodes_own(app_dir: Path) -> None:
    """Node 100 adds 1 a round, node 101 adds 2: models of the same size beside it."""
    with start(app_dir, VIEWING, 2) as grid:
        kept = []
        for i in range(6):
            replies = ask(grid, order("momentum", views(1), 100), order("momentum", views(2), 101))
            assert [answer_of(reply)["momentum"] for reply in replies] == [i, 2 * i]
            kept += [reply.content["arrays"]["x"].numpy() for reply in replies]
            for node_id, expected in ((100, i + 1), (101, 2 * i + 2)):
                state = grid.state_of(node_id)["momentum"]["x"].numpy()
                assert state.min() == state.max() == expected
        assert [array.max() for array in kept] == [2.0, 3.0] * 6
        assert [array.min() for array in kept] == [2.0, 3.0] * 6


def test_state_of_a_node_without_any(foreign: LocalGrid) -> None:
    assert grid_state(foreign, 101) == {}
    with pytest.raises(KeyError):
        foreign.state_of(5)


def grid_state(grid: LocalGrid, node_id: int) -> dict[str, object]:
    return dict(grid.state_of(node_id))


def test_momentum_is_gone_with_the_process(app_dir: Path) -> None:
    with start(app_dir, VIEWING, 2) as grid:
        for _ in range(2):
            ask(grid, order("momentum", views(1), 100), order("momentum", views(1), 101))
        dead, other = ask(grid, order("die", node_id=100), order("momentum", views(1), 101))
        assert dead.error.code == CRASHED
        assert answer_of(other)["momentum"] == 2.0
        assert grid_state(grid, 100) == {}
        assert grid.state_of(101)["momentum"]["x"].numpy()[0] == 3.0
        assert answer_of(ask_one(grid, order("momentum", views(1))))["momentum"] == 0.0


MILLIONS = 36


@needs_proc
def test_memory_of_a_model_of_36_million_parameters(app_dir: Path) -> None:
    model_bytes = 4 * MILLIONS * 10**6
    if (memory.free_bytes() or 0) < 12 * model_bytes:
        pytest.skip("too little memory for this test")
    model = view_record({"x": np.ones(MILLIONS * 10**6, np.float32)})
    with start(app_dir, VIEWING, 2) as grid:
        for i in range(4):
            replies = ask(grid, *[order("momentum", model, node) for node in (100, 101)])
            assert [answer_of(reply)["momentum"] for reply in replies] == [sum(range(1, i + 1))] * 2
            one, two = (reply.content["arrays"]["x"].numpy() for reply in replies)
            mean = one + two
            mean /= 2
            assert mean[0] == mean[-1] == i + 2
            model = view_record({"x": mean})
            del replies, one, two, mean
        assert grid.shared_bytes <= (2 * 2 + 2) * model_bytes * 1.05
        assert grid.shared_bytes <= (2 * 2 + 1) * model_bytes * 1.05
        for node in (100, 101):
            mapped = sum(mapped_sizes(grid.process_ids[node]))
            assert mapped <= 3 * model_bytes * 1.05  # the model, its reply, its momentum


# --- several workers in a process -----------------------------------------------------------


@pytest.mark.parametrize(
    ("processes_per_device", "groups"),
    [
        (0, [[0], [1], [2], [3], [4], [5]]),
        (1, [[0, 1, 3], [2, 4], [5]]),
        (2, [[0, 3], [1], [2], [4], [5]]),
        (9, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_which_nodes_share_a_process(
    app_dir: Path, processes_per_device: int, groups: list[list[int]]
) -> None:
    """Cores a, a, b, a, b, and one on a that is slowed: that has its own."""
    a, b = CORES[:1], CORES[-1:]
    if a == b:
        pytest.skip("one core only")
    workers = [WorkerSpec("cpu", cores) for cores in (a, a, b, a, b)]
    workers.append(WorkerSpec("cpu", a, "slow", slowdown=2.0))
    with start(app_dir, FOREIGN, workers, processes_per_device) as grid:
        assert list(grid.get_node_ids()) == [100, 101, 102, 103, 104, 105]
        pids = grid.process_ids
        assert pids == {}
        found = sorted(
            [node - 100 for node in host._job.contexts]  # without starting a dozen processes
            for host in grid._hosts
        )
    assert found == sorted(groups)


def test_nodes_of_a_process_have_each_their_own_state(app_dir: Path) -> None:
    workers = [WorkerSpec("cpu", CORES[:1])] * 3
    with start(app_dir, VIEWING, workers, 2) as grid:
        for i in range(4):
            replies = ask(grid, *[order("momentum", views(n + 1), 100 + n) for n in range(3)])
            said = [answer_of(reply) for reply in replies]
            assert [one["momentum"] for one in said] == [i * 1.0, i * 2.0, i * 3.0]
            assert said[0]["pid"] == said[2]["pid"] != said[1]["pid"]
        assert set(grid.process_ids.values()) == {one["pid"] for one in said}
        assert [grid.state_of(100 + n)["momentum"]["x"].numpy()[7] for n in range(3)] == [4, 8, 12]


def test_one_of_a_process_dies(app_dir: Path) -> None:
    """Nodes 100 and 102 share a process; only the message under way fails."""
    workers = [WorkerSpec("cpu", CORES[:1])] * 3
    with start(app_dir, VIEWING, workers, 2) as grid:
        for _ in range(2):
            ask(grid, *[order("momentum", views(1), 100 + n) for n in range(3)])
        replies = ask(
            grid,
            order("die", node_id=100),
            order("momentum", views(1), 100),
            order("momentum", views(1), 101),
        )
        assert replies[0].error.code == CRASHED
        assert "exit code 3" in replies[0].error.reason
        assert answer_of(replies[1])["momentum"] == 0.0
        assert answer_of(replies[2])["momentum"] == 2.0
        assert grid_state(grid, 102) == {}
        assert answer_of(ask_one(grid, order("momentum", views(1), 102)))["momentum"] == 0.0
        assert list(grid.get_node_ids()) == [100, 101, 102]


def test_a_process_that_is_given_up_takes_all_its_nodes_off_the_grid(app_dir: Path) -> None:
    workers = [WorkerSpec("cpu", CORES[:1])] * 2 + [WorkerSpec("cpu", CORES[:1], slowdown=2.0)]
    with start(app_dir, FOREIGN, workers, 1) as grid:
        replies = ask(grid, *[order("die", node_id=100 + n % 2) for n in range(4)])
        assert all(reply.has_error() for reply in replies)
        assert wait_until(lambda: list(grid.get_node_ids()) == [102])
        assert not ask_one(grid, order("look", node_id=102)).has_error()


def test_messages_of_a_cpu_process_never_overlap(app_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start(app_dir, FOREIGN, [WorkerSpec("cpu", CORES[:1])] * 3, 1) as grid:
        messages = [
            [order("log", None, 100 + n, file=str(log)) for _ in range(5)] for n in range(3)
        ]
        threads = [threading.Thread(target=ask, args=(grid, *batch)) for batch in messages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = log.read_text().splitlines()
    assert len(lines) == 30
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin.split()[0], end.split()[0]) == ("begin", "end")
        assert begin.split()[1] == end.split()[1]


def test_nodes_on_an_accelerator_work_side_by_side_and_die_together(
    app_dir: Path, tmp_path: Path
) -> None:
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    with start(app_dir, FOREIGN, [WorkerSpec("mps")] * 2, 1) as grid:
        replies = ask(
            grid,
            order("meet", None, 100, mine=a, yours=b),
            order("meet", None, 101, mine=b, yours=a),
        )
        assert all(answer_of(reply)["met"] for reply in replies)
        (pid,) = set(grid.process_ids.values())
        replies = ask(
            grid,
            order("meet", None, 100, mine=c, yours=d, then="die"),
            order("meet", None, 101, mine=d, yours="/no such file"),
        )
        assert [reply.error.code for reply in replies] == [CRASHED] * 2
        assert not is_alive(pid)
        said = [answer_of(reply) for reply in ask(grid, order("look"), order("look", None, 101))]
        assert said[0]["pid"] == said[1]["pid"] != pid
        assert list(grid.get_node_ids()) == [100, 101]  # one death, not two


def test_a_lane_that_cannot_be_served_is_no_silence(app_dir: Path) -> None:
    """There is no such card: the thread of the second lane cannot begin."""
    with start(app_dir, FOREIGN, [WorkerSpec("cuda:99")] * 2, 1) as grid:
        reply = ask_one(grid, order("look", None, 101))
        assert reply.error.code == CRASHED
        assert "cuda" in reply.error.reason.lower()


# --- memory is short, files are not lost ----------------------------------------------------


@needs_proc
def test_too_little_memory_for_the_orders(app_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(app_dir, FOREIGN, 2) as grid:
        files, before = open_files(), dict(grid.process_ids)
        monkeypatch.setattr(memory, "free_bytes", lambda: 10_000)
        said = "needs 40.0 kB, but only 10.0 kB is free"
        with pytest.raises(UsageError, match=said):
            grid.push_messages([order("look", plain(1), node) for node in (100, 101)])
        assert (open_files(), grid.process_ids, grid.shared_bytes) == (files, before, 0)
        monkeypatch.undo()
        assert answer_of(ask_one(grid, order("look", plain(1))))["first"] == 1.0


def test_a_push_that_fails_half_way_leaves_no_replies_behind(
    foreign: LocalGrid, tmp_path: Path
) -> None:
    """Nobody knows the id of the first message, so nobody will ever take its reply."""
    log = tmp_path / "log"
    with pytest.raises(ValueError, match="node 5 is not on this grid"):
        foreign.push_messages([order("log", plain(1), 100, file=str(log)), order("look", None, 5)])
    ask(foreign, order("look"))  # comes after it
    assert foreign._mailbox._replies == {}
    assert foreign._mailbox._expected == set()


@needs_proc
def test_grids_rounds_and_restarts_leak_no_files(app_dir: Path) -> None:
    def one_grid() -> None:
        with start(app_dir, FOREIGN) as grid:
            ask_one(grid, order("echo", plain(1)))

    one_grid()
    gc.collect()
    files, maps = open_files(), len(mapped_sizes())

    def nothing_more() -> bool:
        gc.collect()
        return open_files() <= files and len(mapped_sizes()) <= maps

    for _ in range(3):
        one_grid()
    assert wait_until(nothing_more)
    with start(app_dir, FOREIGN) as grid:
        ask_one(grid, order("echo", plain(1)))
        busy = open_files()
        for i in range(200):
            ask_one(grid, order("echo", plain(i)))
        assert open_files() <= busy + 2
        for _ in range(3):
            ask_one(grid, order("echo", plain(1)))
            os.kill(pid := grid.process_ids[100], signal.SIGKILL)
            assert wait_until(lambda pid=pid: not is_alive(pid))
            ask_one(grid, order("echo", plain(1)))
        assert wait_until(lambda: open_files() <= busy + 2)  # the thread that buries it may go on
    del grid
    assert wait_until(nothing_more)
