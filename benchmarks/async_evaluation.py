"""How much sooner a run ends if a device that is 16 times slower evaluates while the other trains.

``python -m benchmarks.async_evaluation``: the default algorithm on real CIFAR-10 with ResNet8 and
batches of 32, evaluated after every epoch, which is the default: on one core, and with a second one
that is slowed and has ``role=evaluate``. Five training images for each one of the evaluation, as in
CIFAR-10. Five pairs of runs, in random order within a pair. With ``--rows FILE`` each pair is
appended to a file, and the table is of all pairs in it, so that they can be spread over several
calls.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from .images import add_data_option, required_images
from .rows import Row, conditions, parser, row, with_goal, write

GAP, PAIRS, LEAST = 16, 5, 1.05
IMAGES, EPOCHS = 4_000, 7
QUICK_IMAGES, QUICK_EPOCHS = 200, 3
ARMS = {
    "alone": {"workers": "1x cpu:0 fast", "min-workers": 1},
    "async": {"workers": f"1x cpu:0 fast; 1x cpu:1 role=evaluate slowdown={GAP}"},
}
SETTINGS = {"task": "cifar10", "model": "resnet8", "batch-size": 32}


def run(arm: str, seed: int, data: str, images: int, epochs: int) -> dict[str, Any]:
    """Train once, in a process of its own; return what its summary says.

    ``seconds`` are those from the first order to the last result: the wall clock, which ends with
    the last model, and the last evaluation, which no arm can hide.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        part = {"max-samples": images * 6 // 5, "validation-share": 1 / 6, "epochs": epochs}
        settings = {**SETTINGS, **ARMS[arm], **part, "data": data, "seed": seed, "out": out}
        words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
        command = [sys.executable, "-m", "flower_blsgd", "run", ".", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((out / "summary.json").read_text())
    found = summary["async_evaluation"] or {"results": 0, "without_result": 0}
    last = summary["evaluation_seconds"] / (1 if arm == "async" else epochs)
    names = ("wall_seconds", "training_seconds", "evaluation_seconds", "async_evaluation_seconds")
    return {
        **{name: summary[name] for name in names},
        "seconds": summary["wall_seconds"] + last,
        "local_steps": summary["workers"][0]["local_steps"],
        "accuracy": summary["accuracy"],
        "best_accuracy": summary["best_accuracy"],
        **{name: found[name] for name in ("results", "without_result")},
        "load_average": os.getloadavg()[0],
    }


def ratio_row(name: str, pairs: Sequence[Mapping[str, Any]], figure: str) -> Row:
    """Return the row of how many times longer the run alone took; its interval is of the log."""
    ratios = [pair["alone"][figure] / pair["async"][figure] for pair in pairs]
    made = row(name, ratios, "x")
    if len(ratios) > 1:
        logs = [math.log(ratio) for ratio in ratios]
        half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
        made |= {
            "geometric_mean": math.exp(fmean(logs)),
            "interval": [math.exp(fmean(logs) + sign * half) for sign in (-1, 1)],
        }
    return made


def rows_of(pairs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of the table."""
    whole = ratio_row(f"gap {GAP}: sooner with role=evaluate", pairs, "seconds")
    rows = [with_goal(whole, at_least=LEAST)]
    if "interval" in whole:
        rows[0] |= {"goal_met": rows[0]["goal_met"] and whole["interval"][0] > 1}
    rows.append(ratio_row("without the last evaluation (wall_seconds)", pairs, "wall_seconds"))
    rows.append(ratio_row("training alone", pairs, "training_seconds"))
    for arm in ARMS:
        own = [pair[arm] for pair in pairs]
        shares = [100 * one["evaluation_seconds"] / one["seconds"] for one in own]
        rows += [
            row(f"{arm}: seconds", [one["seconds"] for one in own], "s"),
            row(f"{arm}: waiting for evaluations", shares, "% of the seconds"),
            row(f"{arm}: accuracy", [100 * one["accuracy"] for one in own], "%"),
        ]
    missed = [float(pair["async"]["without_result"]) for pair in pairs]
    return [*rows, row("async: epochs without a result", missed, "epochs")]


def main() -> None:
    """Run the pairs that are missing, and write the table."""
    line = parser(__doc__)
    add_data_option(line)
    line.add_argument("--pairs", type=int, default=PAIRS, help="in all")
    line.add_argument("--rows", type=Path, help="append each pair to this file, and read it")
    given = line.parse_args()
    data, file = required_images(given.data), given.rows
    images, epochs = (QUICK_IMAGES, QUICK_EPOCHS) if given.quick else (IMAGES, EPOCHS)
    texts = file.read_text().splitlines() if file and file.exists() else []
    pairs = [json.loads(text) for text in texts]
    for number in range(len(pairs), 1 if given.quick else given.pairs):
        order = list(ARMS)
        random.Random(number).shuffle(order)
        found = {arm: run(arm, number, data, images, epochs) for arm in order}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        pairs.append({**found, "order": order, "seed": number, "date": date})
        if file:
            with file.open("a") as rows_file:
                rows_file.write(json.dumps(pairs[-1]) + "\n")
    more = {"settings": SETTINGS, "training_images": images, "evaluation_images": images // 5}
    under = conditions(gap=GAP, workers=ARMS, epochs=epochs, **more, pairs=pairs)
    write(rows_of(pairs), under, given.json)


if __name__ == "__main__":
    main()
