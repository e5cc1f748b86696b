"""A comparison as text: its tables, its conditions, the files it leaves."""

import io
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from flower_blsgd.experiments.comparison import Comparison, compare_runs
from flower_blsgd.experiments.comparison_report import (
    conditions,
    csv_text,
    headline,
    markdown,
    terminal_table,
    write_comparison,
)
from flower_blsgd.strategy.budget import NO_LIMIT

from .made_runs import ALGORITHMS, made_run, several, workers

NAMES = ("biased-local-sgd", "sync-sgd")
FILES = ["comparison.csv", "comparison.md", "comparison.png"]


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --- tables


def test_markdown() -> None:
    # Differences of b to a: +0.02, +0.03, +0.04; 0.03 -+ 4.303 x 0.01 / sqrt(3) = 0.0248.
    of_a = [made_run("a", seed, (0.5, 0.90), 2.0) for seed in range(3)]
    of_b = [made_run("b", seed, (0.5, 0.92 + 0.01 * seed), 50.0) for seed in range(3)]
    failed = ["c, seed 7 failed: round 3: nobody"]
    text = markdown(compare_runs([*of_a, *of_b], "a", failed=failed))
    header, _, *rows = rows_of(text)
    assert header == [
        *("algorithm", "n", "accuracy (%)", "difference (points)", "training (s)"),
        *("to target (s)", "fast wait", "slow wait"),
    ]
    assert rows == [
        ["b", "3", "93.00 ± 1.00", "+3.00 ± 2.48", "100", "100", "25%", "12%"],
        ["a", "3", "90.00 ± 0.00", "reference", "4.00", "4.00", "25%", "12%"],
    ]
    assert text.startswith("# digits, 2 epochs, 3 seeds\n")
    assert "Compared with a, better: b." in text
    assert "Not included: c, seed 7 failed: round 3: nobody.\n" in text
    assert "target accuracy 90 % (the highest that every run reached)" in text
    assert "![the table as a picture](comparison.png)" in text
    assert "/tmp" not in text


def test_markdown_of_a_metric_whose_smaller_values_are_better() -> None:
    # Differences of b to a: -0.2, -0.3, -0.4; 0.3 -+ 4.303 x 0.1 / sqrt(3) = 0.2484.
    named = {"metric_name": "rmse", "metric_mode": "min"}
    of_a = [made_run("a", seed, (4.0, 2.0), 2.0, **named) for seed in range(3)]
    of_b = [made_run("b", seed, (1.9, 1.8 - 0.1 * seed), 50.0, **named) for seed in range(3)]
    comparison = compare_runs([*of_a, *of_b], "a")
    text = markdown(comparison)
    header, _, *rows = rows_of(text)
    assert header[2:4] == ["rmse (lower is better)", "difference"]
    assert rows == [
        ["b", "3", "1.700 ± 0.100", "-0.300 ± 0.248", "100", "50.0", "25%", "12%"],
        ["a", "3", "2.000 ± 0.000", "reference", "4.00", "4.00", "25%", "12%"],
    ]
    assert "Compared with a, better: b." in text
    assert "target rmse 2 (the lowest that every run reached)" in text
    assert "- rmse measured on: the whole test set\n" in text
    assert "- **rmse**: rmse of the final model" in text
    assert "accuracy" not in text
    head, line, *_ = csv_text(comparison).splitlines()
    assert head.startswith("algorithm,seed,rmse,best_rmse,loss,")
    assert ",target_rmse," in head
    assert line.startswith("b,0,1.8,1.8,0.25,100,,2,50,")


def test_markdown_says_so_where_no_difference_is_shown() -> None:
    runs = [made_run(name, seed, (x,)) for name, seed, x in
            (("a", 0, 0.8), ("a", 1, 0.9), ("b", 0, 0.9), ("b", 1, 0.8))]  # fmt: skip
    text = markdown(compare_runs(runs, "a", 0.85))
    assert "| +0.00 ± 127.06 |" in text  # mean 0, deviation 0.1 sqrt(2): 12.706 x 0.1
    assert "no difference shown: b." in text
    assert "target accuracy 85 % (given)" in text
    assert "2.00 (1/2)" in text


def test_markdown_with_simulated_devices() -> None:
    runs = [made_run("a", 0, (0.5, 0.9), 2.0, 0.5), made_run("b", 0, (0.5, 0.9), 2.0)]
    header, _, first, second = rows_of(markdown(compare_runs(runs, "a")))
    assert (header[5], header[7]) == ("simulated (s)", "to target simulated")
    assert (first[5], second[5]) == ("1.00", "-")
    assert (first[7], second[7]) == ("1.00", "-")


def test_one_algorithm_that_was_never_evaluated() -> None:
    text = markdown(compare_runs([made_run("a", 0, (None, None), fast_waiting_share=None)], "a"))
    assert "Only a has runs" in text
    assert "no target accuracy" in text
    row = ["a", "0", "not measured", "reference", "4.00", "never", "-", "12%"]
    assert rows_of(text)[2] == row


