"""The tasks of the study, and what an arm's model is worth in the end.

A task is a function, as ``benchmarks.study.tasks:images``. With ``data = "validated@FOLDER"`` it is
for tuning, and never looks at the test data.
"""

import functools
import hashlib
import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn

from flower_blsgd import Task
from flower_blsgd.algorithm.randomness import derived_seed, generator
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.batches import BatchSource
from flower_blsgd.worker.evaluation import evaluate_sums
from flower_blsgd.worker.losses import next_token_loss

_STATISTICS_SAMPLES, _STATISTICS_BATCH = 4096, 256
"""Of the training set, for BatchNorm: as many for every arm."""

LENGTH, WIDTH, LAYERS, HEADS, BYTES = 64, 128, 5, 4, 256
LORA_RANK = 8
VALIDATED = 10_000
TUNED_IMAGES, TESTED_BLOCKS = 40_000, 1024
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


# --- images


def images(data: str, model: str, max_samples: int) -> Task:
    """Return CIFAR-10 with its test set; for tuning, two parts of its training images."""
    part, _, folder = data.rpartition("@")
    if not part:
        return load_task("cifar10", folder, "resnet8", max_samples=max_samples)
    every = load_task("cifar10", folder, "resnet8")
    pixels, labels = every.train
    size = min(TUNED_IMAGES, max_samples or TUNED_IMAGES)
    order = generator(0, "study-images").permutation(len(labels))
    train, test = np.sort(order[:size]), np.sort(order[-min(size, VALIDATED) :])
    return replace(
        every,
        train=(pixels[train], labels[train]),
        test=(pixels[test], labels[test]),
        data_fingerprint=f"{every.data_fingerprint} {part} {size}",
    )


# --- texts


class _Block(nn.Module):
    """A layer of a transformer, with its norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        count, length, _ = values.shape
        parts = self.attention(self.attention_norm(values))
        parts = parts.view(count, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        values = values + self.out(found.transpose(1, 2).reshape(count, length, WIDTH))
        added: Tensor = self.down(functional.gelu(self.up(self.norm(values))))
        return values + added


class Transformer(nn.Module):
    """A causal transformer on bytes, of 1.07 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, shape (batch_size, LENGTH, BYTES)."""
        logits: Tensor = self.head(
            self.norm(self.blocks(self.bytes(tokens.int()) + self.places.weight))
        )
        return logits


class _Adapted(nn.Module):
    """A linear layer that is frozen, and a LoRA adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.first = nn.Linear(layer.in_features, LORA_RANK, bias=False)
        self.second = nn.Linear(LORA_RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = 2 * self.second(self.first(values))
        return added + self.layer(values)


def adapted() -> nn.Module:
    """Return the transformer, frozen, with an adapter for each linear layer of its blocks."""
    model = Transformer().requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, _Adapted(layer))
    return model


def _load_into(file: str, model: nn.Module) -> None:
    """Load the weights of a `Transformer`, also into an adapted one."""
    own = {name.replace(".layer.", "."): one for name, one in model.state_dict().items()}
    with torch.no_grad():
        for name, weights in load_file(file).items():
            own[name].copy_(weights)


def _blocks(text: bytes, most: int) -> Tensor:
    """Return evenly spaced blocks of a text, shape (count, LENGTH)."""
    every = np.frombuffer(text, np.uint8)[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)
    chosen = np.linspace(0, len(every) - 1, min(most, len(every))).astype(int)
    return torch.from_numpy(every[chosen])


def _language_task(
    model: Callable[[], nn.Module], texts: Sequence[bytes], most: int, file: str = ""
) -> Task:
    train, test = _blocks(texts[0], most or 1 << 30), _blocks(texts[1], most or TESTED_BLOCKS)
    return Task(
        model=model,
        train=(train, train),
        test=(test, test),
        loss=next_token_loss,
        metric=next_token_loss,
        metric_mode="min",
        metric_name="nats",
        pretrained=functools.partial(_load_into, file) if file else None,
        evaluation_batch_size=64,
    )


