"""Training one after another: the order, what is repeated and what is not, what is refused."""

import multiprocessing
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.exception import AggregationError

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.compare import (
    SETTINGS,
    ComparedRun,
    alone_in,
    check_folder,
    open_folder,
    overridden,
    read_algorithms,
    read_seeds,
    summarise,
    train_all,
    with_budget,
)

from .fake_training import FakeTrain, write_run

A, B, C = "sync-sgd", "dlb", "fednova"
CONFIG = RunConfig(epochs=2, batch_size=8)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "compare-mine"
    open_folder(path, CONFIG)
    return path


Go = Callable[..., tuple[list[ComparedRun], list[str]]]


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def go(folder: Path, told: list[str]) -> Go:
    def train(
        train: FakeTrain, algorithms: Sequence[str] = (A, B), seeds: Sequence[int] = (0, 1)
    ) -> tuple[list[ComparedRun], list[str]]:
        return train_all(CONFIG, algorithms, seeds, folder, train, told.append)

    return train


# --- the order, and what every run is given


def test_all_algorithms_have_their_turn_with_a_seed_before_the_next_seed(
    go: Go, folder: Path, told: list[str]
) -> None:
    train = FakeTrain()
    runs, failures = go(train, (A, B, C), (0, 7))
    assert train.trained == [(A, 0), (B, 0), (C, 0), (A, 7), (B, 7), (C, 7)]
    assert failures == []
    assert [(run.algorithm, run.seed) for run in runs] == train.trained
    assert [run.folder for run in runs][:2] == [folder / f"{A}-seed0", folder / f"{B}-seed0"]
    assert told[:2] == [
        f"[1/6] {A}, seed 0: training",
        f"[1/6] {A}, seed 0: done, accuracy 90.00% after 4.0 s of training",
    ]
    assert len(told) == 12


def test_runs_differ_in_algorithm_seed_and_folder_only(go: Go, folder: Path) -> None:
    train = FakeTrain()
    go(train)
    for config in train.configs:
        values = config.to_run_config()
        assert values.pop("out") == str(folder / f"{config.algorithm}-seed{config.seed}")
        for key in ("algorithm", "seed"):
            values.pop(key)
        assert values.items() <= CONFIG.to_run_config().items()


# --- going on


def test_finished_runs_are_not_repeated_and_not_touched(
    go: Go, folder: Path, told: list[str]
) -> None:
    go(FakeTrain())
    before = contents(folder)
    told.clear()
    again = FakeTrain()
    runs, failures = go(again)
    assert again.trained == []
    assert (len(runs), failures) == (4, [])
    assert contents(folder) == before
    assert told[0] == (
        f"[1/4] {A}, seed 0: finished before, accuracy 90.00% after 4.0 s of training"
    )
    assert len(told) == 4


