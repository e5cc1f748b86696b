"""Reading what runs left; means, paired differences and times to a target, worked by hand."""

import json
from pathlib import Path

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.comparison import (
    AlgorithmFigures,
    Comparison,
    compare_runs,
    paired_difference,
    reached_at,
    read_run,
)

from .fake_training import write_run
from .made_runs import made_run

# --- what a run left


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(
        RunConfig(algorithm="dlb", seed=2, batch_size=8, out=str(tmp_path / "run")), loss=None
    )


def test_read_run(folder: Path) -> None:
    run = read_run(folder)
    assert run is not None
    assert run.items() >= json.loads((folder / "summary.json").read_text()).items()
    assert (run["algorithm"], run["seed"], run["accuracy"], run["loss"]) == ("dlb", 2, 0.875, None)
    assert run["settings"]["batch-size"] == 8
    columns = ("epoch", "training_seconds", "device_seconds", "accuracy", "samples")
    rows = [tuple(row[column] for column in columns) for row in run["rows"]]
    assert rows == [(1, 2.0, None, None, 128), (2, 4.0, 1.5, 0.875, 256)]


def test_arm_is_what_the_folder_is_called_after(folder: Path) -> None:
    named = folder.rename(folder.with_name("twice-the-epochs-seed12"))
    other = write_run(RunConfig(algorithm="dlb", out=str(folder)))
    arms = [run["arm"] for run in map(read_run, (named, other)) if run]
    assert arms == ["twice-the-epochs", "dlb"]


@pytest.mark.parametrize("text", [None, "{", "[1]", "{}", '{"interrupted": true}'])
def test_run_that_did_not_go_to_its_end_is_none(folder: Path, text: str | None) -> None:
    (folder / "summary.json").unlink()
    if text is not None:
        (folder / "summary.json").write_text(text)
    assert read_run(folder) is None
    assert read_run(folder / "nowhere") is None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("summary.json", '{"interrupted": false}', "has no accuracy, algorithm"),
        ("config.toml", None, "No such file"),
        ("config.toml", "= 1", "cannot be read"),
        ("epochs.csv", "epoch,accuracy\n1,0.5\n", "training_seconds"),
        ("epochs.csv", "epoch,training_seconds\nx,1\n", "cannot be read"),
    ],
)
def test_finished_run_that_is_damaged_is_refused_in_one_line(
    folder: Path, file: str, text: str | None, words: str
) -> None:
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(UsageError, match=words) as refused:
        read_run(folder)
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


# --- figures over seeds


def of(comparison: Comparison, algorithm: str) -> AlgorithmFigures:
    return next(one for one in comparison.algorithms if one.algorithm == algorithm)


def test_means_over_seeds() -> None:
    runs = [
        made_run("a", 0, (0.5, 0.90), 2.0, 1.0, fast_waiting_share=0.5),
        made_run("a", 1, (0.5, 0.92), 3.0, 2.0, fast_waiting_share=None),
        made_run("a", 2, (0.5, 0.94), 4.0, 3.0, fast_waiting_share=0.25),
    ]
    one = compare_runs(runs, "a").algorithms[0]
    assert one.accuracies == [0.9, 0.92, 0.94]
    assert one.accuracy == pytest.approx(0.92)
    assert one.accuracy_deviation == pytest.approx(0.02)  # sqrt((0.02^2 + 0 + 0.02^2) / 2)
    assert (one.mean("training_seconds"), one.mean("device_seconds")) == (6.0, 4.0)
    assert one.mean("fast_waiting_share") == 0.375  # of the two that have it
    assert one.difference is None


def test_best_is_first_and_ties_keep_their_order() -> None:
    runs = [made_run(name, 0, (x,)) for name, x in (("c", 0.8), ("a", 0.9), ("b", 0.8))]
    runs.append(made_run("never", 0, (None,)))
    comparison = compare_runs(runs, "c")
    assert [one.algorithm for one in comparison.algorithms] == ["a", "c", "b", "never"]
    assert [one.accuracy_deviation for one in comparison.algorithms] == [None] * 4  # one seed
    assert of(comparison, "never").accuracies == []
    assert of(comparison, "never").difference is None


