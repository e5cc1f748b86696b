"""Rows of measurements, with the conditions that they were taken under."""

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(
    name: str,
    values: Sequence[float],
    unit: str,
    against: Sequence[float] | None = None,
    against_name: str = "",
) -> Row:
    """Return a row: median and range of the values, and the ratio of medians."""
    value = statistics.median(values)
    return {
        "name": name,
        "value": value,
        "minimum": min(values),
        "maximum": max(values),
        "mean": statistics.fmean(values),
        "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        "count": len(values),
        "unit": unit,
        "ratio": value / statistics.median(against) if against else None,
        "against": against_name or None,
    }


def conditions(**more: Any) -> dict[str, Any]:
    """Return what a number depends on."""
    import os

    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "flwr": version("flwr"),
        "torch": version("torch"),
        **more,
    }


def main(
    measure: Callable[[bool], tuple[list[Row], dict[str, Any]]], description: str | None
) -> None:
    """Measure, print a line per row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the rows and their conditions here")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    write(*measure(options.quick), options.json)


def write(rows: list[Row], taken_under: dict[str, Any], path: Path | None) -> None:
    """Print a line per row, and write JSON where asked."""
    for r in rows:
        ratio = f"  {r['ratio']:.3g} x {r['against']}" if r["ratio"] is not None else ""
        spread = f"{r['minimum']:.4g} to {r['maximum']:.4g}, n = {r['count']}"
        print(f"{r['name']:40} {r['value']:10.4g} {r['unit']:12} ({spread}){ratio}")
    print("conditions:", taken_under)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"rows": rows, "conditions": taken_under}, indent=2)
        path.write_text(text + "\n")