def test_ctrl_c_leaves_the_finished_ones_and_the_interrupted_one_is_repeated(
    go: Go, folder: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(FakeTrain({(B, 0): KeyboardInterrupt()}))
    before = contents(folder / f"{A}-seed0")
    (folder / f"{B}-seed0" / "rounds.jsonl").write_text("of the interrupted one")
    again = FakeTrain()
    runs, _ = go(again)
    assert again.trained == [(B, 0), (A, 1), (B, 1)]
    assert [(run.algorithm, run.seed) for run in runs] == [(A, 0), (B, 0), (A, 1), (B, 1)]
    assert contents(folder / f"{A}-seed0") == before
    assert not (folder / f"{B}-seed0" / "rounds.jsonl").exists()


def test_killed_run_that_wrote_no_summary_is_repeated(go: Go, folder: Path) -> None:
    (folder / f"{A}-seed0").mkdir()
    (folder / f"{A}-seed0" / "config.toml").write_text("")
    (folder / f"{B}-seed0").mkdir()
    (folder / f"{B}-seed0" / "summary.json").write_text('{"interrupted": fal')
    train = FakeTrain()
    go(train, seeds=(0,))
    assert train.trained == [(A, 0), (B, 0)]


def test_further_algorithms_and_seeds_come_into_the_same_folder(go: Go, folder: Path) -> None:
    go(FakeTrain(), (A,), (0,))
    check_folder(folder, CONFIG)
    more = FakeTrain()
    runs, _ = go(more, (B, A), (0, 1))
    assert more.trained == [(B, 0), (B, 1), (A, 1)]
    assert len(runs) == 4


# --- what fails


def test_failed_run_is_told_and_left_out_and_the_others_go_on(go: Go, told: list[str]) -> None:
    train = FakeTrain({(A, 0): AggregationError("round 3: no worker succeeded")})
    runs, failures = go(train)
    assert train.trained == [(A, 0), (B, 0), (A, 1), (B, 1)]
    assert [(run.algorithm, run.seed) for run in runs] == [(B, 0), (A, 1), (B, 1)]
    (failure,) = failures
    assert failure.startswith(f"{A}, seed 0 failed: ")
    assert "round 3: no worker succeeded" in failure
    assert told[1].startswith(f"[1/4] {A}, seed 0: failed: ")


def test_failed_run_is_tried_again_by_the_next_command(go: Go) -> None:
    go(FakeTrain({(A, 0): AggregationError("no")}))
    again = FakeTrain()
    _, failures = go(again)
    assert again.trained == [(A, 0)]
    assert failures == []


@pytest.mark.parametrize("error", [UsageError("no memory"), ZeroDivisionError()])
def test_what_no_run_survives_ends_all(go: Go, error: Exception) -> None:
    train = FakeTrain({(B, 0): error})
    with pytest.raises(type(error)):
        go(train)
    assert train.trained == [(A, 0), (B, 0)]


# --- the folder


def test_new_folder_holds_the_settings_in_common(folder: Path) -> None:
    settings = tomllib.loads((folder / SETTINGS).read_text())
    own = CONFIG.to_run_config()
    assert settings == {key: own[key] for key in settings}
    assert own.keys() - settings.keys() == {"algorithm", "seed", "out", "name", "profile"}


@pytest.mark.parametrize(
    "same", [{"algorithm": B}, {"seed": 3}, {"name": "other"}, {"profile": "x.json"}]
)
def test_folder_goes_on_with_what_varies(folder: Path, same: dict[str, Any]) -> None:
    before = contents(folder)
    config = RunConfig(epochs=2, batch_size=8, **same)
    check_folder(folder, config)
    open_folder(folder, config)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epochs": 3}, "epochs = 2, not 3"),
        ({"batch_size": 16}, "batch-size = 8, not 16"),
        ({"workers": "2x cpu"}, "workers = 'auto', not '2x cpu'"),
        ({"learning_rate": 0.5}, "learning-rate = 0.05, not 0.5"),
        ({"seconds": 9}, "seconds = 0.0, not 9.0"),
        ({"clock": "device"}, "clock = 'wall', not 'device'"),
        ({"validation_share": 0.1}, "validation-share = 0.0, not 0.1"),
    ],
)
def test_folder_with_other_settings_is_refused_and_not_touched(
    folder: Path, changes: dict[str, Any], told: str
) -> None:
    before = contents(folder)
    with pytest.raises(UsageError) as error:
        check_folder(folder, RunConfig(**{"epochs": 2, "batch_size": 8, **changes}))
    line = str(error.value)
    assert line == f"{folder} holds a comparison with {told}; name another folder with --out"
    assert contents(folder) == before


def test_folder_of_an_older_version_names_what_it_does_not_have(folder: Path) -> None:
    lines = (folder / SETTINGS).read_text().splitlines()
    (folder / SETTINGS).write_text("\n".join(x for x in lines if not x.startswith("rebalance")))
    with pytest.raises(UsageError, match="with rebalance = None, not False"):
        check_folder(folder, CONFIG)


@pytest.mark.parametrize("text", ["epochs = ", "x = " + "[" * 5_000, b"\xff\xfe"])
def test_folder_with_settings_that_cannot_be_read_is_refused(
    folder: Path, text: str | bytes
) -> None:
    (folder / SETTINGS).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match="cannot be read") as error:
        check_folder(folder, CONFIG)
    assert "\n" not in str(error.value)


def test_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    for name in ("file", "folder"):
        path = tmp_path / name
        if name == "file":
            path.write_text("x")
        else:
            path.mkdir()
            (path / "thesis.tex").write_text("x")
        with pytest.raises(UsageError, match=f"{name} exists and holds no comparison"):
            check_folder(path, CONFIG)


def test_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("x")
    for attempt in (check_folder, open_folder):
        with pytest.raises(UsageError, match="cannot be made"):
            attempt(tmp_path / "file" / "below", CONFIG)


def test_folder_that_is_empty_or_not_there_is_accepted_and_not_made(tmp_path: Path) -> None:
    check_folder(tmp_path, CONFIG)
    check_folder(tmp_path / "deep" / "down", CONFIG)
    assert list(tmp_path.iterdir()) == []


def _hold(folder: Path, held: Any, done: Any) -> None:
    with alone_in(folder):
        held.set()
        done.wait(60)


@pytest.mark.processes
def test_folder_takes_one_command_at_a_time(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(folder, held, done))
    other.start()
    try:
        assert held.wait(60)
        with (
            pytest.raises(UsageError, match="another blsgd compare is at work in"),
            alone_in(folder),
        ):
            pass
    finally:
        done.set()
        other.join()
    with alone_in(folder):
        pass


