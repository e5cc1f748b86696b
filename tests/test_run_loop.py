"""The loop of a run: what is done after a round and at the end of an epoch, in which order."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import MetricRecord

from flower_blsgd.config import RunConfig
from flower_blsgd.run import _train_rounds
from flower_blsgd.strategy.rounds import EpochEnd
from flower_blsgd.workload import RunEvaluation

from .in_process_grid import InProcessGrid, toy_arrays
from .strategy.orders import strategy_of, two


class Later:
    """An async evaluation that has the result of a model, or None, after so many rounds."""

    def __init__(self, results: list[MetricRecord | None], rounds: int) -> None:
        self.unevaluated: list[EpochEnd] = []
        self._results, self._rounds, self._left = results, rounds, 0

    def begin(self, end: EpochEnd) -> bool:
        self.unevaluated.append(end)
        self._left = self._rounds
        return True

    def take(self) -> EpochEnd | None:
        self._left -= 1
        if not self.unevaluated or self._left > 0:
            return None
        return dataclasses.replace(self.unevaluated[0], metrics=self._results.pop(0))

    def finish(self) -> None:
        del self.unevaluated[0]


class Evaluated(RunEvaluation):
    """Evaluates nothing: the accuracy is a tenth of the round."""

    def __init__(self, calls: list[tuple[str, int]], later: Later) -> None:
        self._work: Any = SimpleNamespace(num_test=10)
        self._on_workers: Any = later
        self._calls = calls

    def _evaluated(self, end: EpochEnd) -> EpochEnd:
        self._calls.append(("evaluate", end.round))
        return dataclasses.replace(end, metrics=MetricRecord({"accuracy": end.round / 10}))


class Seen:
    """What a run of two workers, with epochs of two rounds, tells its recorder."""

    def __init__(self, later: Later, stops_when_late: bool = False, **settings: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        self.ends: list[EpochEnd] = []
        self._stops_when_late = stops_when_late
        recorder: Any = SimpleNamespace(
            config=RunConfig(**settings),
            folder=SimpleNamespace(path=None),
            history=SimpleNamespace(evaluation_missing=False, predicted=None),
            say=lambda line: None,
            add_round=lambda record, measures: self.calls.append(("round", record.round)),
            add_epoch=self._add,
        )
        checkpoints: Any = SimpleNamespace(
            after_round=lambda server_round, arrays, idle: self.calls.append(
                ("checkpoint", server_round)
            ),
            save=lambda end: self.calls.append(("save", end.epoch)),
        )
        evaluation = Evaluated(self.calls, later)
        grid, strategy = InProcessGrid(two()), strategy_of(12)
        _train_rounds(grid, strategy, toy_arrays(), 0, recorder, checkpoints, evaluation)

    def _add(self, end: EpochEnd) -> bool:
        self.calls.append(("late" if end.late else "epoch", end.epoch))
        self.ends.append(end)
        return end.late and self._stops_when_late

    @property
    def evaluated(self) -> list[int]:
        return [server_round for name, server_round in self.calls if name == "evaluate"]


@pytest.mark.parametrize("fails", [False, True])
def test_result_of_an_async_evaluation_comes_later_and_the_last_model_is_evaluated_by_all(
    fails: bool,
) -> None:
    seen = Seen(Later([None if fails else MetricRecord({"accuracy": 0.5})], 1), epochs=2)
    assert seen.calls == [
        *(("round", 1), ("checkpoint", 1), ("round", 2), ("checkpoint", 2)),
        *(("epoch", 1), ("save", 1), ("round", 3), ("checkpoint", 3)),
        *([("evaluate", 2)] if fails else []),
        *(("late", 1), ("save", 1), ("round", 4), ("checkpoint", 4)),
        *(("evaluate", 4), ("epoch", 2), ("save", 2)),
    ]
    accuracy = 0.2 if fails else 0.5
    assert [(end.epoch, end.round, end.late, end.metrics) for end in seen.ends] == [
        (1, 2, False, None),
        (1, 2, True, {"accuracy": accuracy}),
        (2, 4, False, {"accuracy": 0.4}),
    ]
    assert seen.ends[0].arrays is seen.ends[1].arrays


@pytest.mark.parametrize("rounds", [2, 9])
def test_async_result_at_the_end_of_the_run_is_taken_if_it_is_there_and_else_dropped(
    rounds: int,
) -> None:
    later = Later([MetricRecord({"accuracy": 0.5})], rounds)
    seen = Seen(later, epochs=2)
    kept = [(end.epoch, end.late) for end in seen.ends]
    assert kept == [(1, False), *([(1, True)] if rounds == 2 else []), (2, False)]
    assert seen.evaluated == [4]
    assert later.unevaluated == []


def test_late_result_ends_the_run_within_an_epoch_with_an_evaluation_of_the_last_model() -> None:
    later = Later([MetricRecord({"accuracy": 0.5})], 1)
    seen = Seen(later, stops_when_late=True, epochs=5)
    kept = [(end.epoch, end.round, end.late) for end in seen.ends]
    assert kept == [(1, 2, False), (1, 2, True), (2, 3, False)]
    assert seen.evaluated == [3]
