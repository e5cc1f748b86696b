"""Interface of the ClientApp to the work behind it: a task, or the user's training script."""

from typing import Protocol

from flwr.app import ArrayRecord

from ..protocol import EvaluateOrder, EvaluateReport, TrainOrder, TrainReport


class Executor(Protocol):
    """Executor of one worker's orders."""

    @property
    def num_test(self) -> int:
        """Number of test samples, of which an order to evaluate has a slice."""

    def fingerprints(self) -> tuple[str, str]:
        """Return the fingerprints of the training data and of the model."""

    def seconds_per_step(self, batch_size: int, seconds: float) -> float:
        """Measure the speed in about `seconds`; 0 if only rounds of training can do it."""

    def train(self, order: TrainOrder) -> TrainReport:
        """Run the steps of an order."""

    def own_model(self) -> ArrayRecord:
        """Return the worker's model after the last order, for a checkpoint; empty without one."""

    def evaluate(self, order: EvaluateOrder) -> EvaluateReport:
        """Evaluate the model of an order on its slice of the test set."""

    def optimizer_state(self) -> ArrayRecord:
        """Return the state that the optimizer keeps between orders, for a checkpoint."""
