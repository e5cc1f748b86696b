"""The table of worker options, and the grammar of the setting ``workers``."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.devices.machine import Machine
from flower_blsgd.devices.worker_spec import (
    OPTIONS,
    Option,
    WorkerSpec,
    cores_note,
    parse_workers,
    warn_of_unknown_keys,
    worker_from_node_config,
    workers_text,
)
from flower_blsgd.errors import UsageError
from scripts.write_defaults import options_table

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
            [WorkerSpec("cuda:0", batch_size=16), cpu(1, batch_size=2, precision="bfloat16")],
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


@pytest.mark.parametrize(
    ("text", "cores", "cpu_cores", "left"),
    [
        ("1x cuda:0 fast; 1x cpu slow", 16, [range(2, 16)], None),
        ("2x cpu; 4x cuda:0-1", 9, [range(5, 7), range(7, 9)], None),  # one per process
        ("cuda:0; cpu:0-3; cpu", 8, [range(4), range(6, 8)], None),
        ("cuda:0; 2x cpu role=evaluate", 4, [[2], [3]], None),
        # too few for two workers: as without an accelerator
        ("cuda:0; 2x cpu", 3, [[0], [1, 2]], 0),
        ("cuda:0; cpu", 2, [[0, 1]], 0),
        ("cuda:0; cpu:1-3", 4, [[1, 2, 3]], 1),
        ("cuda:0; cpu:2-3", 4, [[2, 3]], None),
    ],
)
def test_cpu_workers_leave_cores_for_accelerators(
    text: str, cores: int, cpu_cores: list[Sequence[int]], left: int | None
) -> None:
    machine = Machine(tuple(range(cores)), ("cuda:0", "cuda:1"))
    workers = parse_workers(text, machine)
    assert [w.cores for w in workers if w.device == "cpu"] == [tuple(ids) for ids in cpu_cores]
    note = f"note: the CPU workers leave {left} of {cores} cores: each accelerator worker needs one"
    assert cores_note(workers, machine).startswith(note) == (left is not None)
    assert bool(cores_note(workers, machine)) == (left is not None)


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
    ("  cpu \t oops", "oops", 9),
    ("cpu fast; cpu steps=0", "steps=0", 15),
    ("cpu batch=1", "batch=1", 5),
    ("cpu slowdown=nan", "slowdown=nan", 5),
    ("cpu seconds-per-step=0", "seconds-per-step=0", 5),
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
        ("cpu:24", "core 24 of cpu:24 is not available; this process may use cores 0-23"),
        (
            "cuda:2",
            "device cuda:2 is not available; this machine has cpu, cuda:0, cuda:1, xpu:0, mps",
        ),
        ("cuda:0-1", "1 worker cannot use 2 devices; write 2x cuda:0-1"),
        ("cpu:0 name=a; cpu:1 name=a", "name=a appears twice"),
        ("2x cpu:0-1 name=a; cpu:1 name=a-1", "name=a-1 appears twice"),
        ("", "names no worker"),
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
            for option in OPTIONS.values():
                assert option.accepts(getattr(worker, option.field))
        assert parse_workers(workers_text(workers), BOX) == workers


# --- round trips and node configs -------------------------------------------------------------

cores = st.sets(st.sampled_from(BOX.cores), min_size=1).map(lambda ids: tuple(sorted(ids)))
devices = cores.map(lambda ids: ("cpu", ids)) | st.sampled_from([(d, ()) for d in BOX.accelerators])


def values_of(option: Option) -> st.SearchStrategy[Any]:
    if isinstance(option.default, str):
        names = st.from_regex(r"[A-Za-z0-9_.:=-]{1,8}", fullmatch=True)
        return st.sampled_from([option.default, *option.choices]) if option.choices else names
    if isinstance(option.default, int):
        return st.just(0) | st.integers(int(option.least), 10_000)
    return st.just(option.default) | st.floats(option.least or 1e-9, 1e9)


specs = st.builds(
    lambda device, options: WorkerSpec(*device, **options),
    devices,
    st.fixed_dictionaries(
        {option.field: values_of(option) for key, option in OPTIONS.items() if key != "python"}
    ),
)


@given(st.lists(specs, min_size=1, max_size=5, unique_by=lambda worker: worker.name))
def test_text_and_node_config_of_workers_are_read_back(workers: list[WorkerSpec]) -> None:
    assert parse_workers(workers_text(workers), BOX) == workers
    for worker in workers:
        config = worker.to_node_config() | {"partition-id": 3}
        assert worker_from_node_config(config, BOX) == worker


def test_node_config_holds_only_given_options() -> None:
    assert cpu(0, 1, 3).to_node_config() == {"device": "cpu:0-1,3"}
    card = WorkerSpec("cuda:0", tier="slow", steps=2, seconds_per_step=0.5)
    given = {"device": "cuda:0", "tier": "slow", "steps": 2, "seconds-per-step": 0.5}
    assert card.to_node_config() == given
    others = [card, WorkerSpec("cuda:1"), WorkerSpec("cuda:0"), cpu(0), cpu(0)]
    assert card.to_node_config(others) == given | {"workers-on-device": 2}
    assert cpu(0).to_node_config(others) == {"device": "cpu:0"}
    named = {"device": "cpu:0", "name": "old; 2x box", "tier": ""}
    assert worker_from_node_config(named, BOX) == cpu(0, name="old; 2x box")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tier": "medium"}, "tier = 'medium' in the node config: expected fast|slow"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": True}, "steps = True"),
        ({"batch": 1}, "batch = 1 in the node config: expected N (N >= 2)"),
        ({"precision": "half"}, "float32|ieee|tf32|bfloat16"),
        ({"seconds-per-step": float("nan")}, "expected X (X > 0), or leave it out"),
        ({"seconds-per-step-alone": float("inf")}, "seconds-per-step-alone = inf"),
        ({"device": "cuda:9"}, "cuda:9 is not available"),
        ({"device": "2x cpu:0-1"}, "must name one worker"),
        ({"device": ""}, "names no worker"),
    ],
)
def test_node_config_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        worker_from_node_config({"device": "cpu:0", **config}, BOX)


def test_unknown_key_of_a_node_config_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown_keys({"device": "cpu:0", "partition-id": 1, "slowdwn": 4})
    (record,) = caplog.records
    assert record.getMessage() == (
        "node config: flower-blsgd does not know the key slowdwn; did you mean slowdown?"
    )


def test_docs_have_the_table_of_options() -> None:
    settings = Path(__file__).parents[2] / "docs" / "reference" / "workers.md"
    assert options_table() in settings.read_text(), "make format writes it"


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
            [WorkerSpec(f"cuda:{card}") for card in (0, 1)] + [cpu(3, 4, 5, 6, 7, role="evaluate")],
        ),
        (Machine((0, 1), ("mps",)), [WorkerSpec("mps")]),
    ],
)
def test_auto(machine: Machine, workers: list[WorkerSpec]) -> None:
    assert parse_workers("auto", machine) == workers
    noted = {1: "workers share CPU core 5", 2: "2 CPU cores are too few"}
    missing = len(machine.cores) == 1 or len(workers) == 1
    assert cores_note(workers, machine)[6:].startswith(noted[len(machine.cores)] if missing else "")
    assert bool(cores_note(workers, machine)) is missing
