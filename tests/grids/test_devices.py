"""What this machine has, and the grammar that names workers on it."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.errors import UsageError
from flower_blsgd.grids import devices
from flower_blsgd.grids.devices import (
    Machine,
    WorkerSpec,
    cores_note,
    parse_workers,
    usable_cores,
    worker_from_node_config,
)

BOX = Machine(tuple(range(24)), ("cuda:0", "cuda:1", "xpu:0", "mps"))


def cpu(*cores: int, **more: object) -> WorkerSpec:
    return WorkerSpec("cpu", cores, **more)  # type: ignore[arg-type]


# --- specifications that are read -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("cpu:0", [cpu(0)]),
        ("cpu:7,1-2", [cpu(1, 2, 7)]),
        ("mps slow", [WorkerSpec("mps", tier="slow")]),
        ("cpu:0 seconds-per-step=.5", [cpu(0, seconds_per_step=0.5)]),
        ("cpu:0 seconds-per-step=1e-3", [cpu(0, seconds_per_step=0.001)]),
        (
            "2x cpu:0-1 fast slowdown=2 seconds-per-step=0.25",
            [cpu(i, tier="fast", slowdown=2.0, seconds_per_step=0.25) for i in (0, 1)],
        ),
        (
            "cpu:4 slow steps=1 slowdown=3 name=old",
            [cpu(4, tier="slow", steps=1, slowdown=3.0, name="old")],
        ),
        (
            "cuda:0 batch=16; cpu:1 batch=2 precision=bfloat16",
            [WorkerSpec("cuda:0", batch=16), cpu(1, batch=2, precision="bfloat16")],
        ),
        ("cpu:0 role=train; cpu:1 role=evaluate", [cpu(0), cpu(1, role="evaluate")]),
        (" \tcpu:0   fast ;; \n cpu:1;", [cpu(0, tier="fast"), cpu(1)]),
        ("2x\ncuda:0\r\nslow", [WorkerSpec("cuda:0", tier="slow")] * 2),
        ("2 x cuda:0", [WorkerSpec("cuda:0")] * 2),
        ("2x cuda:0-1", [WorkerSpec("cuda:0"), WorkerSpec("cuda:1")]),
        ("4x cuda:0,1", [WorkerSpec(f"cuda:{card}") for card in (0, 0, 1, 1)]),
        ("2x cpu:0-3 name=a", [cpu(0, 1, name="a-0"), cpu(2, 3, name="a-1")]),
        (
            "8x cuda:0 fast; 2x cpu:0-15 slow steps=1; 1x cpu:16-19 slowdown=4",
            [WorkerSpec("cuda:0", tier="fast")] * 8
            + [cpu(*range(8), tier="slow", steps=1), cpu(*range(8, 16), tier="slow", steps=1)]
            + [cpu(16, 17, 18, 19, slowdown=4.0)],
        ),
        # the same cores twice is the user's wish
        ("cpu:0; cpu:0", [cpu(0), cpu(0)]),
        ("3x cpu:6", [cpu(6)] * 3),
        ("2x cpu:0-2", [cpu(0), cpu(1, 2)]),
    ],
)
def test_parse_hand_worked(text: str, workers: list[WorkerSpec]) -> None:
    assert parse_workers(text, BOX) == workers


@pytest.mark.parametrize(
    ("text", "cores", "workers"),
    [
        ("cpu", (2, 3, 5), [cpu(2, 3, 5)]),
        (
            "2x cpu fast; cpu:0-1; cpu slow",  # what no group claims
            tuple(range(8)),
            [cpu(2, 3, tier="fast"), cpu(4, 5, tier="fast"), cpu(0, 1), cpu(6, 7, tier="slow")],
        ),
        ("cpu:0; cpu", (0,), [cpu(0), cpu(0)]),
        ("3x cpu", (4, 6), [cpu(4), cpu(4), cpu(6)]),
    ],
)
def test_parse_cpu_without_cores(
    text: str, cores: tuple[int, ...], workers: list[WorkerSpec]
) -> None:
    assert parse_workers(text, Machine(cores, ())) == workers


# --- what is refused ------------------------------------------------------------------------

NINES = "9" * 5000
UNREADABLE = [
    # text, the token that cannot be read, its character counted from 1
    ("CPU", "CPU", 1),
    ("8y cuda:0", "8y", 1),
    ("8xcuda:0", "8xcuda:0", 1),
    ("0x cpu", "0", 1),
    ("cpu:a", "a", 5),
    ("cpu:", "", 5),
    ("cpu:3-1", "3-1", 5),
    ("cpu:0:1", "0:1", 5),
    ("  cpu \t oops", "oops", 9),
    ("cpu fast; cpu steps=0", "steps=0", 15),
    ("cpu batch=1", "batch=1", 5),
    ("cpu batch=8.0", "batch=8.0", 5),
    ("cpu precision=float16", "precision=float16", 5),
    ("cpu slowdown=0.9", "slowdown=0.9", 5),
    ("cpu slowdown=nan", "slowdown=nan", 5),
    ("cpu seconds-per-step=0", "seconds-per-step=0", 5),
    ("cpu seconds-per-step=1s", "seconds-per-step=1s", 5),
    ("cpu seconds-per-step=1e999", "seconds-per-step=1e999", 5),
    ("cpu seconds-per-step-alone=1", "seconds-per-step-alone=1", 5),
    ("cpu name=", "name=", 5),
    ("cpu role=both", "role=both", 5),
    ("cpu:0 fast; cpu:1 slow Name=b", "Name=b", 24),
    ("cpu steps = 3", "steps", 5),
    ("cpu\n;\ncpu\nslo", "slo", 11),
    ("cpu:0-999999999999", "0-999999999999", 5),  # not a list that fills the memory
    # more digits than Python reads
    (NINES, NINES, 1),
    *((f"{NINES}x cpu", NINES, 1), (f"cpu:{NINES}", NINES, 5)),
    (f"cpu steps={NINES}", f"steps={NINES}", 5),
]


@pytest.mark.parametrize(("text", "token", "character"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_parse_error_points_at_the_character(text: str, token: str, character: int) -> None:
    with pytest.raises(UsageError) as raised:
        parse_workers(text, BOX)
    one_line = re.sub(r"\s", " ", text)
    assert f'cannot read "{token}" at character {character} of "{one_line}"' in str(raised.value)
    assert text[character - 1 :].startswith(token)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cpu:24", "core 24 of cpu:24 is not there; this process may use cores 0-23"),
        ("cuda:2", "device cuda:2 is not there; this machine has cpu, cuda:0, cuda:1, xpu:0, mps"),
        ("npu", "device npu is not there"),
        ("auto fast", "device auto is not there"),
        ("cuda:0-1", "1 worker cannot hold 2 devices; write 2x cuda:0-1"),
        ("cpu:0 name=a; cpu:1 name=a", "name=a comes twice"),
        ("2x cpu:0-1 name=a; cpu:1 name=a-1", "name=a-1 comes twice"),
        ("", "names no worker"),
        (" ; ;", "names no worker"),
        ("cpu:0 fast slow", "each option once"),
        ("cpu:0 name=a name=b", "each option once"),
    ],
)
def test_parse_refuses_what_is_not_there(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        parse_workers(text, BOX)


words = st.sampled_from(
    [
        *("cpu", "cpu:0", "cpu:1-3", "cuda", "cuda:0", "cuda:0-1", "npu", "auto", "Cpu", "ß", "²"),
        *("2x", "3", "x", "0x", "fast", "slow", ";", ":", ",", "-", "="),
        *("batch=1", "batch=2", "precision=", "precision=tf32"),
        *("steps=", "steps=3", "slowdown=1.5", "seconds-per-step=.1", "name=a", "name=b"),
        *("9" * 5000, "9" * 5000 + "x", "steps=" + "9" * 5000, "slowdown=1e999", "slowdown=nan"),
        *("steps=1e3", "seconds-per-step=1e-999", "cpu:0-9999", "name=\x1b[2J", "\0", "\n"),
    ]
)
texts = st.lists(st.tuples(words, st.sampled_from(["", " ", "  ", "\t"])), max_size=8).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)


@given(texts)
def test_parse_gives_workers_or_points_at_the_place(text: str) -> None:
    """Whatever is typed: workers that are there, or a UsageError that points at the right place."""
    try:
        workers = parse_workers(text, BOX)
    except UsageError as error:
        message = str(error)
        place = re.search(r'cannot read "(.*)" at character (\d+) of', message)
        if place is not None:
            start = int(place[2]) - 1
            assert "\n" not in message
            assert text[start : start + len(place[1])] == place[1]
            assert 0 <= start <= len(text)
    else:
        assert workers
        for worker in workers:
            assert set(worker.cores) <= set(BOX.cores)
            assert bool(worker.cores) == (worker.device == "cpu")
            assert worker.device in ("cpu", "cuda", *BOX.accelerators)
            assert worker.steps is None or 1 <= worker.steps < 2**31
            assert worker.batch is None or 2 <= worker.batch < 2**31
            assert worker.precision in ("", *devices.PRECISIONS)
            assert 1 <= worker.slowdown < math.inf
            assert worker.seconds_per_step is None or 0 < worker.seconds_per_step < math.inf
        written = " ; ".join(as_text(worker, count=True) for worker in workers)
        assert parse_workers(written, BOX) == workers


# --- round trips ----------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9_.:=-]{1,8}", fullmatch=True)
cores = st.sets(st.sampled_from(BOX.cores), min_size=1).map(lambda ids: tuple(sorted(ids)))
places = st.one_of(
    cores.map(lambda ids: ("cpu", ids)), st.sampled_from([(d, ()) for d in BOX.accelerators])
)
specs = st.builds(
    lambda place, tier, steps, slowdown, name, seconds, batch, precision, role: WorkerSpec(
        *place, tier, steps, slowdown, name, seconds, None, batch, precision, role
    ),
    places,
    st.sampled_from(["", "fast", "slow"]),
    st.none() | st.integers(1, 10_000),
    st.integers(100, 100_000).map(lambda hundredths: hundredths / 100),
    st.just("") | names,
    st.none() | st.floats(1e-9, 1e9),
    st.none() | st.integers(2, 10_000),
    st.sampled_from(["", *devices.PRECISIONS]),
    st.sampled_from(["train", "evaluate"]),
)


def as_text(worker: WorkerSpec, count: bool) -> str:
    """Write a worker as the grammar has it."""
    parts = ["1x"] if count else []
    parts += [worker.device_with_cores, worker.tier]
    parts += [f"steps={worker.steps}"] if worker.steps else []
    parts += [f"batch={worker.batch}"] if worker.batch else []
    parts += [f"precision={worker.precision}"] if worker.precision else []
    parts += [f"slowdown={worker.slowdown}"] if worker.slowdown != 1 else []
    parts += [f"seconds-per-step={worker.seconds_per_step}"] if worker.seconds_per_step else []
    parts += [f"name={worker.name}"] if worker.name else []
    parts += [f"role={worker.role}"] if worker.role != "train" else []
    return " ".join(filter(None, parts))


@given(
    st.lists(specs, min_size=1, max_size=5, unique_by=lambda w: w.name or object()), st.booleans()
)
def test_text_of_workers_is_read_back(workers: list[WorkerSpec], count: bool) -> None:
    text = " ; ".join(as_text(worker, count) for worker in workers)
    assert parse_workers(text, BOX) == workers


@given(specs)
def test_node_config_of_a_worker_is_read_back(worker: WorkerSpec) -> None:
    """All but its speed: that is for whoever answers the profile query, see test_profile."""
    config = worker.to_node_config() | {"partition-id": 3, "lr": 0.5}
    read = worker_from_node_config(config, BOX)
    assert read == dataclasses.replace(worker, seconds_per_step=None)


def test_node_config_holds_only_what_was_said() -> None:
    assert cpu(0, 1, 3).to_node_config() == {"device": "cpu:0-1,3"}
    full = WorkerSpec("cuda:0", (), "slow", 2, 4.0, "old card", 0.5, 0.25, 16, "tf32")
    assert full.to_node_config() == {
        "device": "cuda:0",
        "tier": "slow",
        "steps": 2,
        "batch": 16,
        "precision": "tf32",
        "slowdown": 4.0,
        "name": "old card",
        "seconds-per-step": 0.5,
        "seconds-per-step-alone": 0.25,
    }
    named = {"device": "cpu:0", "name": "old; 2x box"}
    assert worker_from_node_config(named, BOX) == cpu(0, name="old; 2x box")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "cpu:0", "tier": "medium"}, "medium"),
        ({"device": "cpu:0", "steps": 0}, "steps=0"),
        ({"device": "cpu:0", "batch": 1}, "batch=N (N >= 2)"),
        ({"device": "cpu:0", "precision": "half"}, "precision=float32|tf32|bfloat16"),
        ({"device": "cuda:9"}, "cuda:9 is not there"),
        ({"device": "2x cpu:0-1"}, "must name one worker"),
        ({"device": ""}, "names no worker"),
    ],
)
def test_node_config_refused(config: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        worker_from_node_config(config, BOX)


# --- auto -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        # Nobody is slowed on purpose.
        (Machine((0, 1), ()), [cpu(0, tier="fast"), cpu(1, tier="slow")]),
        (Machine((1, 4, 6), ()), [cpu(1, 4, tier="fast"), cpu(6, tier="slow")]),
        (Machine((5,), ()), [cpu(5, tier="fast"), cpu(5, tier="slow")]),
        (  # a core for each of them and the server; on the others a worker evaluates
            Machine(tuple(range(8)), ("cuda:0", "cuda:1")),
            [WorkerSpec(f"cuda:{card}", tier="fast") for card in (0, 1)]
            + [cpu(3, 4, 5, 6, 7, role="evaluate")],
        ),
        (Machine((0, 1), ("mps",)), [WorkerSpec("mps", tier="fast")]),
    ],
)
def test_auto(machine: Machine, workers: list[WorkerSpec]) -> None:
    assert parse_workers("auto", machine) == workers
    noted = {1: "workers share CPU core 5", 2: "2 CPU cores are too few"}
    missing = len(machine.cores) == 1 or len(workers) == 1
    assert cores_note(workers, machine)[6:].startswith(noted[len(machine.cores)] if missing else "")
    assert bool(cores_note(workers, machine)) is missing


@pytest.mark.parametrize(
    ("machine", "fast", "slow"),
    [
        (Machine((0, 1), ()), (0,), (1,)),
        (Machine((0, 1, 2, 3), ()), (0, 1), (2, 3)),
        (Machine(tuple(range(16)), ("cuda:0",)), tuple(range(8)), tuple(range(8, 16))),
        (Machine((5,), ()), (5,), (5,)),
    ],
)
def test_config_of_the_demonstration_slows_a_worker_on_any_machine(
    machine: Machine, fast: tuple[int, ...], slow: tuple[int, ...]
) -> None:
    config = Path(__file__).parents[2] / "configs" / "digits.toml"
    workers = parse_workers(tomllib.loads(config.read_text())["workers"], machine)
    assert workers == [cpu(*fast, tier="fast"), cpu(*slow, tier="slow", slowdown=4.0)]


# --- the machine ------------------------------------------------------------------------------


@pytest.fixture
def fresh_look() -> Iterator[None]:
    """Forget what was found, before and after."""
    devices._accelerators.cache_clear()
    yield
    devices._accelerators.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_usable_cores_are_those_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    assert usable_cores() == tuple(sorted(before))
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cores() == (max(before),)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("fresh_look")
def test_accelerators_are_asked_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Machine((0,)).accelerators == ("cuda:0", "cuda:1", "xpu:0", "mps")
    # Given ones are taken at their word.
    assert Machine((0,), ()).accelerators == ()
    assert Machine((0,), ("cuda:7",)).accelerators == ("cuda:7",)


@pytest.mark.processes
def test_looking_at_cpu_workers_imports_no_torch() -> None:
    """A worker reads its own specification before it is pinned, and pinning comes before torch."""
    program = (
        "import sys; from flower_blsgd.grids import local_grid, worker_process; "
        "from flower_blsgd.grids.devices import parse_workers, this_machine; "
        "core = this_machine().cores[0]; parse_workers(f'2x cpu; cpu:{core} slow'); "
        "print([name for name in ('torch', 'ray', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout == "[]\n"
