"""The tasks of the study by name, and what an arm's model is worth in the end."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from flower_blsgd import Task
from flower_blsgd.algorithm.sampling import derived_seed, generator
from flower_blsgd.data.image_data import CIFAR10, prepared_images
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.images import BENCHMARKS, random_crop_and_flip
from flower_blsgd.worker.batches import BatchSource, Samples, tensor_parts
from flower_blsgd.worker.evaluation import evaluate_sums

_STATISTICS_SAMPLES, _STATISTICS_BATCH = 4096, 256
"""Of the training set, for BatchNorm: as many for every arm."""


@dataclass(frozen=True)
class Places:
    """Where the data are.

    Parameters
    ----------
    cifar10, ag_news : str
        Folders; empty if there is none.
    tiny : bool (default: False)
        Whether a few hundred samples are enough.
    """

    cifar10: str
    ag_news: str = ""
    tiny: bool = False


_IMAGES = {"model": "resnet8", "weight-decay": 1e-4, "momentum": 0.9}


def settings_of(task: str, places: Places) -> dict[str, Any]:
    """Return the settings of a task of the study, as of the run config.

    Parameters
    ----------
    task : str
        ``"cifar10"``; ``"validation"``, which never looks at the test set; ``"noise-SHARE"``;
        ``"ag-news"``.
    places : Places
        Where the data are.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    kind, _, share = task.partition("-")
    some = {"max-samples": 512} if places.tiny else {}
    if task == "cifar10":
        return {**_IMAGES, "task": "cifar10", "data": places.cifar10, **some}
    if task == "validation":
        counts = {"max-samples": 25_000, **some, "validation-share": 0.5}
        return {**_IMAGES, "task": "cifar10", "data": places.cifar10, **counts}
    if kind == "noise":
        count = 256 if places.tiny else 12_500
        named = "benchmarks.study.tasks:relabelled"
        return {**_IMAGES, "task": named, "data": f"{share}:{count}@{places.cifar10}"}
    if task == "ag-news":
        text = {"task": "ag-news", "model": "encoder", "max-tokens": 64, "optimizer": "adamw"}
        return {**text, "weight-decay": 0.01, "data": places.ag_news, **some}
    raise ValueError(f"no task {task!r}")


def loaded(settings: dict[str, Any], seed: int) -> Task:
    """Return the task that settings name."""
    options = {"max_samples": settings["max-samples"]} if "max-samples" in settings else {}
    if "max-tokens" in settings:
        options["max_tokens"] = settings["max-tokens"]
    share = settings.get("validation-share", 0.0)
    names = (settings[key] for key in ("task", "data", "model"))
    return load_task(*names, validation_share=share, seed=seed, **options)


def relabelled(data: str, model: str) -> Task:
    """Return CIFAR-10 with a share of the training labels drawn anew: ``SHARE:COUNT@FOLDER``.

    The first COUNT training images are trained on; the next COUNT are tested, with true labels.
    Of ten labels drawn one in ten is right by chance, so the others' share is 0.9 SHARE.
    """
    text, _, folder = data.partition("@")
    share, count = float(text.partition(":")[0]), int(text.partition(":")[2])
    prepared = prepared_images(CIFAR10, folder, max_samples=2 * count)
    images, labels = prepared.train
    noisy = np.array(labels[:count])
    draw = generator(0, "study-labels")
    chosen = draw.permutation(count)[: math.floor(share * count + 0.5)]
    noisy[chosen] = draw.integers(0, prepared.num_classes, len(chosen))
    return Task(
        model=lambda: BENCHMARKS["cifar10"].maker(model)(prepared.num_classes),
        train=(images[:count], noisy),
        test=(images[count : 2 * count], labels[count : 2 * count]),
        augment=random_crop_and_flip,
        data_fingerprint=f"{prepared.fingerprint} {text}",
    )


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
    return {"accuracy": report.metric, "loss": loss}


def saved(task: Task, file: Path) -> nn.Module:
    """Return the model whose weights a file has."""
    from safetensors.torch import load_file

    model = task.fresh_model(0)
    model.load_state_dict(load_file(file))
    return model
