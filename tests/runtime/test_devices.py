"""The grammar that names workers."""

import dataclasses
import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.devices import (
    WorkerSpec,
    auto_workers,
    parse_workers,
    split_evenly,
    worker_from_node_config,
)
from flower_blsgd.runtime.machine import Machine

BOX = Machine(tuple(range(24)), ("cuda:0", "cuda:1", "xpu:0", "mps"))


def cpu(*cores: int, **more: object) -> WorkerSpec:
    return WorkerSpec("cpu", cores, **more)  # type: ignore[arg-type]


# --- specifications that are read -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("cpu:0", [cpu(0)]),
        ("1x cpu:0", [cpu(0)]),
        ("cpu:3,1,2", [cpu(1, 2, 3)]),
        ("cpu:0-2,7", [cpu(0, 1, 2, 7)]),
        ("cpu:5-5,5", [cpu(5)]),
        ("cuda:1 fast", [WorkerSpec("cuda:1", tier="fast")]),
        ("cuda", [WorkerSpec("cuda")]),
        ("mps slow", [WorkerSpec("mps", tier="slow")]),
        ("xpu:0", [WorkerSpec("xpu:0")]),
        ("cpu:0 steps=12", [cpu(0, steps=12)]),
        ("cpu:0 slowdown=1", [cpu(0)]),
        ("cpu:0 slowdown=2.5", [cpu(0, slowdown=2.5)]),
        ("cpu:0 seconds-per-step=0.25", [cpu(0, seconds_per_step=0.25)]),
        ("cpu:0 seconds-per-step=3", [cpu(0, seconds_per_step=3.0)]),
        ("cpu:0 seconds-per-step=.5", [cpu(0, seconds_per_step=0.5)]),
        ("cpu:0 seconds-per-step=1e-3", [cpu(0, seconds_per_step=0.001)]),
        ("cpu:0 seconds-per-step=2.5e+1", [cpu(0, seconds_per_step=25.0)]),
        (
            "2x cpu:0-1 fast slowdown=2 seconds-per-step=0.25",
            [cpu(i, tier="fast", slowdown=2.0, seconds_per_step=0.25) for i in (0, 1)],
        ),
        ("cpu:0 name=left-hand", [cpu(0, name="left-hand")]),
        (
            "cpu:4 slow steps=1 slowdown=3 name=old",
            [cpu(4, tier="slow", steps=1, slowdown=3.0, name="old")],
        ),
        ("cpu:0 fast; cpu:1 slow", [cpu(0, tier="fast"), cpu(1, tier="slow")]),
        (" \tcpu:0   fast ;; \n cpu:1;", [cpu(0, tier="fast"), cpu(1)]),
        ("2x\ncuda:0\r\nslow", [WorkerSpec("cuda:0", tier="slow")] * 2),
        ("2x cuda:0 fast", [WorkerSpec("cuda:0", tier="fast")] * 2),
        ("2 x cuda:0", [WorkerSpec("cuda:0")] * 2),
        ("2x cuda:0-1", [WorkerSpec("cuda:0"), WorkerSpec("cuda:1")]),
        ("4x cuda:0,1", [WorkerSpec(f"cuda:{card}") for card in (0, 0, 1, 1)]),
        ("2x cpu:0-3 name=a", [cpu(0, 1, name="a-0"), cpu(2, 3, name="a-1")]),
        ("1x cpu:0 name=a", [cpu(0, name="a")]),
        # the same cores twice is the user's wish
        ("cpu:0; cpu:0", [cpu(0), cpu(0)]),
        ("3x cpu:6", [cpu(6)] * 3),
    ],
)
def test_parse_hand_worked(text: str, workers: list[WorkerSpec]) -> None:
    assert parse_workers(text, BOX) == workers


def test_parse_example_of_the_design() -> None:
    text = "8x cuda:0 fast; 2x cpu:0-15 slow steps=1; 1x cpu:16-19 slowdown=4"
    workers = parse_workers(text, BOX)
    assert workers[:8] == [WorkerSpec("cuda:0", tier="fast")] * 8
    assert workers[8:] == [
        cpu(*range(8), tier="slow", steps=1),
        cpu(*range(8, 16), tier="slow", steps=1),
        cpu(16, 17, 18, 19, slowdown=4.0),
    ]


def test_parse_keeps_each_option_to_its_group() -> None:
    workers = parse_workers("cpu:0 steps=3 name=a; cpu:1", BOX)
    assert workers[1] == cpu(1)


def test_parse_cpu_without_cores_takes_all() -> None:
    assert parse_workers("cpu", Machine((2, 3, 5), ())) == [cpu(2, 3, 5)]


