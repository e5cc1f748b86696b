"""Flower's server optimizers, applied to the average of biased local SGD."""

from collections.abc import Collection, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flower_blsgd import BiasedLocalSGD


class ServerOptimized(BiasedLocalSGD):
    """Biased local SGD with the server step of another Flower strategy.

    That strategy gets one reply per round: the average of all valid replies, weighted by completed
    work. Samples, steps, weights and failure handling are those of `BiasedLocalSGD`. The step from
    the old model to the new one is that of the other strategy.

    Parameters
    ----------
    num_samples : int
        As for `BiasedLocalSGD`.
    optimizer : FedAvg
        FedAvgM, FedAdam, FedYogi or FedAdagrad; every run needs a new one.
    parameter_names : collection of str
        The tensors to optimize. Others, such as BatchNorm's statistics, are only averaged: Adam
        could make a variance negative.
    **arguments
        As for `BiasedLocalSGD`.
    """

    def __init__(
        self,
        num_samples: int,
        optimizer: FedAvg,
        parameter_names: Collection[str],
        **arguments: Any,
    ) -> None:
        super().__init__(num_samples, **arguments)
        optimizer.fraction_train = 0.0  # it sends no messages
        self.optimizer = optimizer
        self.parameter_names = parameter_names

    def summary(self) -> None:
        """Log the settings of both."""
        self.optimizer.summary()
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return our orders; the optimizer records the initial model of the round."""
        parameters = self._parameters(arrays)
        self.optimizer.configure_train(server_round, parameters, ConfigRecord(), grid)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average, and apply the optimizer's step."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        weight = MetricRecord({self.optimizer.weighted_by_key: 1})
        content = RecordDict({"arrays": self._parameters(arrays), "metrics": weight})
        average = Message(content, dst_node_id=0, message_type="train")
        moved, _ = self.optimizer.aggregate_train(server_round, [average])
        assert moved is not None
        for name, array in moved.items():
            # FedAdam returns float64, but the model must keep its dtypes.
            arrays[name] = Array(array.numpy().astype(arrays[name].numpy().dtype))
        return arrays, metrics

    def _parameters(self, arrays: ArrayRecord) -> ArrayRecord:
        return ArrayRecord({name: arrays[name] for name in self.parameter_names})
