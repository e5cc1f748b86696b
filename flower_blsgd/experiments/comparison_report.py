"""Write a comparison: a table to read, a table to compute with, a picture, and their wording."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

from rich import box
from rich.table import Table

from ..errors import UsageError
from ..results.folder import written_whole
from .comparison import (
    AlgorithmFigures,
    Comparison,
    TimeToTarget,
    by_algorithm,
    compare,
    reached_at,
)
from .finished_run import FinishedRun

_UNKNOWN = "-"

_HOW_TO_READ = (
    "**accuracy**: of the final model, mean ± sample standard deviation over n seeds.",
    "**difference**: to the reference, seed by seed, in points; in brackets the 95 % confidence "
    "interval of its mean (Student's t, paired). *No difference shown*: the interval contains 0, "
    "or there is none, since one pair of runs, or pairs that all differ by the same, cannot tell "
    "how much the next would. That is not a proof of equality: more seeds may show one. With "
    "many algorithms about one interval in twenty misses 0 by chance.",
    "**training**: rounds and planning as measured, without set-up and evaluation; "
    "it depends on the machine and on what else ran there.",
    "**time to target**: training seconds up to the end of the first evaluated epoch that "
    "reached it, mean over the seeds that did; in brackets how many did, if not all.",
    "**wait**: share of the round time that workers of a tier wait for the slowest one.",
)
_DEVICE_NOTE = (
    "**simulated devices, computed**: not measured, but computed from each worker's speed alone, "
    "as if each had its own device."
)

_CLOCKS = {
    "wall": "wall (waiting as measured)",
    "device": "device (waiting as on simulated devices, computed)",
}


def write_comparison(
    runs: Sequence[FinishedRun],
    folder: Path,
    reference: str,
    target: float | None = None,
    failed: Sequence[str] = (),
) -> Comparison:
    """Compare runs, and write ``comparison.md``, ``comparison.csv`` and ``comparison.png``.

    Each file is written whole or not at all; one of an earlier comparison is replaced.

    Parameters
    ----------
    runs, reference, target, failed
        See `compare`.
    folder : Path
        Made if it is not there.

    Raises
    ------
    UsageError
        If the folder cannot be written to.
    """
    from .comparison_plot import draw_comparison  # importing matplotlib takes a second

    comparison = compare(runs, reference, target, failed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(folder / "comparison.csv") as part:
            part.write_text(csv_text(comparison), encoding="utf-8", newline="\n")
        with written_whole(folder / "comparison.png") as part:
            draw_comparison(comparison, part)
        with written_whole(folder / "comparison.md") as part:
            part.write_text(markdown(comparison), encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error.strerror}") from None
    return comparison


# --- the three tables


def markdown(comparison: Comparison) -> str:
    """Return the text of ``comparison.md``."""
    devices = _any_device_seconds(comparison)
    target = "target" if comparison.target is None else f"{100 * comparison.target:.4g} %"
    header = ["algorithm", "accuracy (%)", f"difference to `{comparison.reference}` (points)"]
    header += ["training (s)", *["simulated devices, computed (s)"] * devices]
    header += [f"time to {target} (s)", *[f"time to {target} on simulated devices (s)"] * devices]
    header += ["fast wait", "slow wait"]
    table = [header, ["---"] + ["---:"] * (len(header) - 1), *_rows(comparison)]
    lines = [f"# {headline(comparison.runs)}", ""]
    lines += [*(f"| {' | '.join(cells)} |" for cells in table), "", verdict(comparison), ""]
    for line in comparison.failed:
        lines += [f"In no figure: {line}.", ""]
    lines += ["![the same as a picture](comparison.png)", "", "## Conditions", ""]
    lines += [f"- {name}: {value}" for name, value in conditions(comparison.runs).items()]
    lines += [f"- {_target_line(comparison)}", "", "## How to read", ""]
    lines += [f"- {note}" for note in (*_HOW_TO_READ, *[_DEVICE_NOTE] * devices)]
    return "\n".join([*lines, "", "`comparison.csv` has every run.", ""])


def terminal_table(comparison: Comparison) -> Table:
    """Return the table for a terminal of 100 columns."""
    table = Table(
        title=headline(comparison.runs),
        title_justify="left",
        caption=f"{verdict(comparison)}\nAccuracy: mean ± standard deviation over seeds "
        f"({_seeds(comparison.runs)}); difference: mean ± half of its 95 % interval, in "
        f"points; {_target_line(comparison)}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("algorithm", no_wrap=True)
    headers = ["accuracy\n(%)", "difference\nto reference", "training\n(s)"]
    headers += ["simulated\n(s)"] * _any_device_seconds(comparison)
    for header in [*headers, "to target\n(s)", "fast\nwait", "slow\nwait"]:
        table.add_column(header, justify="right")
    for cells in _rows(comparison, short=True):
        table.add_row(*cells)
    return table


def _rows(comparison: Comparison, short: bool = False) -> Iterator[list[str]]:
    """Yield the cells of each algorithm; `short` for a terminal, else with n, words, intervals."""
    devices = _any_device_seconds(comparison)
    for one in comparison.algorithms:
        long_devices = devices and not short
        yield [
            one.algorithm if short else f"`{one.algorithm}`",
            accuracy_text(one) + ("" if short else f" (n = {one.n})"),
            _difference_text(one, comparison.reference, short),
            _seconds(one.training_seconds),
            *[_seconds(one.device_seconds)] * devices,
            _target_text(one.to_target),
            *[_target_text(one.to_target, device=True)] * long_devices,
            _share(one.fast_waiting_share),
            _share(one.slow_waiting_share),
        ]


def csv_text(comparison: Comparison) -> str:
    """Return the text of ``comparison.csv``: one line per run; empty where not measured."""
    order = {one.algorithm: rank for rank, one in enumerate(comparison.algorithms)}
    rows = [
        _csv_row(run, comparison.target)
        for run in sorted(comparison.runs, key=lambda run: (order[run.algorithm], run.seed))
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_row(run: FinishedRun, target: float | None) -> dict[str, str]:
    reached = None if target is None else reached_at(run, target)
    figures: dict[str, str | float | None] = {
        "algorithm": run.algorithm,
        "seed": run.seed,
        "accuracy_percent": _percent(run.accuracy),
        "best_accuracy_percent": _percent(run.best_accuracy),
        "loss": run.loss,
        "training_seconds": run.training_seconds,
        "simulated_device_seconds": run.device_seconds,
        "target_accuracy_percent": _percent(target),
        "training_seconds_to_target": None if reached is None else reached.training_seconds,
        "simulated_device_seconds_to_target": None if reached is None else reached.device_seconds,
        "fast_waiting_percent": _percent(run.fast_waiting_share),
        "slow_waiting_percent": _percent(run.slow_waiting_share),
        "samples": run.samples,
        "samples_given_up": run.samples_given_up,
        "rounds": run.rounds,
        "epochs": run.epochs[-1].epoch if run.epochs else 0,
        "failures": len(run.failures),
    }
    return {
        name: "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in figures.items()
    }


def _any_device_seconds(comparison: Comparison) -> bool:
    return any(one.device_seconds is not None for one in comparison.algorithms)


# --- wording, alike in a file, in a terminal and in the picture


def accuracy_text(one: AlgorithmFigures) -> str:
    """Return ``"98.33 ± 0.28"``, in percent."""
    if one.accuracy is None:
        return "not measured"
    if one.accuracy_deviation is None:
        return f"{100 * one.accuracy:.2f}"
    return f"{100 * one.accuracy:.2f} ± {100 * one.accuracy_deviation:.2f}"


def verdict(comparison: Comparison) -> str:
    """Return a sentence on what the differences to the reference show."""
    by_words: dict[str, list[str]] = {}
    for one in comparison.algorithms:
        if one.algorithm != comparison.reference:
            found = one.difference
            words = found.in_words if found else "no seed in common that was evaluated"
            by_words.setdefault(words, []).append(one.algorithm)
    if not by_words:
        return f"Only {comparison.reference} was run: nothing to compare it with."
    parts = "; ".join(f"{words}: {', '.join(names)}" for words, names in by_words.items())
    return f"Against {comparison.reference} - {parts}."


def _difference_text(one: AlgorithmFigures, reference: str, short: bool) -> str:
    """Return ``"+0.28 (-0.30 to +0.86), no difference shown"``; if `short` ``"+0.28 ± 0.58"``."""
    if one.algorithm == reference:
        return "reference"
    if one.difference is None:
        return _UNKNOWN
    mean, interval = one.difference.mean, one.difference.interval
    text = _points(mean)
    if interval is not None and short:
        text += f" ± {100 * (interval[1] - mean):.2f}"
    elif interval is not None:
        text += f" ({_points(interval[0])} to {_points(interval[1])})"
    return text if short else f"{text}, {one.difference.in_words}"


def _target_text(found: TimeToTarget | None, device: bool = False) -> str:
    """Return ``"12.5"``, with how many of the seeds reached it where that is not all."""
    if found is None:
        return _UNKNOWN
    if not found.reached:
        return "not reached"
    text = _seconds(found.device_seconds if device else found.training_seconds)
    if found.reached == found.runs:
        return text
    return f"{text} ({found.reached}/{found.runs})"


def _target_line(comparison: Comparison) -> str:
    if comparison.target is None:
        return "no target: not every run was evaluated"
    why = "as given" if comparison.target_given else "the highest that every run reached"
    return f"target accuracy {100 * comparison.target:.4g} % ({why})"


def _seconds(seconds: float | None) -> str:
    """Return seconds with about three figures."""
    if seconds is None:
        return _UNKNOWN
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:,.{digits}f}"


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def _points(value: float) -> str:
    return f"{100 * value + 0.0:+.2f}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


# --- the conditions under which the runs were made


def headline(runs: Sequence[FinishedRun]) -> str:
    """Return task, budget and seeds: ``"digits, 15 epochs, 3 seeds"``."""
    seeds = {run.seed for run in runs}
    number = f"seed {runs[0].seed}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return f"{runs[0].task}, {_budget(runs[0])}, {number}"


def conditions(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Return the conditions by name, with the algorithms that have them where they differ.

    The runs have all settings but algorithm and seed in common. Neither paths nor host names are
    among the conditions.
    """
    settings = runs[0].settings
    share = settings.get("validation-share")
    found = {
        "task": runs[0].task,
        "model": str(settings.get("model") or "the task's own"),
        "workers": _of_each(runs, lambda its: _workers(its[0])),
        "local steps of a round": _of_each(runs, lambda its: _local_steps(its[0])),
        "batch size": str(settings.get("batch-size", "not known")),
        "budget": _budget(runs[0]),
        "seeds": _seeds(runs),
        "accuracy measured on": f"{share:.0%} of the training data, held out (not on the test set)"
        if share
        else "the whole test set",
        "samples trained on": _of_each(runs, lambda its: f"{fmean(r.samples for r in its):,.0f}"),
        "clock": _CLOCKS[runs[0].clock],
        "versions": _of_each(runs, lambda its: " / ".join(dict.fromkeys(map(_versions, its)))),
    }
    failed = [
        f"{len(run.failures)} of {run.algorithm} seed {run.seed}" for run in runs if run.failures
    ]
    if failed:
        found["replies of workers that did not count"] = ", ".join(failed)
    return found


