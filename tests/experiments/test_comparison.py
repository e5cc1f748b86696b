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
    metric_of,
    paired_difference,
    reached_at,
    read_run,
)
from flower_blsgd.results.metric import Metric
from flower_blsgd.tasks import register_task

from ..small_training import points_task
from ..test_run import config_of
from ..test_run import run as run_of
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
    assert (run["value"], run["best_value"]) == (87.5, 87.5)  # percent
    assert run["settings"]["batch-size"] == 8
    columns = ("epoch", "training_seconds", "device_seconds", "value", "samples")
    rows = [tuple(row[column] for column in columns) for row in run["rows"]]
    assert rows == [(1, 2.0, None, None, 128), (2, 4.0, 1.5, 87.5, 256)]


def test_read_run_with_another_metric(folder: Path) -> None:
    named = {"metric_name": "rmse", "metric_mode": "min"}
    other = read_run(write_run(RunConfig(out=str(folder.with_name("other"))), 0.25, **named))
    assert other is not None
    assert (other["value"], other["best_value"], other["accuracy"]) == (0.25, 0.25, None)
    assert [row["value"] for row in other["rows"]] == [None, 0.25]
    assert metric_of(other) == Metric("rmse", "min", "test")


def test_read_run_of_a_task_with_its_own_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = points_task(
        120,
        40,
        metric=lambda outputs, targets: {"error": (outputs.argmax(1) != targets).float()},
        metric_name="error",
        metric_mode="min",
        metric_from_sums=lambda sums, num_samples: (sums["error"] / num_samples) ** 0.5,
    )
    summary = run_of(config_of(task=register_task(task), batch_size=10, out="run")).summary
    run = read_run(tmp_path / "run")
    assert run is not None
    assert metric_of(run) == Metric("error", "min")
    assert run["value"] == summary["metric"] == pytest.approx(run["rows"][-1]["value"], rel=1e-5)
    assert run["best_value"] == summary["best_metric"] == min(row["value"] for row in run["rows"])
    assert summary["accuracy"] is None


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
    assert one.values == [90, 92, 94]
    assert one.value == pytest.approx(92)
    assert one.deviation == pytest.approx(2)  # sqrt((2^2 + 0 + 2^2) / 2)
    assert (one.mean("training_seconds"), one.mean("device_seconds")) == (6.0, 4.0)
    assert one.mean("fast_waiting_share") == 0.375  # of the two that have it
    assert one.difference is None


def test_best_is_first_and_ties_keep_their_order() -> None:
    runs = [made_run(name, 0, (x,)) for name, x in (("c", 0.8), ("a", 0.9), ("b", 0.8))]
    runs.append(made_run("never", 0, (None,)))
    comparison = compare_runs(runs, "c")
    assert [one.algorithm for one in comparison.algorithms] == ["a", "c", "b", "never"]
    assert [one.deviation for one in comparison.algorithms] == [None] * 4  # one seed
    assert of(comparison, "never").values == []
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
    assert difference.mean == pytest.approx(8)
    # Standard deviation 2 sqrt(2): the half width is 12.706 x 2.
    assert difference.half_width == pytest.approx(25.412, abs=1e-3)


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
    assert (comparison.target, comparison.target_given) == (97.8, False)
    assert all(len(one.reached) == 1 for one in comparison.algorithms)
    never = compare_runs([*runs, made_run("c", 0, (None,))], "a")
    assert never.target is None
    assert all(one.reached == [] for one in never.algorithms)


@pytest.mark.parametrize("thousandths", [290, 570, 970, 983, 1000])
def test_target_is_not_below_a_whole_tenth_of_a_point(thousandths: int) -> None:
    """29 % may be 28.999999999999996 %, as rounding has it."""
    run = made_run("a", 0, (thousandths / 1000,))
    target = compare_runs([run], "a").target
    assert target == thousandths / 10
    assert reached_at(run, target) is run["rows"][0]


@pytest.mark.parametrize(
    ("mode", "bests", "target"),
    [
        # The worse one, rounded to 3 digits of the median: 0.0662, 23400, 2, 0.756, 2.12.
        ("min", (0.0512, 0.08121), 0.0813),
        ("min", (23450.0, 23350.0), 23500.0),
        ("min", (0.0, -2.0), 0.0),
        ("max", (0.6127, 0.9), 0.612),
        ("max", (-1.2341, 3.0), -1.24),
    ],
)
def test_target_in_another_metric_is_rounded_to_the_worse_side(
    mode: str, bests: tuple[float, float], target: float
) -> None:
    runs = [
        made_run(name, 0, (best,), metric_name="x", metric_mode=mode)
        for name, best in zip("ab", bests, strict=True)
    ]
    comparison = compare_runs(runs, "a")
    assert comparison.target == pytest.approx(target, rel=1e-12)
    assert all(len(one.reached) == 1 for one in comparison.algorithms)


