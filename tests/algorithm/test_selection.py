"""Which samples an epoch has, with which weights, by which losses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.algorithm.epoch_plan import RoundShape, plan_epoch
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.sampling import SeparatedSampler
from flower_blsgd.algorithm.selection import (
    ActiveBias,
    ImportanceSampling,
    InfoBatch,
    Selected,
    Selection,
    SelectionRequest,
)

from .workers import distinct_losses, highest, table_of, workers

UNSEEN = math.inf


def _select(
    selection: Selection, table: LossTable, epoch: int = 2, share: float = 0.0
) -> Selected | None:
    return selection.select(SelectionRequest(5, epoch, share), table)


# --- which samples


def test_infobatch_worked() -> None:
    """The mean is 4: half of samples 0 to 2 are left out, rounded 2, and the third weighs 2."""
    table = table_of([1.0, 2.0, 3.0, 10.0, UNSEEN])
    found = set()
    for epoch in range(2, 40):
        selected = _select(InfoBatch(), table, epoch)
        assert selected is not None
        assert selected.weights is not None
        assert (selected.indices.dtype, selected.weights.dtype) == (np.int32, np.float32)
        (low, *rest) = selected.indices.tolist()
        assert rest == [3, 4]
        assert selected.weights[[low, 3, 4]].tolist() == [2.0, 1.0, 1.0]
        found.add(low)
    assert found == {0, 1, 2}  # each epoch draws anew
    assert _select(InfoBatch(0.25), table).weights.max() == np.float32(4 / 3)  # type: ignore[union-attr]


def test_infobatch_has_all_samples_at_the_end_and_before_any_loss() -> None:
    table = table_of(distinct_losses(40))
    assert _select(InfoBatch(), table, share=0.874) is not None
    for share in (0.875, 1.0):
        assert _select(InfoBatch(), table, share=share) is None
    assert _select(InfoBatch(), LossTable(40)) is None
    assert _select(InfoBatch(), table_of([3.0] * 40)) is None


@pytest.mark.parametrize(
    ("selection", "losses", "chances"),
    [
        # Losses plus their mean, 3: 12, 4, 4, 4 of 24, two of which are drawn.
        (ImportanceSampling(0.5), [9.0, 1.0, 1.0, 1.0], [1, 1 / 3, 1 / 3, 1 / 3]),
        # 27, 7, 7, 7 of 48: twice the first is more than 1; one of the others is left to draw.
        (ImportanceSampling(0.5), [21.0, 1.0, 1.0, 1.0], [1, 1 / 3, 1 / 3, 1 / 3]),
        # Unseen counts as 5, the highest, and what is below 0 as 0; the mean is 2.5.
        (ImportanceSampling(0.5), [5.0, UNSEEN, 0.0, -3.0], [0.75, 0.75, 0.25, 0.25]),
        (ImportanceSampling(0.5), [0.0] * 4, [0.5] * 4),
        (ImportanceSampling(1.0), [1.0, 2.0, 3.0], [1, 1, 1]),
        # p (1 - p) is 0.25 where p = exp(-loss) is 1/2, and 0 where it is 1 or 0.
        (ActiveBias(0.5), [math.log(2), math.log(2), 0.0, 900.0], [0.75, 0.75, 0.25, 0.25]),
    ],
    ids=str,
)
def test_chances_and_weights_worked(
    selection: ImportanceSampling, losses: list[float], chances: list[float]
) -> None:
    """In 600 epochs each sample comes as often as it should, and its weight is M / (N chance)."""
    table = table_of(losses)
    counts = np.zeros(len(losses))
    for epoch in range(600):
        selected = _select(selection, table, epoch)
        assert selected is not None
        assert (selected.indices.dtype, len(selected.indices)) == (np.int32, round(sum(chances)))
        counts[selected.indices] += 1
    assert counts / 600 == pytest.approx(np.array(chances), abs=0.06)
    if isinstance(selection, ActiveBias):
        assert selected.weights is None
    else:
        assert selected.weights is not None
        expected = selection.share / np.array(chances)
        np.testing.assert_allclose(selected.weights, expected, rtol=1e-6)


@given(
    st.lists(st.sampled_from([0.0, 1e-6, 0.7, 3.0, 1e4, UNSEEN]), min_size=1, max_size=40),
    st.sampled_from([0.01, 0.3, 0.7, 1.0]),
    st.sampled_from([ImportanceSampling, ActiveBias]),
)
def test_drawn_samples_are_as_many_as_they_should(
    losses: list[float], share: float, kind: type[ImportanceSampling]
) -> None:
    table = table_of(losses)
    selected = _select(kind(share), table)
    if selected is None:
        assert set(losses) == {UNSEEN}
        return
    assert len(selected.indices) == max(1, int(share * len(losses) + 0.5))
    assert selected.indices.tolist() == sorted(set(selected.indices.tolist()))
    if selected.weights is not None:
        assert (selected.weights > 0).all()
        assert selected.weights.max() <= 2.0001


def test_refused_shares() -> None:
    wrong = (InfoBatch, 1.0), (InfoBatch, -0.1), (ImportanceSampling, 0.0), (ActiveBias, math.nan)
    for kind, share in wrong:
        with pytest.raises(ValueError, match="must lie in"):
            kind(share)


# --- the plan of an epoch


def test_plan_ranks_the_selected_samples_alone() -> None:
    losses = distinct_losses(300)
    kept = np.flatnonzero(losses < 200).astype(np.int32)
    plan = plan_epoch(
        seed=3,
        epoch=2,
        participants=workers(1, 1, 5),
        shape=RoundShape((4, 2), (5, 5)),  # a round has 20 + 10 samples
        sampler=SeparatedSampler(1.0),
        table=table_of(losses),
        samples_before=300,
        samples_due=450,
        selected=Selected(kept),
    )
    fast = np.concatenate([plan.indices(r, 0) for r in range(plan.rounds)])
    assert {int(kept[i]) for i in highest(losses[kept], len(fast))} == set(fast.tolist())
