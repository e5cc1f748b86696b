"""Write one HTML page of a results folder: a run, a comparison, or a reproduction of the paper.

It opens without a network: pictures are inside, and all text from files is escaped.
"""

import base64
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import matplotlib

from ..errors import UsageError, first_line
from ..results.folder import read_config, written_whole
from ..results.metrics import last_lines, metrics_of, versions
from ..results.plots import draw_timeline
from . import comparison_report as words
from .compare import SETTINGS
from .comparison import Comparison, Run, compare, read_run, run_folder
from .comparison_plot import draw_comparison
from .figures import FIGURES, draw_learning_curves
from .reproduction_report import FILE, read_rows, table_of

_WORKER = (
    *("device", "name", "tier", "local_steps", "batch_size", "weight", "samples"),
    *("seconds_per_step", "compute_seconds", "waiting_seconds", "transfer_seconds", "failures"),
)

# Of an SVG file, inside a page.
_NOT_NEEDED = re.compile(
    r'<metadata>.*?</metadata>|<!--.*?-->| xmlns(:xlink)?="[^"]*"| id="[A-Za-z.0-9]+_\d+"', re.S
)
Page = tuple[str, str, list[str], list[str]]  # headline, sentences below, warnings, sections


def write_report(folder: Path, out: Path) -> str:
    """Write the page of a results folder to a file, whole or not at all; return its headline.

    What is missing of several runs is named there. UsageError if the folder holds no results that
    this version can read, or the file cannot be written.
    """
    makers = {FILE: _of_reproduction, SETTINGS: _of_comparison, "config.toml": _of_run}
    make = next((make for name, make in makers.items() if (folder / name).is_file()), None)
    if make is None:
        raise UsageError(f"{folder} holds none of {', '.join(makers)}; name a folder under runs/")
    folder = folder.resolve()  # runs/latest is a link
    try:
        title, lead, warnings, sections = make(folder)
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__} {first_line(error)}"
        way_out = "use the version of flower-blsgd that made it"
        raise UsageError(f"{folder} cannot be read ({reason}); {way_out}") from error
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    texts = {"title": title, "lead": lead, "folder": folder.name, **versions()}
    texts = {name.replace("-", "_"): escape(text) for name, text in texts.items()}
    texts["warnings"] = "".join(f"<li>{escape(line)}</li>" for line in warnings)
    text = page.substitute(texts, body="\n".join(sections))
    try:
        with written_whole(out) as part:
            part.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None
    return title


# --- what each kind of folder says


def _of_run(folder: Path) -> Page:
    config, run = read_config(folder), read_run(folder)
    if run is None:
        way_out = f"blsgd run --resume {folder} goes on with it"
        raise UsageError(f"the run in {folder} did not go to its end; {way_out}")
    metrics, label = metrics_of(folder, run), run["arm"]
    config = replace(config, out=config.out and folder.name)  # no paths of this machine
    lines = last_lines(run, metrics, config, Path(folder.name))[1:]
    warnings = [line for line in lines if line.startswith("failures: ")]
    if missing := run["rounds"] - len(metrics.records):
        warnings.append(f"{missing} of {run['rounds']} rounds are missing in rounds.jsonl")
    reached = (
        "" if run["accuracy"] is None else f"{words.accuracy_name(run)} {run['accuracy']:.2%} "
    )
    title = f"{label} on {run['task']}: {reached}after {run['training_seconds']:.1f} s of training"
    pictures = [_svg("accuracy in training", partial(draw_learning_curves, {label: [run]}))]
    if metrics.records:
        timeline = partial(draw_timeline, metrics.records, f"{label}, seed {run['seed']}")
        pictures += [_svg("who works when, as measured", timeline), *_images(folder, "sampling")]
    workers = [[_text(worker.get(key)) for key in _WORKER] for worker in run["workers"]]
    sections = _sections(compare([run], label), _table(workers, _WORKER), *pictures)
    return title, ". ".join(line for line in lines if line not in warnings), warnings, sections


def _of_comparison(folder: Path) -> Page:
    comparison, warnings = _compared(folder)
    best, *others = comparison.algorithms
    title = f"{best.algorithm}: {words.accuracy_name(best.runs[0])} {words.accuracy_text(best)}"
    title += " %" * (best.accuracy is not None)
    if others and (found := others[0].difference):
        half = "" if found.half_width is None else f" ± {100 * found.half_width:.2f}"
        shown = "the 95 % interval shows it" if found.shown else found.in_words
        title += f", {-100 * found.mean:+z.2f}{half} points to the next of {1 + len(others)}: "
        title += shown
    lead = f"{words.headline(comparison.runs)}. {words.verdict(comparison)}"
    return title, lead, warnings, _sections(comparison, _drawn(comparison))


