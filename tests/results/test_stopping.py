"""When evaluations end a run early, and what a resumed run knows of that."""

import json

from flower_blsgd.config import RunConfig
from flower_blsgd.results.stopping import Best, EarlyStopping

from .records import epoch


def test_late_result_after_the_end_may_be_the_best_but_does_not_restart_patience() -> None:
    config = RunConfig(patience=1)
    stopping = EarlyStopping(config)
    for number in (1, 2):
        assert stopping.reason() is None
        stopping.add(epoch(number, accuracy=0.5), 4 * number, stopped=False)
    assert stopping.reason() == (
        "1 evaluations without a better result than accuracy 50.00% in epoch 1 (patience = 1)"
    )
    stopping.add(epoch(3, accuracy=0.75), 12, stopped=True)
    assert stopping.best == Best(12, 3, 0.75)
    assert stopping.reason() is not None
    resumed = EarlyStopping(config)
    resumed.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    assert (resumed.best, resumed.reason()) == (stopping.best, stopping.reason())
