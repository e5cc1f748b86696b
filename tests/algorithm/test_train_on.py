import pytest

from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.algorithm.train_on import TrainOn, TrainOnAll, TrainOnFast

FAST, SLOW = Participant(True, 2), Participant(False, 2)


@pytest.mark.parametrize(
    ("train_on", "fast", "slow", "sums"),
    [
        (TrainOnAll(), True, True, False),
        (TrainOnFast(), True, False, False),
        (TrainOnFast(slow_sums=True), True, False, True),
    ],
)
def test_who_trains_and_who_sums(train_on: TrainOn, fast: bool, slow: bool, sums: bool) -> None:
    assert (train_on.trains(FAST), train_on.trains(SLOW)) == (fast, slow)
    assert train_on.slow_sums is sums