def test_differences_are_taken_by_seed() -> None:
    # Seeds 1 and 2 are common: 0.86 - 0.80 = 0.06 and 0.90 - 0.80 = 0.10, in another order.
    runs = [
        *(made_run("a", seed, (x,)) for seed, x in ((0, 0.1), (1, 0.80), (2, 0.80))),
        *(made_run("b", seed, (x,)) for seed, x in ((2, 0.90), (1, 0.86), (7, 0.99))),
    ]
    difference = of(compare_runs(runs, "a"), "b").difference
    assert difference is not None
    assert difference.pairs == 2
    assert difference.mean == pytest.approx(0.08)
    # Standard deviation 0.02 sqrt(2): the half width is 12.706 x 0.02.
    assert difference.half_width == pytest.approx(0.25412, abs=1e-5)


def test_time_to_target_is_that_of_the_first_evaluated_epoch_that_reached_it() -> None:
    runs = [
        made_run("a", 0, (0.5, None, 0.81, 0.9), 2.0, 1.0),  # epoch 3: 6 s and 3 s
        made_run("a", 1, (0.8, 0.7, 0.7, 0.7), 2.0),  # epoch 1, though lower later: 2 s
        made_run("a", 2, (0.5, 0.6, 0.7, 0.79), 2.0, 1.0),
    ]
    comparison = compare_runs(runs, "a", target=0.8)
    assert comparison.target_given
    reached = comparison.algorithms[0].reached
    assert [(row["training_seconds"], row["device_seconds"]) for row in reached] == [
        *((6.0, 3.0), (2.0, None)),
    ]
    assert compare_runs(runs, "a", target=0.99).algorithms[0].reached == []


def test_target_by_default_is_what_every_run_reached() -> None:
    runs = [made_run("a", 0, (0.5, 0.97894)), made_run("b", 0, (0.98333, 0.9))]
    comparison = compare_runs(runs, "a")
    assert (comparison.target, comparison.target_given) == (0.978, False)
    assert all(len(one.reached) == 1 for one in comparison.algorithms)
    never = compare_runs([*runs, made_run("c", 0, (None,))], "a")
    assert never.target is None
    assert all(one.reached == [] for one in never.algorithms)


@pytest.mark.parametrize("thousandths", [290, 570, 970, 983, 1000])
def test_target_is_not_below_a_whole_tenth_of_a_point(thousandths: int) -> None:
    """0.29 / 0.001 is 290.00000000000006 or a little less, as rounding has it."""
    run = made_run("a", 0, (thousandths / 1000,))
    target = compare_runs([run], "a").target
    assert target == thousandths / 1000
    assert reached_at(run, target) is run["rows"][0]


# --- paired differences; Student's 97.5 % quantiles are 12.706 for 2 pairs and 4.303 for 3


@pytest.mark.parametrize(
    ("differences", "mean", "half_width", "words"),
    [
        ([1.0, 3.0], 2.0, 12.706, "no difference shown"),  # 12.706 x sqrt(2) / sqrt(2)
        ([3.0, 4.0, 5.0], 4.0, 2.4841, "better"),  # 4.303 / sqrt(3)
        ([-3.0, -4.0, -5.0], -4.0, 2.4841, "worse"),
        ([0.5], 0.5, None, "no difference shown (needs two seeds)"),
        ([0.25, 0.25 + 1e-15, 0.25], pytest.approx(0.25), None, "no difference shown"),
        ([0.0, 0.0], 0.0, None, "no difference shown"),
    ],
)
def test_paired_difference(
    differences: list[float], mean: float, half_width: float | None, words: str
) -> None:
    found = paired_difference(differences)
    assert found is not None
    assert (found.mean, found.pairs, found.in_words) == (mean, len(differences), words)
    assert found.half_width == (None if half_width is None else pytest.approx(half_width, abs=3e-4))
    assert found.shown == (words in ("better", "worse"))
