"""Which arguments of the strategy do not go together: ValueError, one line, named."""

from typing import Any

import pytest

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import NormalizedWeighting
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.run import make_strategy


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"fraction_train": 0.5}, "fraction_train = 0.5"),
        ({"batch_size": 1}, "batch_size = 1 must be at least 2"),
        ({"epoch": "tables"}, "epoch = 'tables' must be one of samples, table"),
        ({"momentum_buffers": "kept"}, "momentum_buffers = 'kept' must be one of keep"),
        ({"clock": "walls"}, "clock = 'walls' must be one of wall, device"),
        ({"deadline_seconds": -1.0}, "deadline_seconds = -1.0"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds = nan"),
        (
            {"weights": NormalizedWeighting()},
            "momentum_buffers = 'keep': NormalizedWeighting holds for 'reset' only",
        ),
        (
            {"weights": NormalizedWeighting(), "momentum_buffers": "average"},
            "momentum_buffers = 'average'",
        ),
    ],
)
def test_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="=") as refused:
        BiasedLocalSGD(100, **arguments)
    line = str(refused.value)
    assert told in line
    assert "\n" not in line


def test_fednova_is_accepted_with_reset_momentum() -> None:
    BiasedLocalSGD(100, weights=NormalizedWeighting(), momentum_buffers="reset")


def test_settings_refuse_other_momentum_with_fednova_in_one_line() -> None:
    for changes in (
        {"algorithm": "fednova", "momentum_buffers": "keep"},
        {"algorithm": "weighted-local-sgd", "weights": "normalized"},
    ):
        with pytest.raises(UsageError, match='which needs "reset"') as told:
            make_strategy(RunConfig(**changes), 1437, 2)  # type: ignore[arg-type]
        assert "\n" not in str(told.value)
    accepted = {"algorithm": "weighted-local-sgd", "weights": "normalized"}
    make_strategy(RunConfig(**accepted, momentum_buffers="reset"), 1437, 2)  # type: ignore[arg-type]


def test_adamw_steps_count_alike_in_fednova() -> None:
    settings = RunConfig(algorithm="fednova", optimizer="adamw", nesterov=True).part_settings
    assert (settings.momentum, settings.nesterov) == (0.0, False)
