"""Write a comparison: a table to read, a table to compute with, a picture, and their wording."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.table import Table

from ..config import RunConfig
from ..errors import UsageError
from ..results.folder import counted, written_whole
from .comparison import AlgorithmFigures, Comparison, Run, compare, known_mean, reached_at

_UNKNOWN = "-"

_HOW_TO_READ = (
    "**accuracy**: of the final model, mean ± sample standard deviation over n seeds.",
    "**difference**: to the reference, seed by seed, ± half of the 95 % confidence interval of its "
    "mean (Student's t, paired). *No difference shown*: the interval contains 0, "
    "or there is none, since one pair of runs, or pairs that all differ by the same, cannot tell "
    "how much the next would. That is not a proof of equality: more seeds may show one. With "
    "many algorithms about one interval in twenty misses 0 by chance.",
    "**training**: rounds and planning as measured, without set-up and evaluation; "
    "it depends on the machine and on what else ran there.",
    "**to target**: training seconds up to the end of the first evaluated epoch that "
    "reached it, mean over the seeds that did; in brackets how many did, if not all.",
    "**wait**: share of the round time that workers of a tier wait for the slowest one; "
    'computed with clock = "device", else measured.',
    "**simulated**: on simulated devices: not measured, but computed from each worker's speed "
    "alone, as if each had its own device.",
)

_NOT_SHOWN = ("algorithm", "seed", "out", "name", "data", "profile")
"""Settings that differ between the runs, or are paths."""


def write_comparison(
    runs: Sequence[Run],
    folder: Path,
    reference: str,
    target: float | None = None,
    failed: Sequence[str] = (),
) -> Comparison:
    """Compare runs, and write ``comparison.md``, ``comparison.csv`` and ``comparison.png``.

    Each file is written whole or not at all; one of an earlier comparison is replaced. UsageError
    if the folder cannot be written to.

    Parameters
    ----------
    runs, folder, reference, target
        See `compare`; the folder is made if it is not there.
    failed : sequence of str
        Why other runs did not finish, a line each; they are in no figure.
    """
    from .comparison_plot import draw_comparison  # importing matplotlib takes a second

    comparison = compare(runs, reference, target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("csv", csv_text(comparison)), ("md", markdown(comparison, failed))):
            with written_whole(folder / f"comparison.{name}") as part:
                part.write_text(text, encoding="utf-8", newline="\n")
        with written_whole(folder / "comparison.png") as part:
            draw_comparison(comparison, part)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error.strerror}") from None
    return comparison


# --- the table to read, in a file and in a terminal


def table_columns(comparison: Comparison) -> dict[str, Callable[[AlgorithmFigures], str]]:
    """Return the table's columns: their headers, and the cell of each algorithm."""
    held_out = accuracy_name(comparison.runs[0]).startswith("validation")
    columns: dict[str, Callable[[AlgorithmFigures], str]] = {
        "algorithm": lambda one: one.algorithm,
        "n": lambda one: str(len(one.accuracies)),
        "validation\naccuracy (%)" if held_out else "accuracy\n(%)": accuracy_text,
        "difference\n(points)": lambda one: _difference_text(one, comparison.reference),
        "training\n(s)": lambda one: _seconds(one.mean("training_seconds")),
        "simulated\n(s)": lambda one: _seconds(one.mean("device_seconds")),
        "to target\n(s)": lambda one: _target_text(one, "training_seconds"),
        "to target\nsimulated": lambda one: _target_text(one, "device_seconds"),
        "fast\nwait": lambda one: _share(one.mean("fast_waiting_share")),
        "slow\nwait": lambda one: _share(one.mean("slow_waiting_share")),
    }
    if all(run["device_seconds"] is None for run in comparison.runs):
        del columns["simulated\n(s)"], columns["to target\nsimulated"]
    return columns