def test_csv_has_a_line_per_run_with_units_in_its_names() -> None:
    runs = [
        made_run("a", 1, (0.5, 0.9), 2.0, 0.5),
        made_run("a", 0, (0.5, 0.8), 2.0),
        made_run("b", 0, (0.95, None), 3.0, failures=[{}, {}]),
    ]
    assert csv_text(compare_runs(runs, "a", 0.85)).splitlines() == [
        "algorithm,seed,accuracy_percent,best_accuracy_percent,loss,training_seconds,"
        "simulated_device_seconds,target_accuracy_percent,training_seconds_to_target,"
        "simulated_device_seconds_to_target,fast_waiting_percent,slow_waiting_percent,samples,"
        "samples_given_up,rounds,epochs,failures,reference",
        "a,0,80,80,0.25,4,,85,,,25,12.5,1000,0,10,2,0,a",
        "a,1,90,90,0.25,4,1,85,4,1,25,12.5,1000,0,10,2,0,a",
        "b,0,,95,0.25,6,,85,3,,25,12.5,1000,0,10,2,2,a",
    ]


def terminal_lines(comparison: Comparison) -> list[str]:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(terminal_table(comparison))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    return text.splitlines()


def test_terminal_table_fits_into_100_columns() -> None:
    runs = several(ALGORITHMS, device_seconds_per_epoch=100.0)
    lines = terminal_lines(compare_runs(runs, "fast-only-local-sgd", 0.985))
    for name in ALGORITHMS:
        first, *_ = textwrap.wrap(name, 20)  # a longer one takes two lines
        (row,) = [line.split() for line in lines if line.split()[:1] == [first]]
        assert row[-2:] == ["25%", "12%"]  # whole, in one line
    text = "\n".join(lines)
    assert text.count(" released ") == 2
    # All differences of these runs are equal, which gives no interval.
    assert "no difference shown" in text
    named: dict[str, Any] = {"metric_name": "perplexity", "metric_mode": "min"}
    named["settings"] = {"epochs": 2, "validation-share": 0.1}
    runs = several(["unbiased-local-sgd-released", "b"], device_seconds_per_epoch=100.0, **named)
    text = "\n".join(terminal_lines(compare_runs(runs, "b")))
    assert "Perplexity: mean ± standard deviation" in text


# --- conditions


def test_conditions_in_common() -> None:
    runs = [made_run(name, seed) for name in ("a", "b") for seed in (0, 1)]
    assert conditions(compare_runs(runs, "a")) == {
        "settings that differ from the defaults": "epochs = 2, batch-size = 8",
        "workers": "1 fast (cpu:0), 32 local steps + 1 slow (cpu:1), 8 local steps",
        "seeds": "0, 1",
        "accuracy measured on": "the whole test set",
        "samples trained on": "1000",
        "versions": "python 3.11.7 / torch 2.13.0",
        "failed orders of workers": "none",
    }
    assert headline(runs) == "digits, 2 epochs, 2 seeds"


def test_conditions_that_differ_name_the_algorithms() -> None:
    newer = {"python": "3.12.1", "torch": "2.13.0"}
    runs = [
        made_run("a", 0, failures=[{}, {}]),
        made_run("a", 1, versions=newer),
        made_run("b", 0, workers=workers(1), samples=1200),
    ]
    found = conditions(compare_runs(runs, "a"))
    assert found["workers"] == (
        "1 fast (cpu:0), 32 local steps + 1 slow (cpu:1), 8 local steps (a); "
        "1 fast (cpu:0), 1 local steps (b)"
    )
    assert found["samples trained on"] == "1000 (a); 1200 (b)"
    assert found["seeds"] == "0, 1 (a); 0 (b)"
    assert found["failed orders of workers"] == "2 of a seed 0"
    assert found["versions"].startswith("python 3.11.7 / torch 2.13.0, python 3.12.1 / torch")


def test_arms_that_differ_in_more_than_the_algorithm() -> None:
    longer = {**made_run()["settings"], "epochs": 4, "train-on": "fast"}
    runs = [made_run("a", 0), made_run("a", 0, (0.5, 0.8), arm="a-longer", settings=longer)]
    comparison = compare_runs(runs, "a")
    assert [one.algorithm for one in comparison.algorithms] == ["a", "a-longer"]
    found = conditions(comparison)
    assert found["settings that differ from the defaults"] == "batch-size = 8"
    assert found["epochs"] == "2 (a); 4 (a-longer)"
    assert headline(runs) == "digits, 2 to 4 epochs, seed 0"
    assert "a-longer,0,80," in csv_text(comparison)


def test_accuracy_on_held_out_training_data_is_called_so() -> None:
    runs = [made_run("a", 0, settings={"epochs": 2, "validation-share": 0.5})]
    assert "| validation accuracy (%) |" in markdown(compare_runs(runs, "a"))


def test_budget_in_seconds_and_validation() -> None:
    settings = {"epochs": 2, "seconds": 60.0, "validation-share": 0.1, "replicas": "threads"}
    run = made_run("a", 3, settings=settings, clock="device")
    assert headline([run]) == "digits, 60 s on simulated devices, seed 3"
    in_rounds = made_run("a", 3, settings={"epochs": NO_LIMIT, "rounds": 5})
    assert headline([in_rounds]) == "digits, 5 rounds, seed 3"
    found = conditions(compare_runs([run], "a"))
    assert found["accuracy measured on"].startswith("10% of the training data")
    assert "seconds = 60.0" in found["settings that differ from the defaults"]
    assert (
        "replicas" not in found["settings that differ from the defaults"]
    )  # of an earlier version


# --- files


def test_files_of_a_comparison_are_replaced_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "deeper" / "compared"
    comparison = compare_runs(several(NAMES), "sync-sgd", 0.95)
    write_comparison(comparison, folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert len((folder / "comparison.csv").read_text().splitlines()) == 7
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    write_comparison(compare_runs(several(NAMES[:1]), NAMES[0]), folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert "sync-sgd" not in (folder / "comparison.md").read_text(encoding="utf-8")
