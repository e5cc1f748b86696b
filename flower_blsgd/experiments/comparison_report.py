"""Write a comparison: a table to read, a table to compute with, and a picture."""

from collections.abc import Callable
from pathlib import Path
from textwrap import fill

from rich.console import Group, RenderableType
from rich.text import Text

from ..config import RunConfig
from ..files import write_text, written_whole
from ..results.folder import refused
from ..results.metric import Metric
from ..results.tables import UNKNOWN, Table, csv_of, seconds_text, share_text
from .comparison import (
    VARIED,
    AlgorithmFigures,
    Comparison,
    Run,
    headline,
    known_mean,
    number,
    reached_at,
)

_HOW_TO_READ = {
    "difference": "difference to the reference, seed by seed, ± half of the 95 % confidence "
    "interval of its mean (Student's t, paired). No difference shown: the interval contains 0, or "
    "cannot be computed (one seed, or the same difference with all seeds). More seeds may still "
    "show a difference. With many algorithms, about one interval in twenty misses 0 by chance. "
    "The best is chosen by these same runs, so more runs would show a smaller lead.",
    "training": "measured time of rounds and planning, without set-up and evaluation. It depends "
    "on the machine and its load.",
    "to target": "training time until the end of the first evaluated epoch that reached the "
    "target, mean over the seeds that did. Their number is in brackets if not all did.",
    "wait": "share of the round time that the workers of a tier wait for the slowest worker. "
    'Computed with clock = "device", else measured.',
    "simulated": "computed from the speed of each worker alone, as if each had its own device. "
    "Not measured.",
}