def test_smaller_is_better_where_the_metric_says_so() -> None:
    """Of rmse 2.0 and 1.6, the latter is the best, and 2.0 is reached from above."""
    named = {"metric_name": "rmse", "metric_mode": "min"}
    runs = [
        *(made_run("a", seed, (3.0, None, 2.0, 2.0), **named) for seed in range(3)),
        *(made_run("b", seed, (2.0, 2.5, 1.7 - 0.1 * seed), **named) for seed in range(3)),
        *(made_run("c", seed, (3.0, 2.5 + 0.1 * seed), **named) for seed in range(3)),
        made_run("never", 0, (None,), **named),
    ]
    comparison = compare_runs(runs, "a", target=2.0)
    assert [one.algorithm for one in comparison.algorithms] == ["b", "a", "c", "never"]
    seconds = {
        one.algorithm: [row["training_seconds"] for row in one.reached]
        for one in comparison.algorithms
    }
    assert seconds == {"a": [6.0] * 3, "b": [2.0] * 3, "c": [], "never": []}
    better, worse = (of(comparison, name).difference for name in ("b", "c"))
    assert better is not None
    assert worse is not None
    # -0.3, -0.4, -0.5, and 0.5, 0.6, 0.7; 4.303 x 0.1 / sqrt(3) = 0.2484
    assert (better.text, better.in_words) == ("-0.400 ± 0.248", "better")
    assert (worse.text, worse.in_words) == ("+0.600 ± 0.248", "worse")


def test_run_with_another_metric_than_the_reference_is_left_out() -> None:
    runs = [made_run("b"), made_run("a", 3, metric_name="rmse", metric_mode="min")]
    for reference, left_out in (
        ("a", "b, seed 0: its metric is accuracy (max), not that of a"),
        ("b", "a, seed 3: its metric is rmse (min), not that of b"),
    ):
        comparison = compare_runs(runs, reference, failed=["c"])
        assert comparison.failed == ("c", left_out)
        assert [one.algorithm for one in comparison.algorithms] == [reference]


def test_run_that_diverged_is_named() -> None:
    values = {"metric_name": "perplexity", "metric_mode": "min"}
    runs = [made_run("a", 0, [9.0, 8.0], **values), made_run("a", 1, [9.0, None], **values)]
    comparison = compare_runs(runs, "a")
    assert comparison.failed == ("a, seed 1: its final perplexity is missing or not a number",)
    assert comparison.algorithms[0].values == [8.0]


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


def test_equal_differences_are_found_at_the_size_of_the_values() -> None:
    """Differences of 1e-13 count if the values are as small, and are rounding if they are not."""
    widths = []
    for size in (1e-12, 1.0):
        finals = {"a": (size, size), "b": (size + 3e-13, size + 2e-13)}
        runs = [
            made_run(arm, seed, (value,), metric_name="x")
            for arm, values in finals.items()
            for seed, value in enumerate(values)
        ]
        difference = of(compare_runs(runs, "a"), "b").difference
        assert difference is not None
        widths.append(difference.half_width)
    assert widths == [pytest.approx(12.706e-13 / 2, rel=1e-3), None]  # sd / sqrt(2) is 0.5e-13


def test_figures_have_four_digits_of_the_usual_value() -> None:
    for finals, texts in (
        ((0.1137, 0.0012, 12.0), ("0.1137 ± 0.0012", "0.0012", "12.0000")),
        ((45.674, 1.2, 3e21), ("45.67 ± 1.20", "1.20", "3e+21")),
        ((23456.7, 12.0, 98765432.0), ("23457 ± 12", "12", "98765432")),
        ((1.234e-9, 1e-10, 0.0), ("1.23e-09 ± 1e-10", "1e-10", "0")),
    ):
        runs = [made_run("a", 0, (finals[0],), metric_name="x")]
        metric = compare_runs(runs, "a").metric
        found = (metric.text(*finals[:2]), *(metric.text(value) for value in finals[1:]))
        assert found == texts