def test_parse_cpu_without_cores_takes_what_no_group_claims() -> None:
    workers = parse_workers("2x cpu fast; cpu:0-1; cpu slow", Machine(tuple(range(8)), ()))
    assert workers == [
        cpu(2, 3, tier="fast"),
        cpu(4, 5, tier="fast"),
        cpu(0, 1),
        cpu(6, 7, tier="slow"),
    ]


def test_parse_cpu_without_cores_when_all_are_claimed() -> None:
    assert parse_workers("cpu:0; cpu", Machine((0,), ())) == [cpu(0), cpu(0)]


def test_parse_more_workers_than_cores() -> None:
    assert parse_workers("3x cpu", Machine((4, 6), ())) == [cpu(4), cpu(4), cpu(6)]


# --- what is refused ------------------------------------------------------------------------

UNREADABLE = [
    # text, the token that cannot be read, its character counted from 1
    ("CPU", "CPU", 1),
    ("8y cuda:0", "8y", 1),
    ("8x", "8x", 1),
    ("8xcuda:0", "8xcuda:0", 1),
    ("0x cpu", "0", 1),
    ("-1x cpu", "-1", 1),
    ("1.5x cpu", "1.5", 1),
    ("cpu:0; two x cpu:1", "two", 8),
    ("cpu:a", "a", 5),
    ("cpu:", "", 5),
    ("cpu:3-1", "3-1", 5),
    ("cpu:0-", "0-", 5),
    ("cpu:0:1", "0:1", 5),
    ("2x cuda:x fast", "x", 9),
    ("cpu medium", "medium", 5),
    ("  cpu \t oops", "oops", 9),
    ("cpu fast; cpu steps=0", "steps=0", 15),
    ("cpu steps=", "steps=", 5),
    ("cpu steps=1.5", "steps=1.5", 5),
    ("cpu steps=-2", "steps=-2", 5),
    ("cpu slowdown=0.9", "slowdown=0.9", 5),
    ("cpu slowdown=x", "slowdown=x", 5),
    ("cpu slowdown=inf", "slowdown=inf", 5),
    ("cpu slowdown=nan", "slowdown=nan", 5),
    ("cpu seconds-per-step=", "seconds-per-step=", 5),
    ("cpu seconds-per-step=0", "seconds-per-step=0", 5),
    ("cpu seconds-per-step=0.0e3", "seconds-per-step=0.0e3", 5),
    ("cpu seconds-per-step=-1", "seconds-per-step=-1", 5),
    ("cpu seconds-per-step=.", "seconds-per-step=.", 5),
    ("cpu seconds-per-step=1e", "seconds-per-step=1e", 5),
    ("cpu seconds-per-step=1s", "seconds-per-step=1s", 5),
    ("cpu seconds-per-step=inf", "seconds-per-step=inf", 5),
    ("cpu seconds-per-step=nan", "seconds-per-step=nan", 5),
    ("cpu seconds-per-step=1e999", "seconds-per-step=1e999", 5),
    ("cpu seconds-per-step=1e-999", "seconds-per-step=1e-999", 5),
    ("cpu seconds-per-step-alone=1", "seconds-per-step-alone=1", 5),
    ("cpu name=", "name=", 5),
    ("cpu:0 fast; cpu:1 slow Name=b", "Name=b", 24),
    ("cpu:0 cpu:1", "cpu:1", 7),
    ("cpu steps = 3", "steps", 5),
    ("cpu\n;\ncpu\nslo", "slo", 11),
]


@pytest.mark.parametrize(("text", "token", "character"), UNREADABLE)
def test_parse_error_points_at_the_character(text: str, token: str, character: int) -> None:
    with pytest.raises(UsageError) as raised:
        parse_workers(text, BOX)
    one_line = re.sub(r"\s", " ", text)
    assert f'cannot read "{token}" at character {character} of "{one_line}"' in str(raised.value)
    assert text[character - 1 :].startswith(token)


@pytest.mark.parametrize(
    "options",
    [
        "fast slow",
        "steps=1 steps=2",
        "slowdown=2 slowdown=3",
        "seconds-per-step=2 seconds-per-step=3",
        "name=a name=b",
    ],
)
def test_parse_refuses_an_option_given_twice(options: str) -> None:
    """The grammar has each once; which of two was meant cannot be known."""
    with pytest.raises(UsageError):
        parse_workers(f"cpu:0 {options}", BOX)


