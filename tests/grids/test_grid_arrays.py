"""Arrays on the local grid with real processes: shared where that is safe, private elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_blsgd.devices import machine
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.array_records import PrivateArray, view_record
from flower_blsgd.flower.internals import RAISED

from .channels import mapped_sizes, open_files
from .processes import (
    answer_of,
    ask,
    ask_one,
    make_grid,
    needs_proc,
    process_ids,
    shared_bytes,
)

pytestmark = pytest.mark.processes

FOREIGN, VIEWING = "arrays_client:app", "arrays_client:viewing_app"
SIZE = 5000


@pytest.fixture(scope="module")
def foreign(app_dir: Path) -> Iterator[LocalGrid]:
    """Two nodes of an app that knows nothing of views."""
    with make_grid(app_dir, 2, FOREIGN) as grid:
        yield grid


@pytest.fixture(scope="module")
def viewing(app_dir: Path) -> Iterator[LocalGrid]:
    """Two nodes of an app that accepts views."""
    with make_grid(app_dir, 2, VIEWING) as grid:
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
def test_what_a_foreign_app_writes_is_seen_nowhere_else(
    foreign: LocalGrid, make: object, size: int
) -> None:
    model = make(1.0, size)  # type: ignore[operator]
    for _ in range(2):
        replies = ask(foreign, *[order("scribble", model, node) for node in (100, 100, 101)])
        for reply in replies:
            said = answer_of(reply)
            assert (said["first"], said["last"]) == (1.0, 1.0)
            assert said["seen-after"] == 1.0  # of Flower's arrays every numpy() is a copy
            assert not said["is-a-view"]
        assert model == plain(1.0, size)


def test_what_a_foreign_app_keeps_in_its_state_stays_private(foreign: LocalGrid) -> None:
    """It came as an array of Flower's, and behaves as one, also after it was kept."""
    ask(foreign, order("keep-in-state", views(3.0)), order("scribble-state"))
    assert answer_of(ask_one(foreign, order("scribble-state")))["kept"] == 3.0


# --- apps that accept views -----------------------------------------------------------------


@needs_proc
def test_fifty_rounds_take_no_more_than_five(viewing: LocalGrid) -> None:
    seen = set()
    model = views(0)
    for i in range(50):
        replies = ask(viewing, *[order("double", model, node) for node in (100, 101)])
        assert {type(reply.content["arrays"]["x"]) for reply in replies} == {PrivateArray}
        replies[0].content["arrays"]["x"].numpy()[...] = 99.0  # as a strategy may, of a copy
        got = [reply.content["arrays"]["x"].numpy() for reply in replies]
        model = view_record({"x": (got[0] + got[1]) / 4 + 1})
        assert model["x"].numpy()[0] == i + 1
        del replies, got
        if i >= 5:
            pid = process_ids(viewing)[100]
            seen.add((shared_bytes(viewing), open_files(), len(mapped_sizes(pid))))
    assert len(seen) == 1


@needs_proc
@pytest.mark.parametrize("do", ["raise", "return-none"])
def test_failures_take_no_memory(viewing: LocalGrid, do: str) -> None:
    """A traceback refers to the frames, and they to the arrays. The process lives on."""
    seen, pid = set(), answer_of(ask_one(viewing, order("look")))["pid"]
    for i in range(12):
        reply = ask_one(viewing, order(do, views(i)))
        assert reply.error.code == RAISED
        assert "Traceback" in reply.error.reason
        if i >= 4:
            seen.add((shared_bytes(viewing), open_files()))
    assert len(seen) <= 2
    said = answer_of(ask_one(viewing, order("look", views(7))))
    assert (said["first"], said["pid"]) == (7.0, pid)


# --- memory is short, files are not lost ----------------------------------------------------


@needs_proc
def test_too_little_memory_for_the_orders(app_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_grid(app_dir, client_app=FOREIGN) as grid:
        files = open_files()
        monkeypatch.setattr(machine, "free_bytes", lambda: 10_000)
        with pytest.raises(UsageError, match=r"needs 40.0 kB, but only 10.0 kB is free"):
            grid.push_messages([order("look", plain(1))])
        assert (open_files(), process_ids(grid), shared_bytes(grid)) == (files, {}, 0)
        monkeypatch.undo()
        assert answer_of(ask_one(grid, order("look", plain(1))))["first"] == 1.0


def test_a_push_that_fails_half_way_leaves_no_replies_behind(foreign: LocalGrid) -> None:
    """Nobody knows the id of the first message, so nobody will ever take its reply."""
    with pytest.raises(ValueError, match="node 5 is not on this grid"):
        foreign.push_messages([order("look", plain(1)), order("look", None, 5)])
    ask(foreign, order("look"))  # comes after it
    assert foreign._mailbox._replies == {}
    assert foreign._mailbox._expected == set()