def markdown(comparison: Comparison, failed: Sequence[str] = ()) -> str:
    """Return the text of ``comparison.md``."""
    columns = table_columns(comparison)
    table = [[header.replace("\n", " ") for header in columns]]
    table.append(["---"] + ["---:"] * (len(columns) - 1))
    table += [[cell(one) for cell in columns.values()] for one in comparison.algorithms]
    lines = [f"# {headline(comparison.runs)}", ""]
    lines += [*(f"| {' | '.join(cells)} |" for cells in table), "", verdict(comparison), ""]
    for line in failed:
        lines += [f"In no figure: {line}.", ""]
    lines += ["![the same as a picture](comparison.png)", "", "## Conditions", ""]
    lines += [f"- {name}: {value}" for name, value in conditions(comparison).items()]
    lines += [f"- {_target_line(comparison)}", "", "## How to read", ""]
    lines += [f"- {note}" for note in _HOW_TO_READ]
    return "\n".join([*lines, "", "`comparison.csv` has every run.", ""])


def terminal_table(comparison: Comparison) -> Table:
    """Return the table for a terminal of 100 columns."""
    table = Table(
        title=headline(comparison.runs),
        title_justify="left",
        caption=f"{verdict(comparison)}\nAccuracy: mean ± standard deviation over n seeds; "
        f"difference to the reference: mean ± half of its 95 % interval; "
        f"{_target_line(comparison)}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    columns = table_columns(comparison)
    for header in columns:
        first = header == "algorithm"
        table.add_column(header, justify="left" if first else "right", no_wrap=first)
    for one in comparison.algorithms:
        name, *cells = (cell(one) for cell in columns.values())
        table.add_row(fill(name, 20), *cells)
    return table


# --- the table to compute with


def csv_text(comparison: Comparison) -> str:
    """Return the text of ``comparison.csv``: one line per run; empty where not measured."""
    target = comparison.target
    rows = []
    for run in comparison.runs:
        reached = (target is not None and reached_at(run, target)) or {}
        rows.append(
            {
                "algorithm": run["arm"],
                "seed": run["seed"],
                "accuracy_percent": percent(run["accuracy"]),
                "best_accuracy_percent": percent(run["best_accuracy"]),
                "loss": run["loss"],
                "training_seconds": run["training_seconds"],
                "simulated_device_seconds": run["device_seconds"],
                "target_accuracy_percent": percent(target),
                "training_seconds_to_target": reached.get("training_seconds"),
                "simulated_device_seconds_to_target": reached.get("device_seconds"),
                "fast_waiting_percent": percent(run["fast_waiting_share"]),
                "slow_waiting_percent": percent(run["slow_waiting_share"]),
                "samples": run["samples"],
                "samples_given_up": run["samples_given_up"],
                "rounds": run["rounds"],
                "epochs": run["epochs"],
                "failures": len(run["failures"]),
            }
        )
    return csv_of(rows)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows, at least one, as CSV; numbers with six figures, None as nothing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = row.items()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells})
    return text.getvalue()


def percent(share: float | None) -> float | None:
    """Return a share in percent; None stays None."""
    return None if share is None else 100 * share


# --- wording, alike in a file, in a terminal and in the picture


def accuracy_name(run: Run) -> str:
    """Return ``"test accuracy"``, or ``"validation accuracy"`` if training data was held out."""
    return f"{'validation' if run['settings'].get('validation-share') else 'test'} accuracy"


def accuracy_text(one: AlgorithmFigures) -> str:
    """Return ``"98.33 ± 0.28"``, in percent."""
    if one.accuracy is None:
        return "not measured"
    deviation = one.accuracy_deviation
    beside = "" if deviation is None else f" ± {100 * deviation:.2f}"
    return f"{100 * one.accuracy:.2f}{beside}"


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


