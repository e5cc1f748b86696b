"""The stream with Flower's own processes: SuperLink, SuperNodes, ServerApp, ClientApps."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..runtime.processes import is_alive, wait_until
from .stream_engine import StreamEngine, deployment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500)]

SOON_SECONDS = 15.0
"""Less than the 20 s for which a node looks for a server that is gone."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamEngine]:
    """A SuperLink with two SuperNodes that all tests share; further ones are theirs."""
    with deployment(tmp_path_factory.mktemp("flwr-home"), nodes=2) as engine:
        yield engine


def result_of(notes: Path) -> dict[str, bytes]:
    with np.load(notes / "result.npz") as file:
        return {name: file[name].tobytes() for name in file.files}


def seconds_until_free(engine: StreamEngine, since: float) -> float:
    assert wait_until(lambda: not engine.client_apps(), 60), "a ClientApp holds its node"
    return time.monotonic() - since


def test_ordinary_app_gives_the_same_bits_over_the_stream_and_with_messages(
    engine: StreamEngine, tmp_path: Path
) -> None:
    times = {}
    for transport in ("auto", "messages"):
        notes = tmp_path / transport
        lines = engine.run(notes, transport=transport, rounds=2).finish()
        times[transport] = lines[0]["seconds"]
        expected = ["stream"] * 2 if transport == "auto" else ["no stream"]
        assert lines[0]["transports"] == expected
    assert result_of(tmp_path / "auto") == result_of(tmp_path / "messages")
    assert times["auto"] < 0.5 * times["messages"], times


def test_nodes_are_free_soon_after_a_finished_run(engine: StreamEngine, tmp_path: Path) -> None:
    run = engine.run(tmp_path / "first", rounds=3)
    assert wait_until(lambda: any("done" in line for line in run.notes()), 60), run.log()
    seconds = seconds_until_free(engine, time.monotonic())
    print(f"free {seconds:.1f} s after the end of the run")
    assert seconds < SOON_SECONDS  # 2 s on an idle machine
    run.finish()


def test_nodes_are_free_soon_after_a_stopped_run(engine: StreamEngine, tmp_path: Path) -> None:
    run = engine.run(tmp_path / "stopped", loop=True, seconds=0.2)
    run.wait_for(0, 1)
    begin = time.monotonic()
    stopped = run.stop()
    seconds = seconds_until_free(engine, stopped)
    print(f"free {seconds:.1f} s after flwr stop, which took {stopped - begin:.1f} s")
    assert seconds < SOON_SECONDS
    # The next run gets them.
    lines = engine.run(tmp_path / "next", rounds=1).finish()
    assert lines[0]["transports"] == ["stream"] * 2


def test_supernode_that_is_killed_and_started_again(engine: StreamEngine, tmp_path: Path) -> None:
    """First with all its processes, then alone; in one run.

    Flower takes a killed node for there for 47 s more, and a run that begins waits for it.
    """
    victim = engine.node(2)
    run = engine.run(tmp_path / "killed", loop=True, seconds=0.2)
    run.wait_for(0, 1, 2)

    engine.kill(victim)
    killed_at = time.time()
    run.wait_for(0, 1)
    after = [line for line in run.rounds() if line["at"] > killed_at]
    print(f"the round of the kill took {after[0]['seconds']:.2f} s")
    # 2 s on an idle machine; the app itself would wait 30 s.
    assert all(line["seconds"] < SOON_SECONDS for line in after)
    victim = engine.node(2)
    run.wait_for(0, 1, 2)

    holder = holder_of(2, run.rounds()[-1:])
    victim.kill()
    killed_at = time.monotonic()
    again = engine.node(2)
    assert wait_until(lambda: not any(map(is_alive, holder)))
    died_after = time.monotonic() - killed_at
    print(f"the holder of the device died {died_after:.2f} s after its SuperNode")
    assert died_after < SOON_SECONDS  # 0.3 s on an idle machine
    run.wait_for(0, 1, 2)

    lines = run.finish()
    assert len(holder_of(2, lines)) == 3
    errors = [error for line in lines for error in line.get("errors", [])]
    # Each ClientApp locks its device, and fails if somebody else has it.
    assert not [error for error in errors if "BlockingIOError" in error]
    again.terminate()


def holder_of(partition: int, lines: list[dict[str, Any]]) -> set[int]:
    """Return the processes that answered for a node."""
    return {
        process
        for line in lines
        for answered, process in zip(
            line.get("partitions", []), line.get("processes", []), strict=True
        )
        if answered == partition
    }
