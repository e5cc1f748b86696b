"""A comparison as a table: for reading (Markdown), for counting on (CSV), in a terminal."""

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.table import Table

from .comparison import Comparison, reached_at
from .comparison_words import (
    accuracy_text,
    difference_text,
    seconds_text,
    share_text,
    target_line,
    target_text,
    verdict,
)
from .conditions import conditions, headline, seeds_text
from .finished_run import FinishedRun

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
    "reached it, mean over the seeds that did.",
    "**wait**: share of the round time that workers of a tier wait for the slowest one.",
)
_DEVICE_NOTE = (
    "**simulated devices, computed**: not measured, but computed from each worker's speed alone, "
    "as if each had its own device."
)


def markdown(comparison: Comparison) -> str:
    """Return the text of ``comparison.md``."""
    header, rows = _cells(comparison)
    lines = [f"# {headline(comparison.runs)}", ""]
    lines += [_line(header), _line(["---"] + ["---:"] * (len(header) - 1)), *map(_line, rows), ""]
    lines += [verdict(comparison), ""]
    for line in comparison.failed:
        lines += [f"In no figure: {line}.", ""]
    lines += ["![the same as a picture](comparison.png)", ""]
    lines += ["## Conditions", ""]
    lines += [f"- {name}: {value}" for name, value in conditions(comparison.runs).items()]
    lines += [f"- {target_line(comparison)}", "", "## How to read", ""]
    notes = [*_HOW_TO_READ, _DEVICE_NOTE] if knows_devices(comparison) else _HOW_TO_READ
    lines += [f"- {note}" for note in notes]
    lines += ["", "`comparison.csv` has every run.", ""]
    return "\n".join(lines)


def csv_text(comparison: Comparison) -> str:
    """Return the text of ``comparison.csv``: one line per run; empty where not measured."""
    order = {one.algorithm: place for place, one in enumerate(comparison.algorithms)}
    rows = [
        _figures(run, comparison.target)
        for run in sorted(comparison.runs, key=lambda run: (order[run.algorithm], run.seed))
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def terminal_table(comparison: Comparison) -> Table:
    """Return the table for a terminal of 100 columns."""
    devices = knows_devices(comparison)
    table = Table(
        title=headline(comparison.runs),
        title_justify="left",
        caption=f"{verdict(comparison)}\nAccuracy: mean ± standard deviation over seeds "
        f"({seeds_text(comparison.runs)}); difference: mean ± half of its 95 % interval, in "
        f"points; {target_line(comparison)}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("algorithm", no_wrap=True)
    headers = ["accuracy\n(%)", "difference\nto reference", "training\n(s)"]
    headers += ["simulated\n(s)"] if devices else []
    for header in [*headers, "to target\n(s)", "fast\nwait", "slow\nwait"]:
        table.add_column(header, justify="right")
    for one in comparison.algorithms:
        cells = [
            one.algorithm,
            accuracy_text(one),
            difference_text(one, comparison.reference, short=True),
            seconds_text(one.training_seconds),
        ]
        cells += [seconds_text(one.device_seconds)] if devices else []
        cells.append(target_text(one.to_target, short=True))
        cells += [share_text(one.fast_waiting_share), share_text(one.slow_waiting_share)]
        table.add_row(*cells)
    return table


def knows_devices(comparison: Comparison) -> bool:
    """Whether any algorithm's seconds on simulated devices are known."""
    return any(one.device_seconds is not None for one in comparison.algorithms)


def _cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    devices = knows_devices(comparison)
    target = "" if comparison.target is None else f" {100 * comparison.target:.4g} %"
    header = ["algorithm", "accuracy (%)", f"difference to `{comparison.reference}` (points)"]
    header += ["training (s)"]
    header += ["simulated devices, computed (s)"] if devices else []
    header += [f"time to{target or ' target'} (s)"]
    header += [f"time to{target or ' target'} on simulated devices (s)"] if devices else []
    header += ["fast wait", "slow wait"]
    rows = []
    for one in comparison.algorithms:
        difference = difference_text(one, comparison.reference)
        if one.difference is not None:
            difference += f", {one.difference.in_words}"
        row = [f"`{one.algorithm}`", f"{accuracy_text(one)} (n = {one.n})", difference]
        row += [seconds_text(one.training_seconds)]
        row += [seconds_text(one.device_seconds)] if devices else []
        row += [target_text(one.to_target)]
        row += [target_text(one.to_target, device=True)] if devices else []
        rows.append([*row, share_text(one.fast_waiting_share), share_text(one.slow_waiting_share)])
    return header, rows


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(run: FinishedRun, target: float | None) -> dict[str, str]:
    reached = None if target is None else reached_at(run, target)
    figures: dict[str, float | None] = {
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
    }
    counts = {
        "samples": run.samples,
        "samples_given_up": run.samples_given_up,
        "rounds": run.rounds,
        "epochs": run.epochs[-1].epoch if run.epochs else 0,
        "failures": run.failures,
    }
    return {
        "algorithm": run.algorithm,
        "seed": str(run.seed),
        **{name: "" if value is None else f"{value:.6g}" for name, value in figures.items()},
        **{name: str(count) for name, count in counts.items()},
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