_ALL_OPTIONS = "fast, slow, steps=N (N >= 1), slowdown=X (X >= 1), seconds-per-step=X or name=TEXT"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two x cpu", "a number of workers, such as 2x"),
        ("7", "a device, such as cpu, cpu:0-3 or cuda:0"),
        ("cpu:x", "numbers, such as 0, 0-3 or 0,2,4"),
        ("cpu x", _ALL_OPTIONS),
    ],
)
def test_parse_error_says_what_was_expected(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"expected {expected}")):
        parse_workers(text, BOX)


@pytest.mark.parametrize("text", ["", "  ", ";", " ; ;"])
def test_parse_refuses_no_worker(text: str) -> None:
    with pytest.raises(UsageError, match="names no worker"):
        parse_workers(text, BOX)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cpu:24", "core 24 of cpu:24 is not there; this process may use cores 0-23"),
        ("2x cpu:22-25", "core 24 of cpu:24 is not there; this process may use cores 0-23"),
        ("cuda:2", "device cuda:2 is not there; this machine has cpu, cuda:0, cuda:1, xpu:0, mps"),
        ("2x cuda:1-2", "device cuda:2 is not there"),
        ("npu", "device npu is not there"),
        ("auto fast", "device auto is not there"),
        ("cuda:0-1", "1 worker cannot hold 2 devices; write 2x cuda:0-1"),
        ("cpu:0 name=a; cpu:1 name=a", "name=a comes twice"),
        ("2x cpu:0-1 name=a; cpu:1 name=a-1", "name=a-1 comes twice"),
    ],
)
def test_parse_refuses_what_is_not_there(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        parse_workers(text, BOX)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory holds on Linux only")
def test_parse_refuses_a_core_number_without_measure() -> None:
    """A slip of the hand does not fill the memory."""
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        from flower_blsgd.errors import UsageError
        from flower_blsgd.runtime.devices import parse_workers
        from flower_blsgd.runtime.machine import Machine
        try:
            parse_workers("cpu:0-999999999999", Machine((0, 1), ()))
        except UsageError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert "cannot read" in done.stdout, done.stderr[-300:]


words = st.sampled_from(
    [
        *("cpu", "cpu:0", "cpu:1-3", "cuda", "cuda:0", "cuda:0-1", "npu", "auto", "Cpu", "ß", "²"),
        *("2x", "3", "x", "0x", "fast", "slow", ";", ":", ",", "-", "="),
        *(
            "steps=",
            "steps=3",
            "slowdown=",
            "slowdown=1.5",
            "seconds-per-step=.1",
            "name=a",
            "name=b",
        ),
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


# --- round trips ----------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9_.:=-]{1,8}", fullmatch=True)
cores = st.sets(st.sampled_from(BOX.cores), min_size=1).map(lambda ids: tuple(sorted(ids)))
places = st.one_of(
    cores.map(lambda ids: ("cpu", ids)), st.sampled_from([(d, ()) for d in BOX.accelerators])
)
specs = st.builds(
    lambda place, tier, steps, slowdown, name, seconds: WorkerSpec(
        *place, tier, steps, slowdown, name, seconds
    ),
    places,
    st.sampled_from(["", "fast", "slow"]),
    st.none() | st.integers(1, 10_000),
    st.integers(100, 100_000).map(lambda hundredths: hundredths / 100),
    st.just("") | names,
    st.none() | st.floats(1e-9, 1e9),
)


def as_text(worker: WorkerSpec, count: bool) -> str:
    """Write a worker as the grammar has it."""
    parts = ["1x"] if count else []
    parts += [worker.device_with_cores, worker.tier]
    parts += [f"steps={worker.steps}"] if worker.steps else []
    parts += [f"slowdown={worker.slowdown}"] if worker.slowdown != 1 else []
    parts += [f"seconds-per-step={worker.seconds_per_step}"] if worker.seconds_per_step else []
    parts += [f"name={worker.name}"] if worker.name else []
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
    read = worker_from_node_config(worker.to_node_config(), BOX)
    assert read == dataclasses.replace(worker, seconds_per_step=None)


def test_node_config_holds_only_what_was_said() -> None:
    assert cpu(0, 1, 3).to_node_config() == {"device": "cpu:0-1,3"}
    full = WorkerSpec("cuda:0", (), "slow", 2, 4.0, "old card", 0.5, 0.25)
    assert full.to_node_config() == {
        "device": "cuda:0",
        "tier": "slow",
        "steps": 2,
        "slowdown": 4.0,
        "name": "old card",
        "seconds-per-step": 0.5,
        "seconds-per-step-alone": 0.25,
    }


def test_node_config_name_may_be_any_text() -> None:
    config = {"device": "cpu:0", "name": "old; 2x box", "partition-id": 3, "lr": 0.5}
    assert worker_from_node_config(config, BOX) == cpu(0, name="old; 2x box")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "cpu:0", "tier": "medium"}, "medium"),
        ({"device": "cpu:0", "steps": 0}, "steps=0"),
        ({"device": "cpu:0", "slowdown": 0.5}, "slowdown=0.5"),
        ({"device": "cuda:9"}, "cuda:9 is not there"),
        ({"device": "2x cpu:0-1"}, "must name one worker"),
        ({"device": "cpu:0; cpu:1"}, "must name one worker"),
        ({"device": "auto"}, "must name one worker"),
        ({"device": ""}, "names no worker"),
    ],
)
def test_node_config_refused(config: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        worker_from_node_config(config, BOX)


# --- splitting cores ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (1, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (3, [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (8, [(i,) for i in range(8)]),
    ],
)
def test_split_hand_worked(count: int, parts: list[tuple[int, ...]]) -> None:
    assert split_evenly(range(8), count) == parts
    workers = parse_workers(f"{count}x cpu:0-7", BOX)
    assert [worker.cores for worker in workers] == parts