def how_to_read(metric: Metric) -> dict[str, str]:
    """Return the meaning of the columns of a comparison."""
    text = f"{metric.name} of the final model, mean ± sample standard deviation over n seeds."
    return {metric.name: text, **_HOW_TO_READ}


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write ``comparison.md``, ``comparison.csv`` and ``comparison.png``, each whole or not at all.

    UsageError if the folder cannot be made or written to.
    """
    from .comparison_plot import draw_comparison  # importing matplotlib takes a second

    with refused(f"{folder} cannot be written to"):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "comparison.csv", csv_text(comparison))
        write_text(folder / "comparison.md", markdown(comparison))
        with written_whole(folder / "comparison.png") as part:
            draw_comparison(comparison, part)


# --- the table to read, in a file, on a page and in a terminal


def table_of(comparison: Comparison) -> Table:
    """Return the table with a row for each algorithm, the best first."""
    metric = comparison.metric
    difference = "difference\n(points)" if metric.is_accuracy else "difference"
    columns: dict[str, Callable[[AlgorithmFigures], str]] = {
        "algorithm": lambda one: one.algorithm,
        "n": lambda one: str(len(one.values)),
        fill(metric.label, 11): lambda one: one.text(metric),
        difference: lambda one: _difference_text(one, comparison.reference),
        "training\n(s)": lambda one: seconds_text(one.mean("training_seconds")),
        "simulated\n(s)": lambda one: seconds_text(one.mean("device_seconds")),
        "to target\n(s)": lambda one: _target_text(one, "training_seconds"),
        "to target\nsimulated": lambda one: _target_text(one, "device_seconds"),
        "fast\nwait": lambda one: share_text(one.mean("fast_waiting_share")),
        "slow\nwait": lambda one: share_text(one.mean("slow_waiting_share")),
    }
    if all(run["device_seconds"] is None for run in comparison.runs):
        del columns["simulated\n(s)"], columns["to target\nsimulated"]
    rows = [[cell(one) for cell in columns.values()] for one in comparison.algorithms]
    return Table(list(columns), rows)


def markdown(comparison: Comparison) -> str:
    """Return the text of ``comparison.md``."""
    lines = [f"# {headline(comparison.runs)}", "", *table_of(comparison).markdown(), ""]
    lines += [verdict(comparison), ""]
    for line in comparison.failed:
        lines += [f"Not included: {line}.", ""]
    lines += ["![the table as a picture](comparison.png)", "", "## Conditions", ""]
    lines += [f"- {name}: {value}" for name, value in conditions(comparison).items()]
    lines += [f"- {_target_line(comparison)}", "", "## How to read", ""]
    meanings = how_to_read(comparison.metric)
    lines += [f"- **{column}**: {meaning}" for column, meaning in meanings.items()]
    return "\n".join([*lines, "", "`comparison.csv` lists every run.", ""])


def terminal_table(comparison: Comparison) -> RenderableType:
    """Return the table for a terminal of 100 columns."""
    name = comparison.metric.name
    caption = (
        f"{verdict(comparison)}\n\n{name[:1].upper()}{name[1:]}: mean ± standard deviation over n "
        "seeds; difference to the reference: mean ± half of its 95 % interval; "
        f"{_target_line(comparison)}"
    )
    return Group(headline(comparison.runs), table_of(comparison).terminal(), Text(caption))


# --- the table to compute with


def csv_text(comparison: Comparison) -> str:
    """Return the text of ``comparison.csv``: one line per run, empty cells where not measured."""
    target, metric = comparison.target, comparison.metric
    name = f"{metric.name}_percent" if metric.is_accuracy else metric.name
    rows = []
    for run in comparison.runs:
        reached = (target is not None and reached_at(run, target)) or {}
        rows.append(
            {
                "algorithm": run["arm"],
                "seed": run["seed"],
                name: run["value"],
                f"best_{name}": run["best_value"],
                "loss": run["loss"],
                "training_seconds": run["training_seconds"],
                "simulated_device_seconds": run["device_seconds"],
                f"target_{name}": target,
                "training_seconds_to_target": reached.get("training_seconds"),
                "simulated_device_seconds_to_target": reached.get("device_seconds"),
                "fast_waiting_percent": number(run["fast_waiting_share"], 100),
                "slow_waiting_percent": number(run["slow_waiting_share"], 100),
                "samples": run["samples"],
                "samples_given_up": run["samples_given_up"],
                "rounds": run["rounds"],
                "epochs": run["epochs"],
                "failures": len(run["failures"]),
                "reference": comparison.reference,
            }
        )
    return csv_of(rows, digits=6)


# --- phrases that files, terminal and picture share


def verdict(comparison: Comparison) -> str:
    """Return a sentence on which algorithms are better or worse than the reference."""
    by_words: dict[str, list[str]] = {}
    for one in comparison.algorithms:
        if one.algorithm != comparison.reference:
            found = one.difference
            words = found.in_words if found else "no evaluated seed in common"
            by_words.setdefault(words, []).append(one.algorithm)
    if not by_words:
        return f"Only {comparison.reference} has runs, so there is nothing to compare it with."
    parts = "; ".join(f"{words}: {', '.join(names)}" for words, names in by_words.items())
    return f"Compared with {comparison.reference}, {parts}."


def _difference_text(one: AlgorithmFigures, reference: str) -> str:
    if one.algorithm == reference:
        return "reference"
    return one.difference.text if one.difference else UNKNOWN


def _target_text(one: AlgorithmFigures, figure: str) -> str:
    """Return ``"12.5"``, or ``"12.5 (1/3)"`` if one of three seeds reached the target."""
    if not one.reached:
        return "never"
    text = seconds_text(known_mean(row[figure] for row in one.reached))
    all_did = len(one.reached) == len(one.runs)
    return text if all_did else f"{text} ({len(one.reached)}/{len(one.runs)})"


def _target_line(comparison: Comparison) -> str:
    metric = comparison.metric
    if comparison.target is None:
        return f"no target {metric.name}: not every run was evaluated"
    best = f"the {'lowest' if metric.sign < 0 else 'highest'} that every run reached"
    value = f"{comparison.target:.4g}{metric.unit}"
    return f"target {metric.name} {value} ({'given' if comparison.target_given else best})"


# --- the conditions under which the runs were made


def conditions(comparison: Comparison) -> dict[str, str]:
    """Return the conditions of the runs by name, with the algorithms where they differ.

    Paths and host names are left out.
    """

    def of_each(describe: Callable[[Run], str]) -> str:
        """Return the description of all runs; where it differs, with the algorithms."""
        names: dict[str, list[str]] = {}
        for one in comparison.algorithms:
            text = ", ".join(dict.fromkeys(describe(run) for run in one.runs))
            names.setdefault(text, []).append(one.algorithm)
        if len(names) == 1:
            return next(iter(names))
        return "; ".join(f"{text} ({', '.join(those)})" for text, those in names.items())

    runs, defaults = comparison.runs, RunConfig().to_run_config()
    settings = runs[0]["settings"]
    known = [key for key in settings if key in defaults and key not in (*VARIED, "data")]
    own = [key for key in known if any(run["settings"].get(key) != settings[key] for run in runs)]
    changed = [
        f"{key} = {settings[key]}"
        for key in known
        if settings[key] != defaults[key] and key not in own
    ]
    differ = {key: of_each(lambda run: str(run["settings"].get(key))) for key in own}  # noqa: B023
    measured_on = "the whole test set"
    if share := settings.get("validation-share"):
        measured_on = f"{share:.0%} of the training data, held out (not the test set)"
    failed = [
        f"{len(run['failures'])} of {run['arm']} seed {run['seed']}"
        for run in runs
        if run["failures"]
    ]
    return {
        "settings that differ from the defaults": ", ".join(changed) or "none",
        **differ,
        "workers": of_each(_workers),
        "seeds": of_each(lambda run: str(run["seed"])),
        f"{comparison.metric.name} measured on": measured_on,
        "samples trained on": of_each(lambda run: str(run["samples"])),
        "versions": of_each(
            lambda run: " / ".join(f"{name} {version}" for name, version in run["versions"].items())
        ),
        "failed orders of workers": ", ".join(failed) or "none",
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
