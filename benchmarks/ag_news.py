"""AG News with a fast and a slow worker on this CPU, against linear models on bags of words.

``python -m benchmarks.ag_news --data FOLDER``: the run is ``configs/ag-news-small.toml``, a small
encoder from scratch whose tokenizer is made of the training rows. The rivals are scikit-learn's,
on the same rows: counts and TF-IDF of words with logistic regression, and TF-IDF with a linear
support vector machine, as they are by default.
All are tested on the same test rows. With ``--quick`` one seed and one epoch, whose accuracy
means nothing.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import load_dataset
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import LinearSVC

from .rows import Row, conditions, parser, row, write

CONFIG = "ag-news-small"
SEEDS = (0, 1, 2)
RIVALS: dict[str, Callable[[], Pipeline]] = {
    "bag of words, logistic regression": lambda: make_pipeline(
        CountVectorizer(), LogisticRegression(max_iter=2000)
    ),
    "TF-IDF, logistic regression": lambda: make_pipeline(
        TfidfVectorizer(), LogisticRegression(max_iter=2000)
    ),
    "TF-IDF, linear SVM": lambda: make_pipeline(TfidfVectorizer(), LinearSVC()),
}


def measure(data: str, seeds: Sequence[int], quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Train and test all."""
    rows: list[Row] = []
    accuracies = {}
    for name, rival in RIVALS.items():
        seconds, accuracies[name] = linear_model(data, rival())
        rows += [
            row(f"{name}: accuracy", [accuracies[name]], "of 1"),
            row(f"{name}: seconds", [seconds], "s"),
        ]
    runs = [run(data, seed, ["epochs=1"] if quick else []) for seed in seeds]
    ours = [summary["accuracy"] for summary in runs]
    for name, accuracy in accuracies.items():
        rows.append(row("blsgd run, encoder: accuracy", ours, "of 1", [accuracy], name))
    seconds_of_all = [summary["training_seconds"] for summary in runs]
    rows.append(row("blsgd run, encoder: training_seconds", seconds_of_all, "s"))
    table = load_dataset(data)
    return rows, conditions(
        config=CONFIG,
        seeds=list(seeds),
        epochs=runs[0]["epochs"],
        rounds=runs[0]["rounds"],
        training_rows=len(table["train"]),
        test_rows=len(table["test"]),
    )


def linear_model(data: str, model: Pipeline) -> tuple[float, float]:
    """Return the seconds to train, and the accuracy on the test rows."""
    table = load_dataset(data)
    train, test = table["train"], table["test"]
    began = time.perf_counter()
    model.fit(list(train["text"]), list(train["label"]))
    seconds = time.perf_counter() - began
    return seconds, float(model.score(list(test["text"]), list(test["label"])))


def run(data: str, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """Return the summary of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [f"data={data}", f"seed={seed}", f"out={out}", *settings]
        command = [sys.executable, "-m", "flower_blsgd", "run", ".", "-c", CONFIG]
        for word in words:
            command += ["-s", word]
        subprocess.run(command, check=True)
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        return summary


if __name__ == "__main__":
    line = parser(__doc__)
    line.add_argument("--data", required=True, help="a folder with the rows of AG News")
    given = line.parse_args()
    chosen = SEEDS[:1] if given.quick else SEEDS
    write(*measure(given.data, chosen, given.quick), given.json)
