"""The picture of which samples were picked, and of how old the recorded losses are."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from flower_blsgd.results.folder import EpochRow
from flower_blsgd.results.sampling_picture import draw_sampling

from .drawings import pixels_of, texts
from .records import epoch, nothing_recorded, stats

FAST, SLOW, OLD = "#D55E00", "#0072B2", "#CC79A7"
NAN = float("nan")


def rows_of(epochs: int, **values: float) -> list[EpochRow]:
    """Return epochs of which the first knows nothing."""
    later = [epoch(n, sampling=stats(**values)) for n in range(2, epochs + 1)]
    return [epoch(1, sampling=nothing_recorded()), *later]


def line(axes: Axes, label: str) -> np.ndarray:
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(found.get_xydata())


def test_sampling_hand_worked(tmp_path: Path, figures: list[Figure]) -> None:
    path = tmp_path / "sampling.png"
    rows = [
        *rows_of(2),
        epoch(3, sampling=stats(fast_picked_loss_mean=1.25, left_out_age_epochs_mean=2.5)),
    ]
    draw_sampling(rows, "biased-local-sgd, digits", path)
    assert pixels_of(path, FAST) > 200
    assert pixels_of(path, SLOW) > 200
    assert pixels_of(path, OLD) > 200

    (figure,) = figures
    left, right = figure.axes
    for axes, label, values in (
        (left, "given to fast workers, mean", (1.5, 1.25)),
        (left, "given to slow workers, mean", (1.125, 1.125)),
        (left, "all samples, mean", (1.0, 1.0)),
        (right, "all samples, mean", (0.5, 0.5)),
        (right, "all samples, 90th percentile", (1.0, 1.0)),
        (right, "not given to a fast worker, mean", (1.75, 2.5)),
        (right, "not given to a fast worker, 90th percentile", (3.0, 3.0)),
    ):
        np.testing.assert_allclose(line(axes, label), list(zip((2, 3), values, strict=True)))
    (band,) = [c for c in left.collections if isinstance(c, PolyCollection)]
    assert band.get_label() == "all samples, from the 10th to the 90th percentile"
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.25, 2.0)


def test_sampling_labels(tmp_path: Path, figures: list[Figure]) -> None:
    draw_sampling(rows_of(4), "biased-local-sgd, digits", tmp_path / "sampling.png")
    (figure,) = figures
    left, right = figure.axes
    assert figure.get_suptitle() == "biased-local-sgd, digits"
    assert left.get_title(loc="left") == "Loss of the samples that workers were given"
    assert right.get_title(loc="left") == "How old those recorded losses were"
    assert left.get_ylabel() == "last recorded loss, as the epoch began"
    assert right.get_ylabel() == "age (epochs)"
    for axes in (left, right):
        assert axes.get_xlabel() == "epoch"
        legend = axes.get_legend()
        assert legend is not None
        assert len(legend.get_texts()) == 4
        # Below the axes: it hides no line.
        assert legend.get_window_extent().y1 < axes.get_window_extent().y0


@pytest.mark.parametrize("epochs", [2, 3, 300])
def test_sampling_of_few_and_many_epochs(
    tmp_path: Path, figures: list[Figure], epochs: int
) -> None:
    path = tmp_path / "sampling.png"
    draw_sampling(rows_of(epochs), "x", path)
    assert pixels_of(path, FAST) > 20
    assert pixels_of(path, "#E3E3E3") > 500  # the band
    for axes in figures[0].axes:
        assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the first epoch records the losses"),
        (rows_of(1), "the first epoch records the losses"),
        ([epoch(n, sampling=nothing_recorded()) for n in (1, 2)], "no worker reported its losses"),
    ],
    ids=["no epoch", "one epoch", "clients without losses"],
)
def test_sampling_with_nothing_to_draw_says_why(
    tmp_path: Path, figures: list[Figure], rows: list[EpochRow], words: str
) -> None:
    path = tmp_path / "sampling.png"
    draw_sampling(rows, "x", path)
    assert pixels_of(path, FAST) == 0
    assert any(text.startswith(words) for text in texts(figures[0]))


def test_sampling_of_a_team_without_slow_workers(tmp_path: Path, figures: list[Figure]) -> None:
    path = tmp_path / "sampling.png"
    draw_sampling(rows_of(4, slow_picked_loss_mean=NAN), "x", path)
    assert pixels_of(path, SLOW) == 0
    assert not any("slow" in text for text in texts(figures[0]))


def test_sampling_where_nothing_is_left_out(tmp_path: Path, figures: list[Figure]) -> None:
    rows = rows_of(4, left_out_age_epochs_mean=NAN, left_out_age_epochs_p90=NAN)
    draw_sampling(rows, "x", tmp_path / "sampling.png")
    assert not any("not given" in text for text in texts(figures[0]))


@pytest.mark.parametrize(
    ("lowest", "easiest", "scale"),
    [
        (0.5, 0.25, "linear"),
        (0.01, 0.001, "log"),
        (0.01, 0.0, "log"),
        (0.5, 1e-7, "linear"),  # the easiest samples alone do not ask for it
        (0.0, 0.0, "linear"),
        (-0.5, -1.0, "linear"),
    ],
)
def test_sampling_scale(
    tmp_path: Path, figures: list[Figure], lowest: float, easiest: float, scale: str
) -> None:
    """The 90th percentile is 2."""
    end = stats(
        all_loss_mean=lowest,
        slow_picked_loss_mean=lowest,
        fast_picked_loss_mean=lowest,
        all_loss_p10=easiest,
    )
    draw_sampling([*rows_of(2), epoch(3, sampling=end)], "x", tmp_path / "sampling.png")
    left = figures[0].axes[0]
    assert left.get_yscale() == scale
    bottom, top = left.get_ylim()
    assert bottom < lowest
    assert top > 2
    if scale == "log":
        written = [tick.get_text() for tick in left.get_yticklabels()]
        assert {"0.01", "0.1", "1"} <= set(written)