def _of_reproduction(folder: Path) -> Page:
    rows = read_rows(folder)
    cells = {row["cell"]: [one for one in rows if one["cell"] == row["cell"]] for row in rows}
    verdicts = Counter(row["verdict"] for row in rows if row["accuracy_percent"])
    reference = next((row["arm"] for row in rows if row["verdict"] == "reference"), "no reference")
    rivals = verdicts.total() - verdicts["reference"]
    title = (
        f"{folder.name}: {reference} is shown better than {verdicts['worse']} of {rivals} rivals, "
        f"worse than {verdicts['better']}"
    )
    lead = "Counted in each cell. To the others the 95 % interval shows no difference."
    warnings, sections = [], []
    for cell, its in cells.items():
        header, *lines = table_of(its)
        pictures = [part for name in FIGURES for part in _images(folder / Path(cell).name, name)]
        table = _table(lines, header)
        sections.append(_section(f"{cell}, {its[0]['mode']} mode", table, *pictures))
        try:
            comparison, missing = _compared(folder / Path(cell).name)
        except UsageError as error:
            warnings.append(f"{cell}: {error}")
            continue
        warnings += [f"{cell}: {line}" for line in missing]
        sections += _sections(comparison, _drawn(comparison))
    return title, lead, warnings, sections


def _compared(folder: Path) -> tuple[Comparison, list[str]]:
    """Compare the runs of a folder with the best of its arms, and say which are missing, and why.

    UsageError if no run can be read.
    """
    matches = [re.fullmatch(r"(.+)-seed(\d+)", path.name) for path in sorted(folder.glob("*"))]
    found = [(match[1], int(match[2])) for match in matches if match]
    runs: list[Run] = []
    missing = []
    for seed in sorted({seed for _, seed in found}):
        for arm in dict.fromkeys(arm for arm, _ in found):
            reason = "it did not go to its end" if (arm, seed) in found else "it is not there"
            try:
                if run := read_run(run_folder(folder, arm, seed)):
                    runs.append(run)
                    continue
            except UsageError as error:
                reason = str(error)
            missing.append(f"in no figure: {arm}, seed {seed}: {reason}")
    if not runs:
        raise UsageError("; ".join([f"{folder} holds no finished run", *missing[:1]]))
    return compare(runs, compare(runs, runs[0]["arm"]).algorithms[0].algorithm), missing


# --- pieces of a page


def _sections(comparison: Comparison, *pictures: str) -> list[str]:
    columns = words.table_columns(comparison)
    rows = [[cell(one) for cell in columns.values()] for one in comparison.algorithms]
    return [
        _section("Figures", _table(rows, list(columns)), *pictures),
        _section("Conditions", _table(words.conditions(comparison).items())),
    ]


def _drawn(comparison: Comparison) -> str:
    return _svg(words.headline(comparison.runs), partial(draw_comparison, comparison))


def _section(heading: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{escape(heading)}</h2>", *parts, "</section>"])


def _table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table of numbers; without a header one of texts."""
    head = "".join(f"<th>{escape(cell.replace('_', ' '))}</th>" for cell in header)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    opening = f'<div class="wide"><table class="{"numbers" if header else "texts"}">'
    return f"{opening}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _svg(caption: str, draw: Callable[[Path], None]) -> str:
    """Return what a function draws; letters are paths, so that the page needs no font."""
    # With the caption as salt no id comes twice in a page.
    look = matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": caption})
    with tempfile.TemporaryDirectory() as folder, look:
        draw(path := Path(folder) / "picture.svg")
        svg = path.read_text(encoding="utf-8")
    return _figure(_NOT_NEEDED.sub("", svg[svg.index("<svg") :]), caption)


def _images(folder: Path, name: str) -> list[str]:
    """Return a picture of a folder; nothing if it is not there."""
    if not (path := folder / f"{name}.png").is_file():
        return []
    data = base64.b64encode(path.read_bytes()).decode()
    return [_figure(f'<img alt="" src="data:image/png;base64,{data}">', name)]


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _text(value: Any) -> str:
    return "-" if value in (None, "") else f"{value:.4g}" if type(value) is float else str(value)