core_ids = st.sets(st.integers(0, 300), min_size=1, max_size=40).map(sorted)


@given(core_ids, st.integers(1, 40))
def test_split_adds_up(ids: list[int], count: int) -> None:
    parts = split_evenly(ids, count)
    assert len(parts) == count
    if count <= len(ids):
        assert [core for part in parts for core in part] == ids
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    else:  # shared: one core each, every core in use, evenly
        assert all(len(part) == 1 for part in parts)
        used = [part[0] for part in parts]
        assert sorted(used) == used
        uses = [used.count(core) for core in ids]
        assert max(uses) - min(uses) <= 1


# --- auto -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "fast", "slow"),
    [
        ((0, 1), (0,), (1,)),
        ((0, 1, 2, 3), (0, 1), (2, 3)),
        ((1, 4, 6), (1, 4), (6,)),
        ((5,), (5,), (5,)),
    ],
)
def test_auto_without_accelerators(
    cores: tuple[int, ...], fast: tuple[int, ...], slow: tuple[int, ...]
) -> None:
    expected = [cpu(*fast, tier="fast"), cpu(*slow, tier="slow", slowdown=4.0)]
    assert parse_workers("auto", Machine(cores, ())) == expected
    assert parse_workers("  auto\n", Machine(cores, ())) == expected


def test_auto_with_accelerators_leaves_cores_for_them_and_the_server() -> None:
    machine = Machine((0, 1, 2, 3, 4, 5, 6, 7), ("cuda:0", "cuda:1"))
    assert auto_workers(machine) == [
        WorkerSpec("cuda:0", tier="fast"),
        WorkerSpec("cuda:1", tier="fast"),
        cpu(3, 4, 5, 6, 7, tier="slow"),
    ]


@pytest.mark.parametrize("cores", [(0,), (0, 1)])
def test_auto_with_an_accelerator_and_no_core_to_spare(cores: tuple[int, ...]) -> None:
    """The last core it is: the default must have a slow worker, or a plain run is refused."""
    fast, slow = auto_workers(Machine(cores, ("mps",)))
    assert fast == WorkerSpec("mps", tier="fast")
    assert slow == WorkerSpec("cpu", cores[-1:], tier="slow")


@given(
    st.sets(st.integers(0, 255), min_size=1, max_size=64).map(lambda ids: tuple(sorted(ids))),
    st.integers(0, 8),
)
def test_auto_uses_only_what_is_there(cores: tuple[int, ...], cards: int) -> None:
    machine = Machine(cores, tuple(f"cuda:{card}" for card in range(cards)))
    workers = parse_workers("auto", machine)
    assert [w.device for w in workers if w.device != "cpu"] == list(machine.accelerators)
    assert workers[0].tier == "fast"
    used = [core for worker in workers for core in worker.cores]
    assert set(used) <= set(cores)
    if cards:
        assert len(used) == max(1, len(cores) - cards - 1)
    else:
        assert [w.tier for w in workers] == ["fast", "slow"]
        assert sorted(set(used)) == list(cores)


# --- how it is written ----------------------------------------------------------------------


def test_device_with_cores() -> None:
    assert cpu(0, 1, 2, 7).device_with_cores == "cpu:0-2,7"
    assert cpu().device_with_cores == "cpu"
    assert WorkerSpec("cuda:1").device_with_cores == "cuda:1"
