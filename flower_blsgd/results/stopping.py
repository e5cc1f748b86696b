"""Keep track of the best model, and decide whether evaluations end a run early."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..config import RunConfig
from ..errors import UsageError
from ..fields import from_json
from .folder import EpochRow
from .metric import ACCURACY, Metric


def refuse_other_metric(config: RunConfig, name: str, whose: str) -> None:
    """Raise UsageError if the run shall stop at an accuracy, which is not the metric."""
    if config.stop_at_accuracy and name != ACCURACY.name:
        raise UsageError(
            f"stop-at-accuracy = {config.stop_at_accuracy:g}: the {whose}'s metric is "
            f"{name or 'missing'}; leave the setting out, or use patience"
        )


@dataclass(frozen=True)
class Best:
    """The first best model so far: its round, its epoch and the figure of its metric."""

    round: int
    epoch: int
    value: float


class EarlyStopping:
    """Finds the best model, and ends a run at an accuracy or when patience is exhausted.

    The settings are ``stop-at-accuracy`` and ``patience``. `best` is None before an evaluation with
    a finite figure.
    """

    def __init__(self, config: RunConfig, metric: Metric = ACCURACY) -> None:
        self._config = config
        self.best: Best | None = None
        self._metric = metric
        self._since_best = 0

    def add(self, row: EpochRow, server_round: int, stopped: bool) -> str:
        """Add an evaluation of the model of a round; return why it is ignored, else nothing.

        After the run has `stopped`, late results may still improve the best model. They do not
        restart patience, so a resumed run knows that it has ended.
        """
        value = row.value
        if value is None:
            return ""
        known, sign = math.isfinite(value), self._metric.sign
        if known and (self.best is None or sign * value > sign * self.best.value):
            self.best = Best(server_round, row.epoch, value)
            self._since_best = self._since_best if stopped else 0
            return ""
        self._since_best += 1
        return "" if known else f"{self._metric.name} is not a number"

    @property
    def ended_by(self) -> Literal["", "stop-at-accuracy", "patience"]:
        """The setting that ends the run before its budget; empty if it does not end."""
        config, best = self._config, self.best
        if best and config.stop_at_accuracy and best.value >= config.stop_at_accuracy:
            return "stop-at-accuracy"
        return "patience" if best and 0 < config.patience <= self._since_best else ""

    def reason(self) -> str | None:
        """Return why the run ends before its budget; None if it does not."""
        config, best = self._config, self.best
        if best is None:
            return None
        shown = self._metric.named(best.value)
        if self.ended_by == "stop-at-accuracy":
            return f"{shown} (stop-at-accuracy = {config.stop_at_accuracy:g})"
        if self.ended_by == "patience":
            return (
                f"{self._since_best} evaluations without a better result than {shown} in epoch "
                f"{best.epoch} (patience = {config.patience})"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON can hold it."""
        return {"best": self.best and asdict(self.best), "since_best": self._since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; LookupError, TypeError or ValueError if it is invalid."""
        self.best = from_json(Best, state["best"]) if state["best"] else None
        self._since_best = int(state["since_best"])
