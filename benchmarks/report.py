"""Writes benchmarks/RESULTS.md from the JSON files in benchmarks/results.

``python -m benchmarks.report [--check]``. With ``--check`` nothing is written, and the exit code
says whether the page is up to date.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .table import Row, cells

FOLDER = Path(__file__).parent
PAGE, RESULTS = FOLDER / "RESULTS.md", FOLDER / "results"

BENCHMARKS = {
    "rounds": "Seconds per round beyond computing",
    "round_cost": "CPU time of a round besides its steps",
    "step": "A local step against hand-written loops",
    "loader": "Images that are decoded when they are read",
    "epoch": "An epoch on a fast and a slowed device",
    "paper_rounds": "One round of each of the paper's configs",
    "waiting": "The steps that are chosen, who waits, and the throughput",
    "async_evaluation": "A device 16 times slower evaluates while the other trains",
    "slowdown": "A worker that is slowed four times against one that is not",
    "checks": "What checks and checkpoints cost",
}
"""By their commands, in the order of the page."""

ON_A_GPU = {"gpu_works": "Checks on a GPU: does it work?", "gpu_speed": "How fast is a GPU?"}
"""Calls of ``benchmarks.gpu``, in files NAME.jsonl as they wrote them."""


@dataclass(frozen=True)
class Goal:
    """A figure that was asked for.

    Parameters
    ----------
    figure, limit : str
        For people.
    file : str
        Which results have it: the name of a JSON file without its end.
    row : str (default: "")
        A regular expression that the row's name matches; rows without a goal never count.
    """

    figure: str
    limit: str
    file: str
    row: str = ""


GOALS = (
    Goal(
        "round overhead with a no-op app, local grid, 4 workers, 0.27 M parameters",
        "<= 3 ms",
        "rounds",
        r"^4 x 0\.27 M: engine, local grid$",
    ),
    Goal(
        "the same under Flower's simulation, over ours",
        ">= 60",
        "rounds",
        r"^4 x 0\.27 M: engine, Ray simulation$",
    ),
    Goal(
        "the same, 10 workers, 36 M parameters, over copying 1.46 GB once",
        "<= 4",
        "rounds",
        r"^10 x 36 M: engine, local grid$",
    ),
    Goal("`LocalSGD` against the bare loop, CPU, ResNet20 B 32", ">= 0.97", "step", r"\(cpu"),
    Goal("a worker against a loop with a DataLoader, JPEG files", ">= 0.95", "loader", "worker"),
    Goal(
        "`LocalSGD` with `compile` against the eager bare loop, GPU, ResNet20 B 32",
        ">= 4",
        "gpu_speed",
        r"compiled \(cuda",
    ),
    Goal("peak memory of an order with SGD, GPU", "<= 3.1 models", "gpu_works", r"order, sgd"),
)

Results = Mapping[str, dict[str, Any]]
"""File name without its end -> its content: rows and conditions."""


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the content of every file of results in a folder, by name."""
    paths = sorted(folder.glob("*.json*"), key=lambda path: path.stem)
    return {
        path.stem: _of_checks(path) if path.suffix == ".jsonl" else json.loads(path.read_text())
        for path in paths
    }


def _of_checks(path: Path) -> dict[str, Any]:
    """Return the conditions, rows and other lines that a call of ``benchmarks.gpu`` wrote."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    conditions = next((line for line in lines if line["name"] == "conditions"), {})
    others = [line for line in lines if "value" not in line and line is not conditions]
    rows = [line for line in lines if "value" in line]
    under = {key: value for key, value in conditions.items() if key not in ("check", "name")}
    return {"rows": rows, "checks": others, "conditions": under}


def page(results: Results) -> str:
    """Return the whole page."""
    parts = [
        "# Results",
        "Written by `python -m benchmarks.report` from the files in `benchmarks/results`. "
        "[README.md](README.md) has the command of each table. A figure holds for the conditions "
        "below its table, date and commit among them; compare only figures of one table, since "
        "competitors took turns within its run.",
        "## Goals",
        goals_table(results),
    ]
    for name, title in BENCHMARKS.items():
        parts += [f"## {title} (`{name}`)", *_tables(name, results)]
    others = [n for n in results if benchmark_of(n) not in BENCHMARKS and n not in ON_A_GPU]
    for name in others:
        parts += [f"## {name}", *_table(f"{name}.json", results[name])]
    for name, title in ON_A_GPU.items():
        parts += [f"## {title} (`{name}`)", *_checks(name, results)]
    return "\n\n".join(parts) + "\n"


def benchmark_of(file: str) -> str:
    """Return the benchmark that a file is of: ``step`` for ``step`` and ``step-busy``."""
    return file.partition("-")[0]


def goals_table(results: Results) -> str:
    """Return the goals, each with what was measured."""
    lines = ["| figure | goal | measured |", "|---|---|---|"]
    for goal in GOALS:
        rows = results.get(goal.file, {}).get("rows", [])
        found = [r for r in rows if "goal" in r and re.search(goal.row, r["name"])]
        said = "; ".join(_against_goal(r) for r in found) or "not measured"
        lines.append(_line([goal.figure, goal.limit, said]))
    return "\n".join(lines)


def _against_goal(r: Row) -> str:
    name, value, unit, _, ratio, goal = cells(r, goals=True)
    figure = value if r["value"] is None else f"{value} {unit}{f' ({ratio})' if ratio else ''}"
    return f"{name}: {figure}, {goal}"


def _tables(name: str, results: Results) -> Iterable[str]:
    files = [file for file in results if benchmark_of(file) == name]
    for file in files:
        if len(files) > 1 or file != name:
            yield f"### {file}"
        yield from _table(f"{file}.json", results[file])
    if name not in files:
        command = f"python -m benchmarks.{name} --json benchmarks/results/{name}.json"
        yield f"Not measured: `{command}`."


def _checks(name: str, results: Results) -> Iterable[str]:
    if name not in results:
        yield "Not measured: there was no GPU ([README.md](README.md#on-a-gpu))."
        return
    lines = ["| check | result | found |", "|---|---|---|"]
    for one in results[name]["checks"]:
        found = {k: v for k, v in one.items() if k not in ("check", "name", "ok", "said")}
        result = {True: "ok", False: "failed", None: ""}[one.get("ok")]
        lines.append(_line([one["name"], result, _text(found)]))
    yield "\n".join(lines)
    yield from _table(f"{name}.jsonl", results[name])


def _table(file: str, content: dict[str, Any]) -> Iterable[str]:
    rows = content["rows"]
    goals = any("goal" in r for r in rows)
    titles = ["name", "median", "unit", "range", "ratio", *(["goal"] if goals else [])]
    lines = [_line(titles), "|---|---:|" + "---|" * (len(titles) - 2)]
    lines += [_line(cells(r, goals)) for r in rows]
    yield "\n".join(lines)
    taken_under = "; ".join(f"{key} = {_text(v)}" for key, v in content["conditions"].items())
    yield f"Conditions ([{file}](results/{file})): {taken_under}."


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    line.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    options = line.parse_args(arguments)
    text = page(read_results(RESULTS))
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
