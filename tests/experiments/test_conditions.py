"""Under which conditions runs were made."""

from flower_blsgd.experiments.conditions import conditions, headline
from flower_blsgd.experiments.finished_run import FinishedWorker

from .made_runs import made_run

SETTINGS = {"epochs": 2, "batch-size": 16, "model": "", "momentum": 0.9}


def test_what_all_have_in_common_is_told_once() -> None:
    runs = [made_run(name, seed) for name in ("a", "b") for seed in (0, 1)]
    told = conditions(runs)
    assert told == {
        "task": "digits",
        "model": "the task's own",
        "workers": "1 fast (cpu:0) + 1 slow (cpu:1)",
        "local steps of a round": "32 fast, 8 slow",
        "batch size": "16",
        "budget": "2 epochs",
        "seeds": "0, 1",
        "accuracy measured on": "the whole test set",
        "samples trained on": "1,000",
        "clock": "wall (waiting as measured)",
        "versions": "python 3.11.7, torch 2.13.0",
    }
    assert headline(runs) == "digits, 2 epochs, 2 seeds"


def test_what_differs_is_told_with_those_that_have_it() -> None:
    one_step = (FinishedWorker("cpu:0", "fast", 1), FinishedWorker("cpu:1", "slow", 1))
    runs = [
        made_run("a", 0, failures=2),
        made_run("a", 1),
        made_run("b", 0, workers=one_step, samples=1200),
    ]
    told = conditions(runs)
    assert told["local steps of a round"] == "32 fast, 8 slow (a); 1 fast, 1 slow (b)"
    assert told["samples trained on"] == "1,000 (a); 1,200 (b)"
    assert told["seeds"] == "0, 1 (a); 0 (b)"
    assert told["answers of workers that did not count"] == "2 of a seed 0"


def test_a_setting_that_differs_is_never_hidden() -> None:
    runs = [
        made_run("a", 0, settings=SETTINGS),
        made_run("a", 1, settings={**SETTINGS, "momentum": 0.5, "profile": "/home/x"}),
    ]
    told = conditions(runs)
    assert told["momentum"] == "0.9 (a seed 0); 0.5 (a seed 1)"
    assert "/home" not in str(told)


def test_budget_in_seconds_and_validation() -> None:
    settings = {**SETTINGS, "seconds": 60.0, "validation-share": 0.1}
    run = made_run("a", 3, settings=settings, clock="device")
    assert headline([run]) == "digits, 60 s on simulated devices, seed 3"
    told = conditions([run])
    assert told["budget"] == "60 s on simulated devices (2 epochs at most)"
    assert told["accuracy measured on"].startswith("10% of the training data")
    assert "computed" in told["clock"]
