"""Keep track of the best model, and decide whether evaluations end a run early."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..config import RunConfig
from .folder import EpochRow, of_plain


@dataclass(frozen=True)
class Best:
    """The first model with the highest accuracy so far: its round, its epoch and its accuracy."""

    round: int
    epoch: int
    accuracy: float


class EarlyStopping:
    """Finds the best model, and ends a run at an accuracy or when patience is exhausted.

    Parameters
    ----------
    config : RunConfig
        The settings ``stop-at-accuracy`` and ``patience``.
    metric_is_accuracy : bool
        Whether all values of the metric were in [0, 1] so far; may be set at any time.

    Attributes
    ----------
    best : Best, optional
        None before an evaluation, and if the metric is not an accuracy.
    """

    def __init__(self, config: RunConfig, metric_is_accuracy: bool) -> None:
        self._config = config
        self.best: Best | None = None
        self.metric_is_accuracy = metric_is_accuracy
        self._since_best = 0

    def add(self, row: EpochRow, server_round: int, stopped: bool) -> str:
        """Add an evaluation of the model of a round; return why it is ignored, else nothing.

        After the run has `stopped`, late results may still improve the best model. They do not
        restart patience, so a resumed run knows that it has ended.
        """
        accuracy = row.accuracy
        if not self.metric_is_accuracy:
            self.best = None
            return "the metric has values outside [0, 1]"
        if accuracy is None:
            return ""
        known = math.isfinite(accuracy)
        if known and (self.best is None or accuracy > self.best.accuracy):
            self.best = Best(server_round, row.epoch, accuracy)
            self._since_best = self._since_best if stopped else 0
            return ""
        self._since_best += 1
        return "" if known else "the accuracy is not a number"

    def reason(self) -> str | None:
        """Return why the run ends before its budget; None if it does not."""
        config, best = self._config, self.best
        if best is None:
            return None
        if config.stop_at_accuracy and best.accuracy >= config.stop_at_accuracy:
            return f"accuracy {best.accuracy:.2%} (stop-at-accuracy = {config.stop_at_accuracy:g})"
        if config.patience and self._since_best >= config.patience:
            return (
                f"{self._since_best} evaluations without more than the {best.accuracy:.2%} of "
                f"epoch {best.epoch} (patience = {config.patience})"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON can hold it."""
        return {"best": self.best and asdict(self.best), "since_best": self._since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; LookupError, TypeError or ValueError if it is invalid."""
        self.best = of_plain(Best, state["best"]) if state["best"] else None
        self._since_best = int(state["since_best"])