def news(data: str, model: str, max_samples: int) -> Task:
    """Return the news, and a model from scratch."""
    part, _, folder = data.rpartition("@")
    train, test = (
        [text.encode() for text in pyarrow.parquet.read_table(path)["text"].to_pylist()]
        for split in ("train", "test")
        for path in Path(folder).glob(f"{split}-*.parquet")
    )
    held_out = len(train) // 10
    parts = train[held_out:], train[:held_out] if part else test
    return _language_task(Transformer, [b"\n".join(one) for one in parts], max_samples)


def python(data: str, model: str, max_samples: int) -> Task:
    """Return sources, and the model of a file to go on from."""
    return _language_task(Transformer, _sources(bool(data)), max_samples, model)


def lora(data: str, model: str, max_samples: int) -> Task:
    """Return sources, and an adapter for the model of a file."""
    return _language_task(adapted, _sources(bool(data)), max_samples, model)


def _sources(validated: bool) -> tuple[bytes, bytes]:
    """Return Python's standard library, but two tenths of its files, and one of these."""
    root, parts = Path(sysconfig.get_paths()["stdlib"]), ([], [], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not _LEFT_OUT & set(name.split("/")):
            tenth = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
            parts[min(tenth, 2)].append(path.read_bytes())
    test, validation, train = (b"\n".join(part) for part in parts)
    return train, validation if validated else test


# --- by name


@dataclass(frozen=True)
class Places:
    """Where the data are.

    `cifar10` and `news` are folders, `pretrained` is the file of the model that was trained on the
    news. With `tiny`, a few hundred samples are enough.
    """

    cifar10: str
    news: str
    pretrained: str
    tiny: bool = False


_SGD = {"optimizer": "sgd", "momentum": 0.9, "weight-decay": 1e-4}
_ADAMW = {"optimizer": "adamw", "weight-decay": 1e-4}


def settings_of(task: str, places: Places, validated: bool = False) -> dict[str, Any]:
    """Return the settings of a task of the study, as of the run config."""
    folder = {"images": places.cifar10, "news": places.news}.get(task, "")
    settings: dict[str, Any] = {
        "task": f"{__name__}:{task}",
        "data": f"validated@{folder}" if validated else folder,
        **(_SGD if task == "images" else _ADAMW),
    }
    if not folder:
        settings["model"] = places.pretrained
    if places.tiny:
        settings["max-samples"] = 256
    return settings


def loaded(settings: Mapping[str, Any], seed: int) -> Task:
    """Return the task that settings name."""
    options = {"max_samples": settings["max-samples"]} if "max-samples" in settings else {}
    names = settings["task"], settings["data"], settings.get("model", "")
    return load_task(*names, seed=seed, **options)


def recompute_statistics(task: Task, model: nn.Module) -> None:
    """Recompute BatchNorm's statistics from training samples that are the same for all arms.

    They are augmented as in training: statistics of plain images cost the trained model one to four
    points.
    """
    chosen = generator(0, "study-statistics").permutation(task.num_train)[:_STATISTICS_SAMPLES]
    source = BatchSource(task.train, torch.device("cpu"))
    inputs = (source.batch(part)[0] for part in torch.from_numpy(chosen).split(_STATISTICS_BATCH))
    draw = torch.Generator().manual_seed(derived_seed(0, "study-statistics"))
    update_bn((task.augment(one, draw) if task.augment else one for one in inputs), model)


def finished(task: Task, model: nn.Module) -> dict[str, float]:
    """Recompute BatchNorm's statistics, and return what the model is worth on the test data."""
    recompute_statistics(task, model)
    size = task.evaluation_batch_size or 1024
    report = evaluate_sums(model, task.test, task.loss, task.metric, batch_size=size)
    found = {"loss": report.loss if math.isfinite(report.loss) else None}
    if task.metric_name == "accuracy":
        found["accuracy"] = task.figure(report)
    return found


def saved(task: Task, file: Path, seed: int) -> nn.Module:
    """Return the model whose weights a file has; what was frozen is that of the run."""
    model = task.initial_model(derived_seed(seed, "model"))
    model.load_state_dict(load_file(file), strict=False)
    return model
