"""The page of a results folder: what it says of made runs, and that it needs and runs nothing."""

import csv
import functools
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.experiments import html_report
from flower_blsgd.experiments.compare import open_folder
from flower_blsgd.experiments.comparison import compare_runs, read_run
from flower_blsgd.experiments.comparison_report import write_comparison
from flower_blsgd.experiments.html_report import write_report
from flower_blsgd.paper.report import _TABLE, FILE, page_of_reproduction
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.results.tables import csv_of

from ..refusal import refusal
from ..results.records import two_rounds
from .fake_training import write_run

CONFIG = RunConfig(epochs=2, batch_size=8, learning_rate=0.25)
HOSTILE = "<script>alert('x')</script>&amp;"
SUMMARY: dict[str, Any] = {
    **{"wall_seconds": 21.0, "rounds": 2, "summing_seconds": 0.0},
    **{"async_evaluation": None, "slow_devices": []},
    **{"failures_by_worker": {}, "predicted": None, "measured": None},
}


class Page(HTMLParser):
    """All text of a page, its cells by line, and what it would load; tags must be balanced."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text, self.sources = "", []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object")
        assert not any(name.startswith("on") for name, _ in attributes)
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.sources += [v for k, v in attributes if k in ("src", "href") and v]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self._open[-1:]):
            self.rows[-1][-1] += data

    @property
    def headline(self) -> str:
        return self.source.split("<h1>")[1].split("</h1>")[0]


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time."""
    monkeypatch.setattr(html_report, "draw_comparison", lambda comparison, path: None)


write = functools.partial(write_report, more={FILE: page_of_reproduction})


def page_of(folder: Path) -> Page:
    headline = write(folder, folder / "report.html")
    page = Page(folder / "report.html")
    assert headline in page.text
    return page


