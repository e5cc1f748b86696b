"""Image tasks: custom images, and the benchmarks CIFAR, Flowers-102 and Tiny ImageNet."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.samples import SMALL_SIDE, prepared_images
from ..data.source import DataSource
from ..errors import UsageError, nearest
from ..models.resnets import (
    CIFAR10_CHANNELS,
    CIFAR100_CHANNELS,
    IMAGENET_CHANNELS,
    Channels,
    PixelNormalize,
    WideResNet,
    depth_and_width,
    resnet8,
    resnet20,
)
from ..models.vision import (
    MICRO,
    VisionModel,
    last_tensor,
    load_image_weights,
    read_weights,
    vision_model_names,
)
from ..worker.step import Augment
from .by_name import Benchmark
from .task import Task

_RESNETS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet20": resnet20,
    "resnet8": resnet8,
}
_OWN = (*_RESNETS, "wrn-28-10", "wrn-16-8")


@dataclass(frozen=True, kw_only=True)
class ImageTask(Benchmark):
    """Classification of images.

    The models are small ResNets (``resnet20``, ``resnet8``), wide ResNets (``wrn-DEPTH-WIDTH``),
    the classification models of torchvision, and ``vit-micro-16`` for tests. ``NAME:FILE`` begins
    with the weights in a file.

    `splits` are the data set if the setting `data` is empty, with its number of classes, by value
    of the setting `split`; the first is the default. `channels` are the data's mean and standard
    deviation; models of torchvision have their own. `side` is that of the images, in pixels, unless
    the setting `image-size` gives it; 0: automatic.
    """

    splits: Mapping[str, DataSource]
    default_model: str
    channels: Channels = IMAGENET_CHANNELS
    side: int = 0

    def task(
        self,
        data: str,
        model: str,
        *,
        again: bool,
        split: str,
        image_size: int,
        dropout: float | str,
        pretrained: bool,
        skip_bad: bool,
        max_samples: int,
        needs_test: bool,
    ) -> Task:
        """Return the task; see `Benchmark`."""
        make = self.maker(model, dropout)  # rejects unknown models before anything is decoded
        split = split or next(iter(self.splits))
        if split not in self.splits:
            raise UsageError(f"split = {split!r} is not known; {nearest(split, self.splits)}")
        source = replace(
            self.splits[split],
            data=data,
            skip_bad=skip_bad,
            max_samples=max_samples,
            needs_test=needs_test,
        )
        images = prepared_images(source, image_size or self.side, again)
        side = images.train[0].shape[-1]
        published = pretrained and _has_weights(model)
        return Task(
            model=functools.partial(make, images.num_classes, side > SMALL_SIDE),
            train=images.train,
            test=images.test,
            augment=_augmentation(side),
            data_fingerprint=images.fingerprint,
            pretrained=functools.partial(load_image_weights, name=model) if published else None,
            evaluation_batch_size=_evaluation_batch_size(model, side),
            prepared=images,
        )

    def check_weights(self, model: str) -> None:
        """Read or download the weights of a model; see `Benchmark`."""
        self.maker(model)
        if _has_weights(model):
            read_weights(model)

    def saved_model(
        self, model: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a new model with the number of classes of saved weights."""
        make = self.maker(model, dropout)
        large = "stem.0.weight" in tensors
        head = last_tensor(make(2, large))
        return make(len(tensors[head]) if head in tensors else 1, large)

    def maker(self, model: str, dropout: float | str = "auto") -> Callable[[int, bool], nn.Module]:
        """Return a function that creates a model for a number of classes.

        Its second argument is whether images are larger than 64 pixels. `dropout` is that of a wide
        ResNet, in [0, 1); ``"auto"``: none. UsageError if the model is unknown, or `dropout` is set
        for another model.
        """
        name, pixels = model.partition(":")[0], functools.partial(PixelNormalize, *self.channels)
        if name.startswith("wrn"):
            sizes, rate = depth_and_width(name), 0.0 if dropout == "auto" else float(dropout)
            return lambda classes, large: WideResNet(
                *sizes, classes, pixels(), rate, "7x7" if large else "3x3"
            )
        if name not in _RESNETS and name not in (names := vision_model_names()):
            near = nearest(name, (*_OWN, *names), listed=_OWN)
            raise UsageError(
                f"model = {model!r} is not known; {near}, another wrn-DEPTH-WIDTH, or a "
                "classification model of torchvision, such as resnet18 or vit_b_16"
            )
        if dropout not in ("auto", 0):
            raise UsageError(
                f"dropout = {dropout}: model = {model!r} has no dropout setting; leave it out, or "
                "use a wrn-DEPTH-WIDTH"
            )
        if name in _RESNETS:
            return lambda classes, large: _RESNETS[name](num_classes=classes, pixels=pixels())
        return lambda classes, large: VisionModel(name, classes)


