"""Write one HTML page of a results folder: a run, a comparison, or a reproduction of the paper.

The page opens without a network: it contains its pictures, and all text from files is escaped.
"""

import base64
import csv
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..errors import UsageError, first_line
from ..files import write_text
from ..results.folder import read_config, refused
from ..results.metric import ACCURACY, Metric, value_in
from ..results.round_totals import metrics_of
from ..results.summary import blsgd_command, failures_line, last_lines, versions
from ..results.tables import UNKNOWN, Table
from . import comparison_report as words
from .comparison import (
    SETTINGS,
    Comparison,
    Run,
    compare_runs,
    headline,
    metric_of,
    read_run,
    run_folder,
)
from .comparison_plot import draw_comparison

_PICTURES = ("learning_curve", "timeline", "sampling")
_WORKER = (
    *("device", "name", "tier", "local_steps", "batch_size", "weight", "samples"),
    *("seconds_per_step", "compute_seconds", "waiting_seconds", "transfer_seconds", "failures"),
)


@dataclass(frozen=True)
class Page:
    """Content of a page: headline, sentences below it, warnings as text; sections as HTML."""

    title: str
    lead: str
    warnings: list[str]
    sections: list[str]
    metric: Metric = ACCURACY


PageReader = Callable[[Path], Page]


def write_report(folder: Path, out: Path, more: Mapping[str, PageReader] | None = None) -> str:
    """Write the page of a results folder to a file, whole or not at all; return its headline.

    `more` has readers of folders other than those of runs and comparisons, by a file that only such
    a folder has. The page names runs of a comparison that are missing. UsageError if the folder
    holds no results that this version can read, or the file cannot be written.
    """
    readers = {**(more or {}), SETTINGS: page_of_comparison, "config.toml": page_of_run}
    reader = next((readers[file] for file in readers if (folder / file).is_file()), None)
    if reader is None:
        raise UsageError(f"{folder} holds none of {', '.join(readers)}; name a folder under runs/")
    folder = folder.resolve()  # runs/latest is a link
    try:
        page = reader(folder)
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder} cannot be read ({type(error).__name__} {first_line(error)}); use the "
            "version of flower-blsgd that wrote it"
        ) from error
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    texts = {"title": page.title, "lead": page.lead, "folder": folder.name, **versions()}
    texts = {name.replace("-", "_"): escape(text) for name, text in texts.items()}
    texts["warnings"] = "".join(f"<li>{escape(line)}</li>" for line in page.warnings)
    meanings = Table((), list(words.how_to_read(page.metric).items())).html()
    body = "\n".join([*page.sections, section("How to read", meanings)])
    text = template.substitute(texts, body=body)
    with refused(f"{out} cannot be written"):
        write_text(out, text.encode(errors="xmlcharrefreplace").decode())
    return page.title


def page_of_run(folder: Path) -> Page:
    """Return the page of a finished run."""
    config, run = read_config(folder), read_run(folder)
    if run is None:
        command = blsgd_command(config, "--resume", str(folder))
        raise UsageError(f"the run in {folder} is not finished; {command} continues it")
    metrics, label = metrics_of(folder, run), run["arm"]
    config = replace(config, out=config.out and folder.name)  # no paths of this machine
    lines = last_lines(run, metrics, config, Path(folder.name))[1:]
    failed = run["failures_by_worker"]
    warnings = [failures_line(failed)] if failed else []
    if missing := run["rounds"] - len(metrics.records):
        warnings.append(f"{missing} of {run['rounds']} rounds are missing in rounds.jsonl")
    metric = metric_of(run)
    final = metric.named(value_in(run))
    reached = final and f"{metric.split} {final} "
    title = f"{label} on {run['task']}: {reached}after {run['training_seconds']:.1f} s of training"
    workers = [[_text(worker.get(key)) for key in _WORKER] for worker in run["workers"]]
    pictures = [picture(folder / f"{name}.png") for name in _PICTURES]
    sections = sections_of(compare_runs([run], label), Table(_WORKER, workers).html(), *pictures)
    lead = ". ".join(line for line in lines if line not in warnings)
    return Page(title, lead, warnings, sections, metric)


def page_of_comparison(folder: Path) -> Page:
    """Return the page of a comparison."""
    comparison = read_comparison(folder)
    metric, (best, *others) = comparison.metric, comparison.algorithms
    title = f"{best.algorithm}: {metric.split} {metric.name} {best.text(metric)}"
    title += metric.unit * (best.value is not None)
    lead = f"{headline(comparison.runs)}. "
    if others and best.value is not None:
        title += f", the best of {1 + len(others)}"
        lead += f"Reference: {comparison.reference}, the first algorithm. "
    one = best if best.difference else comparison.algorithms[:2][-1]
    if found := one.difference:
        text = f"{found.text}{' points' * metric.is_accuracy}, {found.in_words}"
        name = "" if one is best else f"{one.algorithm} "
        title += f"; {name}compared with {comparison.reference}: {text}"
    warnings = [f"not included: {line}" for line in comparison.failed]
    sections = sections_of(comparison, drawing(comparison))
    return Page(title, lead + words.verdict(comparison), warnings, sections, metric)


def read_comparison(folder: Path) -> Comparison:
    """Return the runs in a folder, compared with the reference that ``comparison.csv`` names.

    Without that file, the arm that is first by name is the reference. UsageError if the folder
    holds no finished run.
    """
    matches = [re.fullmatch(r"(.+)-seed(\d+)", path.name) for path in sorted(folder.glob("*"))]
    found = [(match[1], int(match[2])) for match in matches if match]
    runs: list[Run] = []
    missing = []
    for seed in sorted({seed for _, seed in found}):
        for arm in dict.fromkeys(arm for arm, _ in found):
            reason = "not finished" if (arm, seed) in found else "missing"
            try:
                if run := read_run(run_folder(folder, arm, seed)):
                    runs.append(run)
                    continue
            except UsageError as error:
                reason = str(error)
            missing.append(f"{arm}, seed {seed}: {reason}")
    if not runs:
        raise UsageError("; ".join([f"{folder} holds no finished run", *missing[:1]]))
    table = folder / "comparison.csv"
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    named = next(csv.DictReader(lines), {}).get("reference")
    reference = next((run["arm"] for run in runs if run["arm"] == named), runs[0]["arm"])
    return compare_runs(runs, reference, failed=missing)


# --- parts of a page


def sections_of(comparison: Comparison, *parts: str) -> list[str]:
    """Return the sections that each comparison has: its figures and its conditions."""
    conditions = Table((), list(words.conditions(comparison).items()))
    return [
        section("Figures", words.table_of(comparison).html(), *parts),
        section("Conditions", conditions.html()),
    ]


def section(heading: str, *parts: str) -> str:
    """Return a section of these parts."""
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *parts, "</section>"])


def drawing(comparison: Comparison) -> str:
    """Return the picture of a comparison."""
    with tempfile.TemporaryDirectory() as folder:
        draw_comparison(comparison, file := Path(folder) / "comparison.png")
        return picture(file)


def picture(file: Path) -> str:
    """Return a PNG file as part of the page; nothing if it does not exist."""
    if not file.is_file():
        return ""
    data = base64.b64encode(file.read_bytes()).decode()
    source = f"data:image/png;base64,{data}"
    return f'<figure><img alt="{escape(file.stem)}" src="{source}"></figure>'


def _text(value: Any) -> str:
    if value in (None, ""):
        return UNKNOWN
    return f"{value:.4g}" if isinstance(value, float) else str(value)