def run_folder(out: Path, config: RunConfig = CONFIG, **summary: Any) -> Path:
    workers = [
        {"device": "cuda:0", "tier": "fast", "samples": 128, "weight": 0.625},
        {"device": "cuda:1", "tier": "fast", "samples": 64, "weight": 0.125},
        {"device": "cpu", "tier": "slow", "samples": 48, "weight": 0.25},
    ]
    more = {"local_steps": 4, "seconds_per_step_alone": None, "negligible": False}
    values = {**SUMMARY, "workers": [{**worker, **more} for worker in workers], **summary}
    folder = write_run(RunConfig(**{**vars(config), "out": str(out)}), **values)
    for round_ in two_rounds():
        RunFolder(folder).add_round(round_)
    return folder


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Write a comparison of 3 + 2 runs: accuracies in percent 95, 96, 97, and 94, 94, 94 - 1."""
    folder = tmp_path / "compared"
    open_folder(folder, CONFIG)
    finals = {"dlb": (0.95, 0.96, 0.97), "sync-sgd": (0.94, 0.94, 0.94)}
    for arm, accuracies in finals.items():
        for seed, accuracy in enumerate(accuracies):
            out = str(folder / f"{arm}-seed{seed}")
            write_run(RunConfig(algorithm=arm, seed=seed, out=out), accuracy)
    return folder


# --- a run


def test_page_of_a_run_is_whole_and_its_text_is_escaped(tmp_path: Path) -> None:
    hostile = {"task": HOSTILE, "versions": {"torch": HOSTILE}, "algorithm": HOSTILE}
    folder = run_folder(tmp_path / "<b>", **hostile)
    (folder / "sampling.png").write_bytes(b"a picture")
    page = page_of(folder)
    assert f"{HOSTILE} on {HOSTILE}: test accuracy 87.50% after 2.0 s of training" in page.text
    # 48 of 240 samples were the slow one's; of 16 s of rounds 3 were spent waiting for it alone.
    assert (
        "20.0% of the samples, 1.02 times the samples per second of the fast ones alone"
        in page.text
    )
    assert str(tmp_path) not in page.source
    assert "data:image/png;base64,YSBwaWN0dXJl" in page.sources
    assert all(source.startswith("data:") for source in page.sources)
    assert "://" not in page.source
    assert ["cpu", "-", "slow", "4"] in [row[:4] for row in page.rows]
    conditions = {row[0]: row[1] for row in page.rows if len(row) == 2}
    assert "learning-rate = 0.25" in conditions["settings that differ from the defaults"]
    assert conditions["versions"] == f"torch {HOSTILE}"


@pytest.mark.usefixtures("no_pictures")
def test_page_of_a_run_names_what_went_wrong_and_what_was_measured(tmp_path: Path) -> None:
    config = RunConfig(validation_share=0.25)
    failed = {"fast-1 (cpu:1)": {"died": 2}}
    page = page_of(run_folder(tmp_path / "x", config, failures_by_worker=failed, rounds=5))
    assert "validation accuracy 87.50%" in page.headline
    for warning in (
        "failures: fast-1 (cpu:1) died 2",
        "3 of 5 rounds are missing in rounds.jsonl",
    ):
        assert f"<li>{warning}</li>" in page.source


# --- several runs


def test_page_of_a_comparison(comparison: Path) -> None:
    page = page_of(comparison)
    # Differences of 1, 2 and 3 points: 2 ± 4.303 x 1 / sqrt(3)
    best = "dlb: test accuracy 96.00 ± 1.00 %, the best of 2"
    against = "sync-sgd compared with dlb: -2.00 ± 2.48 points, no difference shown"
    assert page.headline == f"{best}; {against}"
    assert "Reference: dlb, the first algorithm. Compared with dlb, no difference" in page.text
    assert ["sync-sgd", "3", "94.00 ± 0.00", "-2.00 ± 2.48"] in [row[:4] for row in page.rows]
    (picture,) = page.sources
    assert picture.startswith("data:image/png;base64,")
    assert "not included" not in page.source


@pytest.mark.usefixtures("no_pictures")
def test_reference_of_a_page_is_that_of_the_table(comparison: Path) -> None:
    """Not the best, and not the first by name, but the first algorithm of the command."""
    runs = [run for path in comparison.glob("*-seed*") if (run := read_run(path))]
    write_comparison(compare_runs(runs, "sync-sgd"), comparison)
    page = page_of(comparison)
    best = "dlb: test accuracy 96.00 ± 1.00 %, the best of 2"
    against = "compared with sync-sgd: +2.00 ± 2.48 points, no difference shown"
    assert page.headline == f"{best}; {against}"
    assert "Reference: sync-sgd, the first algorithm. Compared with sync-sgd, no" in page.text
    shown = [row[:4] for row in page.rows if row[:1] in (["dlb"], ["sync-sgd"])]
    assert shown == [
        ["dlb", "3", "96.00 ± 1.00", "+2.00 ± 2.48"],
        ["sync-sgd", "3", "94.00 ± 0.00", "reference"],
    ]
    (comparison / "comparison.csv").write_text("algorithm,reference\nx,gone\n")
    assert "Reference: dlb, the first" in page_of(comparison).text


@pytest.mark.usefixtures("no_pictures")
def test_page_of_a_comparison_of_another_metric(tmp_path: Path) -> None:
    named = {"metric_name": "rmse", "metric_mode": "min"}
    open_folder(tmp_path, CONFIG)
    for arm, finals in {"a": (2.0, 2.0, 2.0), "b": (1.8, 1.7, 1.6)}.items():
        for seed, rmse in enumerate(finals):
            write_run(RunConfig(seed=seed, out=str(tmp_path / f"{arm}-seed{seed}")), rmse, **named)
    page = page_of(tmp_path)
    against = "compared with a: -0.300 ± 0.248, better"
    assert page.headline == f"b: test rmse 1.700 ± 0.100, the best of 2; {against}"
    assert ["rmse", "rmse of the final model, mean ± sample"] in [
        [row[0], row[1][:38]] for row in page.rows if len(row) == 2
    ]
    assert "accuracy" not in page.text
    assert "test rmse 0.875 after" in page_of(run_folder(tmp_path / "x", **named)).text


@pytest.mark.usefixtures("no_pictures")
def test_missing_and_damaged_runs_are_named_and_the_rest_is_reported(comparison: Path) -> None:
    shutil.rmtree(comparison / "sync-sgd-seed0")
    (comparison / "sync-sgd-seed1" / "summary.json").unlink()
    (comparison / "dlb-seed2" / "epochs.csv").write_text("epoch\n1\n")
    page = page_of(comparison)
    assert page.headline.startswith("dlb: test accuracy 95.50 ± 0.71 %")
    assert "not included: sync-sgd, seed 0: missing" in page.text
    assert "not included: sync-sgd, seed 1: not finished" in page.text
    assert "not included: dlb, seed 2: the run in " in page.text
    for path in comparison.glob("*/summary.json"):
        path.unlink()
    line = refusal(write, comparison, comparison / "x.html")
    assert "holds no finished run; dlb, seed 0" in line


REPRODUCTION = """
cell,arm,accuracy_percent,deviation,verdict
a-32-1,dlb,71.234,0.512,reference
a-32-1,sync-sgd,69.983,0.512,worse
b-32-1,dlb,60.0,0.512,reference
b-32-1,sync-sgd,61.0,0.512,no difference shown (needs two seeds)
b-32-1,byteps,,,
"""
"""Two cells of two arms; in the second cell nothing was measured of a third."""

OF_EACH_ROW = {
    **{"mode": "table", "n": "3", "difference_points": "1.251", "half_width_points": "0.5"},
    **{"samples": "1000", "paper_percent": "70.125", "paper_label": "paper, computed"},
}


def reproduction(folder: Path) -> Path:
    rows = [{**row, **OF_EACH_ROW} for row in csv.DictReader(REPRODUCTION.strip().splitlines())]
    empty = dict.fromkeys({part for names in _TABLE.values() for part in names.split(" ± ")}, "")
    (folder / "reproduction.csv").write_text(csv_of([{**empty, **row} for row in rows]))
    return folder


@pytest.mark.usefixtures("no_pictures")
def test_page_of_a_reproduction(tmp_path: Path, comparison: Path) -> None:
    (comparison.rename(tmp_path / "a-32-1") / "figure-timing.png").write_bytes(b"a picture")
    page = page_of(reproduction(tmp_path))
    assert page.headline.endswith(": dlb is shown better than 1 of 2 rivals, worse than 0")
    expected = ["dlb", "3", "71.23 ± 0.51", "1.25 ± 0.50", "reference", "1,000"]
    assert [*expected, "70.12", "paper, computed"] in page.rows
    worse = "no difference shown (needs two seeds)"
    assert ["sync-sgd", "3", "61.00 ± 0.51", "1.25 ± 0.50", worse] in [row[:5] for row in page.rows]
    assert "data:image/png;base64,YSBwaWN0dXJl" in page.sources
    assert ["byteps", "3", "-"] in [row[:3] for row in page.rows]
    assert ["dlb", "3", "96.00 ± 1.00"] in [row[:3] for row in page.rows]
    assert "b-32-1 holds no finished run" in page.text


# --- folders that are none


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("x", "", "holds none of reproduction.csv, comparison.toml, config.toml"),
        ("config.toml", "no-such-key = 1", "no-such-key = 1: unknown key"),
        ("summary.json", "", "blsgd run --resume"),
        ("reproduction.csv", "cell,arm\na,dlb\n", "use the version of flower-blsgd that wrote it"),
        ("comparison.toml", "", "x holds no finished run"),
    ],
)
def test_folder_that_is_none_of_this_version_is_refused(
    tmp_path: Path, file: str, text: str, words: str
) -> None:
    folder = tmp_path / "x"
    if file in ("config.toml", "summary.json"):
        run_folder(folder)
    else:
        folder.mkdir()
    (folder / file).write_text(text)
    assert words in refusal(write, folder, tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_summary_of_another_version_and_a_file_that_cannot_be_written_are_refused(
    tmp_path: Path,
) -> None:
    other, folder = run_folder(tmp_path / "other", workers=[{}]), run_folder(tmp_path / "x")
    line = refusal(write, other, tmp_path / "x.html")
    assert "use the version of flower-blsgd that wrote it" in line
    assert "cannot be written: " in refusal(write, folder, tmp_path / "none" / "x.html")