def _has_weights(model: str) -> bool:
    """Return whether a model has weights in a file or published ones."""
    return ":" in model or not (model in (MICRO, *_RESNETS) or model.startswith("wrn"))


def _evaluation_batch_size(model: str, side: int) -> int:
    """Return a batch size that keeps the outputs of a layer below about 200 MB."""
    name = model.partition(":")[0]
    if side > 32 or (name not in _RESNETS and not name.startswith("wrn")):
        return 64
    return 1024 if name in _RESNETS else 256


def _augmentation(side: int) -> Augment:
    """Return the random augmentation of training images.

    As with torchvision's transforms, images above 64 pixels get a random resized crop, and smaller
    ones a random crop with padding; both are mirrored with probability 1/2.
    """
    if side > SMALL_SIDE:
        return functools.partial(random_resized_crop_and_flip, side=side)
    return functools.partial(random_crop_and_flip, padding=max(4, side // 8))


# --- augmentation of whole batches


def random_crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return randomly cropped images of the same size, each mirrored with probability 1/2.

    The images are NCHW, of any dtype, on any device. The generator is on the same device and is the
    only source of random numbers. No operation waits for the device, so CUDA graphs can contain all
    of them. `padding` black pixels are added on each side before cropping.
    """
    count, channels, height, width = images.shape
    device = images.device
    top, left = torch.randint(
        0, 2 * padding + 1, (2, count, 1), generator=generator, device=device
    ).unbind()
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=device)
    numbers = torch.arange(max(width, height), device=device)
    # |c - (width - 1)| is column c counted from the other side.
    columns = torch.add(numbers[:width], mirrored, alpha=1 - width).abs_().add_(left)
    rows = numbers[:height] + top
    padded = functional.pad(images, (padding,) * 4)
    # One gather for crop and flip: on a CPU several times as fast as indexing.
    pixels = torch.add(columns[:, None, :], rows[:, :, None], alpha=padded.shape[3])
    pixels = pixels.flatten(1)[:, None].expand(-1, channels, -1)
    return padded.flatten(2).gather(2, pixels).view(count, channels, height, width)


def random_resized_crop_and_flip(images: Tensor, generator: torch.Generator, side: int) -> Tensor:
    """Return a random crop of each image, resized to (side, side), mirrored with probability 1/2.

    As in torchvision's RandomResizedCrop, each image has its own crop, which is resized bilinearly
    with antialiasing. Images and generator are as for `random_crop_and_flip`. The number of
    operations does not depend on the batch size, and none waits for the device: one matrix product
    per dimension resizes all images.
    """
    count, channels, height, width = images.shape
    top, left, rows, columns, mirrored = random_boxes(count, height, width, generator)
    down = _resizing(top, rows, height, side, False)
    right = _resizing(left, columns, width, side, mirrored)
    narrow = images.float().flatten(1, 2) @ right.mT
    resized = down[:, None] @ narrow.view(count, channels, height, side)
    return (resized if images.is_floating_point() else resized.round_()).to(images.dtype)


def random_boxes(
    count: int, height: int, width: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return top, left, height and width of random crops, and which ones to mirror.

    Each is of shape (count, 1). A crop has 8 to 100 % of the area and an aspect ratio of 3/4 to
    4/3. It is the first of ten tries that fits into the image, or the whole image.
    """

    def uniform(low: float, high: float, tries: int = 1) -> Tensor:
        drawn = torch.empty(count, tries, device=generator.device)
        return drawn.uniform_(low, high, generator=generator)

    area = uniform(0.08, 1.0, 10) * (height * width)
    ratio = uniform(math.log(3 / 4), math.log(4 / 3), 10).exp()
    heights, widths = (area / ratio).sqrt().round(), (area * ratio).sqrt().round()
    fits = (heights <= height) & (widths <= width)
    first, any_fits = fits.byte().argmax(1, keepdim=True), fits.any(1, keepdim=True)
    rows = torch.where(any_fits, heights.gather(1, first), height)
    columns = torch.where(any_fits, widths.gather(1, first), width)
    top = (uniform(0, 1) * (height - rows + 1)).floor()
    left = (uniform(0, 1) * (width - columns + 1)).floor()
    return top, left, rows, columns, uniform(0, 1) < 0.5


def _resizing(
    first: Tensor, length: Tensor, size: int, side: int, mirrored: Tensor | bool
) -> Tensor:
    """Return the weights with which `length` of `size` pixels become `side` pixels.

    The shape is (count, side, size). The weights of an output pixel are a triangle around its
    center, at least one pixel of input or output wide on each side.
    """
    numbers = (torch.arange(side, device=first.device) - (side - 1) * mirrored).abs()
    pixels = torch.arange(size, device=first.device) + 0.5
    scale = length / side
    centers = first + scale * (numbers + 0.5)
    distances = (pixels - centers[:, :, None]).abs() / scale.clamp(min=1)[:, :, None]
    inside = (pixels > first) & (pixels < first + length)
    weights = (1 - distances).clamp_(min=0) * inside[:, None]
    return weights / weights.sum(2, keepdim=True)


# --- the tasks


def _source(name: str, hf_hub_name: str, num_classes: int | None = None) -> DataSource:
    return DataSource(name=name, hf_hub_name=hf_hub_name, num_classes=num_classes)


_FLOWERS102 = _source("flowers102", "dpdl-benchmark/oxford_flowers102", 102)

BENCHMARKS: Mapping[str, ImageTask] = {
    "images": ImageTask(
        splits={"official": DataSource(name="images")},
        default_model="resnet18",
    ),
    # 50,000 + 10,000 photographs, or custom images.
    "cifar10": ImageTask(
        splits={"official": _source("cifar10", "uoft-cs/cifar10")},
        default_model="resnet20",
        channels=CIFAR10_CHANNELS,
        side=32,
    ),
    # With the fine labels.
    "cifar100": ImageTask(
        splits={"official": _source("cifar100", "uoft-cs/cifar100", 100)},
        default_model="wrn-28-10",
        channels=CIFAR100_CHANNELS,
        side=32,
    ),
    # 8,189 photographs of flowers, split into 1,020 + 6,149 as published (without validation), or
    # into 7,169 + 1,020 as in the paper (our reconstruction).
    "flowers102": ImageTask(
        splits={
            "official": _FLOWERS102,
            "paper": replace(_FLOWERS102, train=("train", "test"), test=("validation",)),
        },
        default_model="wrn-16-8",
        side=224,
    ),
    # 100,000 + 10,000 photographs of 200 classes; the test split has no labels.
    "tiny-imagenet": ImageTask(
        splits={
            "official": replace(
                _source("tiny-imagenet", "zh-plus/tiny-imagenet", 200), test=("validation",)
            )
        },
        default_model="vit_b_16",
        side=64,
    ),
}