def _of_each(runs: Sequence[FinishedRun], describe: Callable[[Sequence[FinishedRun]], str]) -> str:
    """Return what is said of every algorithm's runs, with their names where that differs."""
    names: dict[str, list[str]] = {}
    for algorithm, its in by_algorithm(runs).items():
        names.setdefault(describe(its), []).append(algorithm)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{text} ({', '.join(those)})" for text, those in names.items())


def _seeds(runs: Sequence[FinishedRun]) -> str:
    return _of_each(runs, lambda its: ", ".join(map(str, sorted(run.seed for run in its))))


def _versions(run: FinishedRun) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.versions.items())


def _budget(run: FinishedRun) -> str:
    if seconds := run.settings.get("seconds"):
        return f"{seconds:g} s " + (
            "on simulated devices" if run.clock == "device" else "of training"
        )
    epochs = run.settings.get("epochs")
    return f"{epochs} epoch" if epochs == 1 else f"{epochs} epochs"


def _workers(run: FinishedRun) -> str:
    """Return ``"2 fast (cpu:0, cpu:1) + 1 slow (cpu:2)"``."""
    parts = []
    for tier, members in groupby(run.workers, key=lambda worker: worker["tier"]):
        devices = [worker["device"] for worker in members]
        parts.append(f"{len(devices)} {tier} ({', '.join(dict.fromkeys(devices))})")
    return " + ".join(parts)


def _local_steps(run: FinishedRun) -> str:
    """Return ``"32 fast, 8 slow"``."""
    alike = dict.fromkeys((worker["local_steps"], worker["tier"]) for worker in run.workers)
    return ", ".join(f"{steps} {tier}" for steps, tier in alike)
