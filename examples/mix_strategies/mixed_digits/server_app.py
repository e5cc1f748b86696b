"""The ServerApp: trains once with each combination and prints the results."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi

from flower_blsgd import BiasedLocalSGD, Task, stream
from flower_blsgd.tasks import load_task
from mixed_digits.loss_sampler import LossProportionalSampler
from mixed_digits.server_optimizer import ServerOptimized

app = ServerApp()

MIXTURES: dict[str, Callable[[], dict[str, Any]]] = {
    "hardest samples, plain average": lambda: {},
    "hardest samples, FedAvgM": lambda: {"optimizer": FedAvgM(server_momentum=0.5)},
    "hardest samples, FedAdam": lambda: {"optimizer": FedAdam(eta=0.02)},
    "hardest samples, FedYogi": lambda: {"optimizer": FedYogi(eta=0.02)},
    "by loss, plain average": lambda: {"sampler": LossProportionalSampler()},
    "by loss, FedAvgM": lambda: {
        "sampler": LossProportionalSampler(),
        "optimizer": FedAvgM(server_momentum=0.5),
    },
}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with every combination, each from the same weights."""
    settings = context.run_config
    task = load_task("digits")
    model = task.initial_model(settings["seed"])
    logging.getLogger("flwr").setLevel(logging.WARNING)  # otherwise each run logs its settings
    with stream(grid, context) as streams:
        for name, parts in MIXTURES.items():
            strategy = strategy_of(model, task, settings, **parts())
            start = ArrayRecord(model.state_dict())
            result = strategy.fit(streams, start, epochs=settings["epochs"])
            print(f"{name:32}test accuracy {accuracy(result.arrays, task):.2%}", flush=True)


def strategy_of(
    model: torch.nn.Module, task: Task, settings: Mapping[str, Any], **parts: Any
) -> BiasedLocalSGD:
    """Return a strategy of these parts; workers reset their momentum after every round."""
    kind = BiasedLocalSGD
    if "optimizer" in parts:
        kind = ServerOptimized
        parts["parameter_names"] = [name for name, _ in model.named_parameters()]
    return kind(
        task.num_train,
        batch_size=16,
        local_steps=24,
        local_steps_slow=6,
        learning_rate=settings["learning-rate"],
        seed=settings["seed"],
        momentum_buffers="reset",
        **parts,
    )


def accuracy(arrays: ArrayRecord, task: Task) -> float:
    """Return the accuracy on the test images."""
    model = task.model()
    model.load_state_dict(arrays.to_torch_state_dict())
    inputs, targets = task.test
    with torch.no_grad():
        return float(task.metric(model.eval()(inputs), targets).mean())