def test_folder_is_free_again_after_an_error(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), alone_in(folder):
            raise KeyboardInterrupt


# --- what is compared


def test_summarise_writes_the_three_files(go: Go, folder: Path) -> None:
    runs, _ = go(FakeTrain())
    comparison = summarise(runs, folder, A, None)
    assert comparison.reference == A
    assert comparison.target == 0.9  # the highest that every run reached
    assert {f"comparison.{kind}" for kind in ("md", "csv", "png")} <= set(contents(folder))
    summarise(runs, folder, B, 0.5)  # once more, with another reference
    assert B in (folder / "comparison.md").read_text()


def test_table_names_the_runs_that_failed(go: Go, folder: Path) -> None:
    runs, _ = go(FakeTrain())
    comparison = summarise(runs, folder, A, None, ["dlb, seed 7 failed: round 3: nobody"])
    assert comparison.failed == ("dlb, seed 7 failed: round 3: nobody",)
    text = (folder / "comparison.md").read_text()
    assert "In no figure: dlb, seed 7 failed: round 3: nobody.\n" in text
    summarise(runs, folder, A, None)
    assert "In no figure" not in (folder / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("part", "value", "key"),
    [
        ("steps", "same", "steps"),
        ("sampler", "uniform", "sampler"),
        ("weights", "equal", "weights"),
        ("train_on", "fast", "train-on"),
        ("momentum_buffers", "reset", "momentum-buffers"),
    ],
)
def test_part_that_makes_algorithms_alike_is_named(part: str, value: str, key: str) -> None:
    config = RunConfig(**{part: value})
    assert overridden(config) == f"{key} = {value!r} overrides that of every algorithm"
    assert overridden(RunConfig()) == ""


# --- what is typed


@pytest.mark.parametrize(
    ("text", "epochs", "seconds"),
    [
        ("10epochs", 10, 0),
        ("1 epoch", 1, 0),
        ("3.0epochs", 3, 0),
        ("60s", None, 60),
        ("0.5s", None, 0.5),
        (" 90 seconds ", None, 90),
        ("5min", None, 300),
        ("2minutes", None, 120),
        ("1.5h", None, 5400),
        ("2 hours", None, 7200),
    ],
)
def test_budget(text: str, epochs: int | None, seconds: float) -> None:
    found = with_budget(RunConfig(epochs=15, seconds=7.0, seed=3), text)
    assert found.seconds == seconds
    if epochs is None:
        assert found.epochs >= 100_000  # as good as none
    else:
        assert found.epochs == epochs
    assert found.seed == 3


@pytest.mark.parametrize(
    "text",
    [
        *("", "10", "epochs", "s", "ten epochs", "-5s", "0s", "0.0min", "0epochs", "1e3s", "5 m"),
        *("nans", "infs", "60s 10epochs", "60sec", "1.5epochs", "5,5s", "9" * 400 + "s"),
    ],
)
def test_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        with_budget(CONFIG, text)
    assert "\n" not in str(error.value)


def test_algorithms() -> None:
    assert read_algorithms("dlb, sync-sgd,") == ["dlb", "sync-sgd"]
    assert read_algorithms(" all ") == list(ALGORITHMS)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("biased", "--algorithms biased: not known; "),
        ("sync-sgd,synk-sgd", "did you mean sync-sgd"),
        ("sync-sgd,dlb,sync-sgd", "--algorithms: sync-sgd comes twice"),
        ("all,dlb", "--algorithms all: not known"),
        ("", "--algorithms names nothing"),
        (" , ", "--algorithms names nothing"),
    ],
)
def test_algorithms_that_are_none_are_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        read_algorithms(text)
    assert told in str(error.value)


def test_seeds() -> None:
    assert read_seeds("3, 0 ,11,") == [3, 0, 11]
    assert read_seeds("007") == [7]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0,one", "'one' is not a whole number; write 0,1,2"),
        ("-1", "'-1' is not a whole number"),
        ("1.0", "'1.0' is not a whole number"),
        ("0-2", "'0-2' is not a whole number"),
        ("²", "'²' is not a whole number"),
        ("0,1,0", "--seeds: 0 comes twice"),
        ("0,00", "--seeds: 0 comes twice"),  # the same run in the same folder
        ("", "--seeds names nothing"),
    ],
)
def test_seeds_that_are_none_are_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        read_seeds(text)
    assert told in str(error.value)


def test_fake_run_is_one_that_the_real_reader_takes(tmp_path: Path) -> None:
    write_run(RunConfig(out=str(tmp_path / "run"), algorithm=A, seed=4))
    runs = [ComparedRun(A, 4, tmp_path / "run")]
    assert summarise(runs, tmp_path, A, None).algorithms[0].seeds == (4,)
