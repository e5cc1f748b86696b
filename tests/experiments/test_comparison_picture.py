"""The picture of a comparison."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_blsgd.experiments.comparison import compare
from flower_blsgd.experiments.comparison_picture import draw_comparison
from flower_blsgd.experiments.line_styles import styles_of

from ..results.drawings import pixels_of, texts
from .made_runs import ALGORITHMS, made_run, several


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keep the figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: object, **more: object) -> None:
        saved.append(self)
        save(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


@pytest.mark.parametrize("count", [1, 3, 11])
def test_picture_of_few_and_many(tmp_path: Path, figures: list[Figure], count: int) -> None:
    names = ALGORITHMS[:count]
    path = tmp_path / "comparison.png"
    draw_comparison(compare(several(names), names[0]), path)
    for style in styles_of(list(names)).values():
        assert pixels_of(path, style.color) > 100
    (figure,) = figures
    curves, ranking, waiting = figure.axes
    assert [label.get_text() for label in ranking.get_yticklabels()] == list(names)
    assert "digits, 3 epochs, 3 seeds" in figure.get_suptitle()
    assert curves.get_xlabel() == "training time (s)"
    assert curves.get_ylabel().startswith("accuracy (%), axis starts at ")
    assert ranking.get_xlabel().startswith("accuracy (%), axis starts at ")
    assert len(waiting.patches) == count
    top, bottom = ranking.get_ylim()[::-1]
    assert top < 0 < bottom


def test_line_ends_at_the_mean_of_what_was_reached(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [
        made_run("sync-sgd", 0, (0.5, None, 0.9), 1.0),
        made_run("sync-sgd", 1, (0.6, 0.7, 0.8), 2.0),
    ]
    draw_comparison(compare(runs, "sync-sgd"), tmp_path / "x.png")
    line = figures[0].axes[0].lines[0].get_xydata()
    # Common from 2 s to 3 s: there 0.6 and 0.7, 0.65 and 0.9; ends at 3 s and 6 s.
    np.testing.assert_allclose(line, [(2, 65), (3, 77.5), (4.5, 85)])


def test_panel_of_simulated_devices_only_if_all_are_known(
    tmp_path: Path, figures: list[Figure]
) -> None:
    known = [made_run(name, 0, (0.5, 0.9), 2.0, 0.5) for name in ("dlb", "byteps")]
    draw_comparison(compare(known, "dlb"), tmp_path / "x.png")
    _, middle, *_ = figures[0].axes
    assert len(figures[0].axes) == 4
    assert "simulated devices" in middle.get_xlabel()
    assert "computed" in middle.get_xlabel()
    np.testing.assert_allclose(middle.lines[0].get_xydata(), [(0.5, 50), (1, 90)])

    draw_comparison(compare([*known, made_run("fednova", 0)], "dlb"), tmp_path / "x.png")
    assert len(figures[1].axes) == 3


def test_runs_far_below_are_named_at_the_edge(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [*several(ALGORITHMS[:3]), made_run("byteps", 0, (0.1, 0.1))]
    draw_comparison(compare(runs, ALGORITHMS[0]), tmp_path / "x.png")
    assert figures[0].axes[1].get_xlim()[0] > 90
    assert "\N{LEFTWARDS ARROW} 10.0" in texts(figures[0])


def test_time_is_logarithmic_where_one_takes_far_longer(
    tmp_path: Path, figures: list[Figure]
) -> None:
    runs = [made_run("dlb", 0, seconds_per_epoch=1.0), made_run("byteps", 0, seconds_per_epoch=50)]
    draw_comparison(compare(runs, "dlb"), tmp_path / "x.png")
    assert figures[0].axes[0].get_xscale() == "log"
    assert "logarithmic" in figures[0].axes[0].get_xlabel()


def test_missing_evaluations(tmp_path: Path, figures: list[Figure]) -> None:
    never = made_run("dlb", 0, (None, None), fast_waiting_share=None)
    draw_comparison(compare([never, made_run("byteps", 0)], "byteps"), tmp_path / "x.png")
    assert {"not measured", "not known"} <= texts(figures[0])
    draw_comparison(compare([never], "dlb"), tmp_path / "y.png")
    assert "no test accuracy was measured" in texts(figures[1])
    # Only the last epoch, and a single one.
    once = [made_run("dlb", seed, (None, 0.9 + seed / 100)) for seed in (0, 1)]
    draw_comparison(compare(once, "dlb"), tmp_path / "z.png")
    np.testing.assert_allclose(figures[2].axes[0].lines[0].get_xydata(), [(4, 90.5)])


def test_names_at_the_ends_of_lines_overlap_neither_each_other_nor_lines(
    tmp_path: Path, figures: list[Figure]
) -> None:
    runs = several(ALGORITHMS)
    draw_comparison(compare(runs, ALGORITHMS[0]), tmp_path / "x.png")
    axes = figures[0].axes[0]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert boxes
    for place, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:place])


def test_all_looks_are_different_and_an_unknown_algorithm_has_one_too() -> None:
    styles = styles_of([*ALGORITHMS, "mine", "yours"])
    assert len({(style.color, style.line) for style in styles.values()}) == 13
    assert len({style.marker for style in styles.values()}) == 12