def _difference_text(one: AlgorithmFigures, reference: str) -> str:
    """Return ``"+0.28 ± 0.58"``, in points."""
    if one.algorithm == reference:
        return "reference"
    if one.difference is None:
        return _UNKNOWN
    mean, half_width = one.difference.mean, one.difference.half_width
    half = "" if half_width is None else f" ± {100 * half_width:.2f}"
    return f"{100 * mean:+z.2f}{half}"


def _target_text(one: AlgorithmFigures, figure: str) -> str:
    """Return ``"12.5"``, with how many of the seeds reached it where that is not all."""
    if not one.reached:
        return "never"
    text = _seconds(known_mean(row[figure] for row in one.reached))
    all_did = len(one.reached) == len(one.runs)
    return text if all_did else f"{text} ({len(one.reached)}/{len(one.runs)})"


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


# --- the conditions under which the runs were made


def headline(runs: Sequence[Run]) -> str:
    """Return task, budget and seeds: ``"digits, 15 epochs, 3 seeds"``."""
    settings, seeds = runs[0]["settings"], {run["seed"] for run in runs}
    epochs = [run["settings"].get("epochs", 0) for run in runs]
    if seconds := settings.get("seconds"):
        simulated = runs[0]["clock"] == "device"
        budget = f"{seconds:g} s {'on simulated devices' if simulated else 'of training'}"
    else:
        least = f"{min(epochs)} to " if min(epochs) < max(epochs) else ""
        budget = least + counted(max(epochs), "epoch")
    number = f"seed {seeds.pop()}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return f"{runs[0]['task']}, {budget}, {number}"


def conditions(comparison: Comparison) -> dict[str, str]:
    """Return the conditions by name, with the algorithms that have them where they differ.

    Neither paths nor host names are among the conditions.
    """

    def of_each(describe: Callable[[Run], str]) -> str:
        """Return what holds of every algorithm's runs, with their names where that differs."""
        names: dict[str, list[str]] = {}
        for one in comparison.algorithms:
            text = ", ".join(dict.fromkeys(describe(run) for run in one.runs))
            names.setdefault(text, []).append(one.algorithm)
        if len(names) == 1:
            return next(iter(names))
        return "; ".join(f"{text} ({', '.join(those)})" for text, those in names.items())

    runs, defaults = comparison.runs, RunConfig().to_run_config()
    settings = runs[0]["settings"]
    known = [key for key in settings if key in defaults and key not in _NOT_SHOWN]
    own = [key for key in known if any(run["settings"].get(key) != settings[key] for run in runs)]
    changed = [
        f"{key} = {settings[key]}"
        for key in known
        if settings[key] != defaults[key] and key not in own
    ]
    differ = {key: of_each(lambda run: str(run["settings"].get(key))) for key in own}  # noqa: B023
    share = settings.get("validation-share")
    failed = [
        f"{len(run['failures'])} of {run['arm']} seed {run['seed']}"
        for run in runs
        if run["failures"]
    ]
    return {
        "settings that are not the defaults": ", ".join(changed) or "none",
        **differ,
        "workers": of_each(_workers),
        "seeds": of_each(lambda run: str(run["seed"])),
        "accuracy measured on": f"{share:.0%} of the training data, held out (not on the test set)"
        if share
        else "the whole test set",
        "samples trained on": of_each(lambda run: str(run["samples"])),
        "versions": of_each(
            lambda run: " / ".join(f"{name} {version}" for name, version in run["versions"].items())
        ),
        "replies of workers that did not count": ", ".join(failed) or "none",
    }


def _workers(run: Run) -> str:
    """Return ``"2 fast (cpu:0, cpu:1), 32 local steps + 1 slow (cpu:2), 8 local steps"``."""
    alike: dict[tuple[str, int], list[str]] = {}
    for worker in run["workers"]:
        alike.setdefault((worker["tier"], worker["local_steps"]), []).append(worker["device"])
    return " + ".join(
        f"{len(devices)} {tier} ({', '.join(dict.fromkeys(devices))}), {steps} local steps"
        for (tier, steps), devices in alike.items()
    )
