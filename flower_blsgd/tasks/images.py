"""The benchmarks of images: CIFAR-10, CIFAR-100, Flowers-102 and Tiny ImageNet."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.cache import Prepared
from ..data.image_data import (
    CIFAR10,
    CIFAR100,
    FLOWERS102,
    TINY_IMAGENET,
    ImageData,
    prepared_images,
)
from ..errors import UsageError, nearest
from ..models.layers import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    CIFAR100_MEAN,
    CIFAR100_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    CentreCrop,
    PixelNormalize,
)
from ..models.resnet import resnet8, resnet20
from ..models.vision_transformer import (
    CONFIGS,
    check_vit_folder,
    find_weights,
    has_published_weights,
    load_published_weights,
    vision_transformer,
)
from ..models.wide_resnet import Stem, WideResNet, depth_and_width, is_wide_resnet
from .augmentation import random_crop_and_flip, random_resized_crop_and_flip
from .task import Augment, Benchmark, Task

ModelMaker = Callable[[int], nn.Module]
"""(number of classes) -> a model with fresh weights."""

_RESNETS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet20": resnet20,
    "resnet8": resnet8,
    "resnet20-b": functools.partial(resnet20, shortcut="B"),
}
_HEADS = ("linear.weight", "network.classifier.weight")
"""What the last layer is called in each kind of model; it has a row for each class."""


@dataclass(frozen=True)
class ImageBenchmark(Benchmark):
    """A task of images: its data set, its augmentation and its models.

    The models are wide ResNets (``wrn-DEPTH-WIDTH``), vision transformers (``vit-b-16``,
    ``vit-micro-16``, or a Hugging Face folder of one), and what `resnets` has.

    Parameters
    ----------
    splits : mapping
        The data set in each way to split it, by the setting `split`. The first is the default.
    default_model : str
        The name of the model where nobody sets one.
    mean, std : tuple of float
        Of each channel of the data, for values in [0, 1]; a vision transformer has its own.
    augment : callable
        Changes a training batch at random.
    side : int
        Of the images that models see, in pixels. Larger ones are cut to it.
    stem : {"3x3", "7x7"} (default: "3x3")
        Of the wide ResNets.
    resnets : mapping (default: none)
        Other models by name: ``(num_classes=, pixels=) -> Module``.
    """

    splits: Mapping[str, ImageData]
    default_model: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment
    side: int
    stem: Stem = "3x3"
    resnets: Mapping[str, Callable[..., nn.Module]] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """The settings that it takes."""
        split = ("split",) if len(self.splits) > 1 else ()
        return (*split, "skip_bad", "max_samples", "dropout", "pretrained")

    def task(self, data: str, model: str, options: Mapping[str, Any]) -> Task:
        """Return the task; see `Benchmark.task`."""
        make = self.maker(model, options["dropout"])  # refused before anything is decoded
        images = self.prepare(data, model, options)
        return Task(
            model=functools.partial(make, len(images.class_names)),
            train=images.train,
            test=images.test,
            augment=self.augment,
            data_fingerprint=images.fingerprint,
            pretrained=self.published_weights(model) if options["pretrained"] else None,
            evaluation_batch_size=self.evaluation_batch_size(model),
        )

    def prepare(
        self, data: str, model: str, options: Mapping[str, Any], again: bool = False
    ) -> Prepared:
        """Return the decoded images; see `Benchmark.prepare`."""
        self.maker(model)
        split = options["split"] or next(iter(self.splits))
        if split not in self.splits:
            raise UsageError(f"split = {split!r} is not known; {nearest(split, self.splits)}")
        return prepared_images(
            self.splits[split],
            data,
            skip_bad=options["skip_bad"],
            max_samples=options["max_samples"],
            again=again,
        )

    def saved_model(
        self, name: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a fresh model for as many classes as saved weights have."""
        num_classes = next((len(tensors[head]) for head in _HEADS if head in tensors), 1)
        return self.maker(name, dropout)(num_classes)

    def check_weights(self, model: str) -> None:
        """Refuse a model whose published weights cannot be had; see `Benchmark.check_weights`."""
        self.maker(model)
        if self.published_weights(model) is not None:
            find_weights(model or self.default_model)

    def maker(self, name: str, dropout: float | str = "auto") -> ModelMaker:
        """Return what makes a model by name, with fresh weights; nothing is made yet.

        Parameters
        ----------
        name : str
            Of the model; empty for the default.
        dropout : float or "auto" (default: "auto")
            Of a wide ResNet, in [0, 1); ``"auto"``: none.

        Raises
        ------
        UsageError
            If there is no such model, or it has no dropout and some is set.
        """
        name = name or self.default_model
        if is_wide_resnet(name):
            depth, width = depth_and_width(name)
            rate = 0.0 if dropout == "auto" else float(dropout)
            return lambda classes: WideResNet(
                depth, width, classes, self._pixels(), rate, self.stem
            )
        make: ModelMaker
        if name in self.resnets:
            resnet = self.resnets[name]
            make = lambda classes: resnet(num_classes=classes, pixels=self._pixels())  # noqa: E731
        elif name in CONFIGS or Path(name).expanduser().is_dir():
            if name not in CONFIGS:
                check_vit_folder(name)
            make = functools.partial(vision_transformer, name, crop=self.side)
        else:
            known = [*self.resnets, "wrn-28-10", "wrn-16-8", *CONFIGS]
            raise UsageError(
                f"model = {name!r} is not known; {nearest(name, known)}, another wrn-DEPTH-WIDTH, "
                "or a Hugging Face folder of a ViT"
            )
        if dropout not in ("auto", 0):
            raise UsageError(
                f"dropout = {dropout}: model = {name!r} is trained without; leave it out, or use "
                "a wrn-DEPTH-WIDTH"
            )
        return make

    def published_weights(self, name: str) -> Callable[[nn.Module], None] | None:
        """Return what puts published weights into a fresh model; None if it has none."""
        name = name or self.default_model
        if is_wide_resnet(name) or name in self.resnets or not has_published_weights(name):
            return None
        return functools.partial(load_published_weights, name=name)

    def evaluation_batch_size(self, name: str) -> int:
        """Return how many samples at once keep the outputs of a layer below some 200 MB."""
        name = name or self.default_model
        if name in self.resnets:
            return 1024
        return 256 if is_wide_resnet(name) and self.side <= 32 else 64

    def _pixels(self) -> nn.Module:
        return nn.Sequential(CentreCrop(self.side), PixelNormalize(self.mean, self.std))


BENCHMARKS: Mapping[str, ImageBenchmark] = {
    "cifar10": ImageBenchmark(
        splits={"": CIFAR10},
        default_model="resnet20",
        mean=CIFAR10_MEAN,
        std=CIFAR10_STD,
        augment=random_crop_and_flip,
        side=32,
        resnets=_RESNETS,
    ),
    "cifar100": ImageBenchmark(
        splits={"": CIFAR100},
        default_model="wrn-28-10",
        mean=CIFAR100_MEAN,
        std=CIFAR100_STD,
        augment=random_crop_and_flip,
        side=32,
        resnets=_RESNETS,
    ),
    "flowers102": ImageBenchmark(  # "paper" trains on the published training and test splits
        splits={name: FLOWERS102[name] for name in ("official", "paper")},
        default_model="wrn-16-8",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=functools.partial(random_resized_crop_and_flip, side=224),
        side=224,
        stem="7x7",
    ),
    "tiny-imagenet": ImageBenchmark(  # tested on its validation split; its test split has no labels
        splits={"": TINY_IMAGENET},
        default_model="vit-b-16",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=functools.partial(random_crop_and_flip, padding=8),
        side=64,
    ),
}
