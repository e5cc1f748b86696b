"""The tasks of the study by name, and what an arm's model is worth in the end."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from flower_blsgd import Task
from flower_blsgd.algorithm.randomness import derived_seed, generator
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.batches import BatchSource, Samples, tensor_parts
from flower_blsgd.worker.evaluation import evaluate_sums

_STATISTICS_SAMPLES, _STATISTICS_BATCH = 4096, 256
"""Of the training set, for BatchNorm: as many for every arm."""


@dataclass(frozen=True)
class Places:
    """Where the data are.

    Parameters
    ----------
    cifar10 : str
        Folder of CIFAR-10.
    tiny : bool (default: False)
        Whether a few hundred samples are enough.
    """

    cifar10: str
    tiny: bool = False


_IMAGES = {"model": "resnet8", "weight-decay": 1e-4, "momentum": 0.9}


def settings_of(task: str, places: Places) -> dict[str, Any]:
    """Return the settings of a task of the study, as of the run config.

    Parameters
    ----------
    task : {"cifar10", "validation"}
        All of CIFAR-10 with its test set; or 12,500 of its training images to train on, and the
        other 37,500 to choose by. The second never looks at the test set.
    places : Places
        Where the data are.
    """
    settings = {**_IMAGES, "task": "cifar10", "data": places.cifar10}
    if places.tiny:
        settings["max-samples"] = 512
    if task == "validation":
        settings["validation-share"] = 0.75
    return settings


def loaded(settings: dict[str, Any], seed: int) -> Task:
    """Return the task that settings name."""
    options = {"max_samples": settings["max-samples"]} if "max-samples" in settings else {}
    share = settings.get("validation-share", 0.0)
    names = (settings[key] for key in ("task", "data", "model"))
    return load_task(*names, validation_share=share, seed=seed, **options)


def whole(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets as tensors in memory, as a loop by hand has them."""
    if parts := tensor_parts(samples):
        inputs, targets = parts
        return inputs, targets
    source = BatchSource(samples, torch.device("cpu"))
    return source.batch(torch.arange(len(source)))


def finished(task: Task, model: nn.Module) -> dict[str, float]:
    """Recompute BatchNorm's statistics, and return what the model is worth on the test data.

    The training samples for them are the same for all arms, augmented as in training: statistics
    of plain images cost the trained model one to four points.
    """
    chosen = generator(0, "study-statistics").permutation(task.num_train)[:_STATISTICS_SAMPLES]
    source = BatchSource(task.train, torch.device("cpu"))
    inputs = (source.batch(part)[0] for part in torch.from_numpy(chosen).split(_STATISTICS_BATCH))
    draw = torch.Generator().manual_seed(derived_seed(0, "study-statistics"))
    update_bn((task.augment(one, draw) if task.augment else one for one in inputs), model)
    size = task.evaluation_batch_size or 1024
    report = evaluate_sums(model, task.test, task.loss, task.metric, batch_size=size)
    loss = report.loss if math.isfinite(report.loss) else None
    return {"accuracy": task.figure(report), "loss": loss}


def saved(task: Task, file: Path) -> nn.Module:
    """Return the model whose weights a file has."""
    from safetensors.torch import load_file

    model = task.fresh_model(0)
    model.load_state_dict(load_file(file))
    return model
