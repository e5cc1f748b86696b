"""Image benchmarks: CIFAR-10, CIFAR-100, Flowers-102 and Tiny ImageNet."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.image_data import (
    CIFAR10,
    CIFAR100,
    FLOWERS102,
    TINY_IMAGENET,
    ImageData,
    prepared_images,
)
from ..errors import UsageError, nearest
from ..models.pretrained import is_published, load_weights
from ..models.resnets import (
    CIFAR10_CHANNELS,
    CIFAR100_CHANNELS,
    IMAGENET_CHANNELS,
    Channels,
    PixelNormalize,
    Stem,
    WideResNet,
    depth_and_width,
    resnet8,
    resnet20,
)
from ..models.vision_transformer import VITS, VisionTransformer, vit_config
from ..worker.step import Augment
from .task import Benchmark, Task

_RESNETS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet20": resnet20,
    "resnet8": resnet8,
}
_KNOWN = (*_RESNETS, "wrn-28-10", "wrn-16-8", *VITS)
_HEADS = ("linear.weight", "network.classifier.weight")
"""Name of the last layer in each kind of model; it has one row per class."""


@dataclass(frozen=True, kw_only=True)
class ImageBenchmark(Benchmark):
    """Image task: data set, augmentation and models.

    The models are ResNets (``resnet20``, ``resnet8``), wide ResNets (``wrn-DEPTH-WIDTH``), and
    vision transformers (``vit-b-16``, ``vit-micro-16``, or a Hugging Face folder of one).

    Parameters
    ----------
    splits : mapping
        The data set by value of the setting `split`; the first is the default.
    default_model : str
        Name of the default model.
    channels : pair of tuple of float
        Mean and standard deviation of the data's channels; vision transformers have their own.
    augment : callable
        Random augmentation of a training batch.
    side : int
        Side of the model's input images, in pixels. Larger images are cropped.
    stem : {"3x3", "7x7"} (default: "3x3")
        First layer of the wide ResNets.
    """

    splits: Mapping[str, ImageData]
    default_model: str
    channels: Channels
    augment: Augment
    side: int
    stem: Stem = "3x3"

    def task(
        self,
        data: str,
        model: str,
        *,
        again: bool,
        split: str,
        skip_bad: bool,
        max_samples: int,
        dropout: float | str,
        pretrained: bool,
    ) -> Task:
        """Return the task; see `Benchmark`."""
        make = self.maker(model, dropout)  # rejects unknown models before anything is decoded
        split = split or next(iter(self.splits))
        if split not in self.splits:
            raise UsageError(f"split = {split!r} is not known; {nearest(split, self.splits)}")
        images = prepared_images(
            self.splits[split], data, skip_bad=skip_bad, max_samples=max_samples, again=again
        )
        published = pretrained and is_published(model)
        return Task(
            model=functools.partial(make, images.num_classes),
            train=images.train,
            test=images.test,
            augment=self.augment,
            data_fingerprint=images.fingerprint,
            pretrained=functools.partial(load_weights, name=model) if published else None,
            evaluation_batch_size=self.evaluation_batch_size(model),
            prepared=images,
        )

    def saved_model(
        self, name: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a new model with the number of classes of saved weights."""
        num_classes = next((len(tensors[head]) for head in _HEADS if head in tensors), 1)
        return self.maker(name, dropout)(num_classes)

    def maker(self, name: str, dropout: float | str = "auto") -> Callable[[int], nn.Module]:
        """Return a function of the number of classes that creates a model.

        `dropout` is that of a wide ResNet, in [0, 1); ``"auto"``: none. UsageError if the model is
        unknown, or `dropout` is set for a model without dropout.
        """
        pixels = functools.partial(PixelNormalize, *self.channels, self.side)
        if name.startswith("wrn"):
            sizes, rate = depth_and_width(name), 0.0 if dropout == "auto" else float(dropout)
            return lambda classes: WideResNet(*sizes, classes, pixels(), rate, self.stem)
        make: Callable[[int], nn.Module]
        if name in _RESNETS:
            make = lambda classes: _RESNETS[name](num_classes=classes, pixels=pixels())  # noqa: E731
        elif name in VITS or Path(name).expanduser().is_dir():
            vit_config(name)
            make = functools.partial(VisionTransformer, name, crop=self.side)
        else:
            raise UsageError(
                f"model = {name!r} is not known; {nearest(name, _KNOWN)}, another "
                "wrn-DEPTH-WIDTH, or a Hugging Face folder of a ViT"
            )
        if dropout not in ("auto", 0):
            raise UsageError(
                f"dropout = {dropout}: model = {name!r} has no dropout; leave it out, or use a "
                "wrn-DEPTH-WIDTH"
            )
        return make

    def evaluation_batch_size(self, name: str) -> int:
        """Return a batch size that keeps the outputs of a layer below about 200 MB."""
        if self.side > 32 or (name not in _RESNETS and not name.startswith("wrn")):
            return 64
        return 1024 if name in _RESNETS else 256


# --- augmentation of whole batches

# No operation waits for the device or reads random values.

_TRIES = 10
"""Number of boxes to draw before the fallback, as in torchvision."""

_SCALE = (0.08, 1.0)
"""Smallest and largest area of a box as a share of the image's area, torchvision's default."""

_RATIO = (3 / 4, 4 / 3)
"""Smallest and largest aspect ratio (width / height) of a box, torchvision's default."""


def random_crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Return randomly cropped images of the same size, each mirrored with probability 1/2.

    The images are NCHW, of any dtype, on any device. The generator is on the same device and is the
    only source of random numbers. `padding` black pixels are added on each side before cropping.
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
    """Return resized random crops, each mirrored with probability 1/2.

    The boxes are those of torchvision's ``RandomResizedCrop``, see `random_boxes`. Interpolation is
    bilinear, without antialiasing, so images should not be much larger than `side` pixels. Integers
    are rounded. The result has shape (N, C, side, side) and the same dtype.
    """
    count, _, height, width = images.shape
    top, left, rows, columns = random_boxes(count, height, width, generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=images.device)
    centres = (torch.arange(side, dtype=torch.float32, device=images.device) + 0.5) / side
    # |m - c| is centre c counted from the other side where m is 1.
    x = _grid_positions(left, columns, torch.abs(mirrored - centres), width)
    y = _grid_positions(top, rows, centres, height)
    shape = (count, side, side)
    grid = torch.stack((x[:, None, :].expand(shape), y[:, :, None].expand(shape)), dim=3)
    cut = functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return (cut if images.is_floating_point() else cut.round_()).to(images.dtype)


def random_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return random boxes within an image, distributed as in torchvision's ``RandomResizedCrop``.

    The area is drawn uniformly and the aspect ratio log-uniformly, up to ten times until the box
    fits. The position is then drawn uniformly. If no box fits, the largest box of an allowed ratio
    is used, at a random position; torchvision centers it.

    Returns
    -------
    torch.Tensor
        Top, left, height and width in whole pixels, float32 of shape (4, count), on the
        generator's device.
    """
    draws = torch.rand(
        (2 * _TRIES + 2, count), generator=generator, device=generator.device, dtype=torch.float32
    )
    area_draws, ratio_draws, positions = torch.split(draws, [_TRIES, _TRIES, 2])
    areas = height * width * (_SCALE[0] + (_SCALE[1] - _SCALE[0]) * area_draws)
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    ratios = torch.exp(low + (high - low) * ratio_draws)
    sizes = torch.stack((torch.sqrt(areas / ratios), torch.sqrt(areas * ratios))).round_()
    heights, widths = sizes.unbind()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    # A last box that always fits.
    last_height = min(height, max(1, round(width / _RATIO[0])))
    last_width = min(width, max(1, round(height * _RATIO[1])))
    heights = functional.pad(heights, (0, 0, 0, 1), value=last_height)
    widths = functional.pad(widths, (0, 0, 0, 1), value=last_width)
    chosen = functional.pad(fits.int(), (0, 0, 0, 1), value=1).argmax(dim=0, keepdim=True)
    rows, columns = heights.gather(0, chosen)[0], widths.gather(0, chosen)[0]
    top = torch.floor(positions[0] * (height - rows + 1))
    left = torch.floor(positions[1] * (width - columns + 1))
    return torch.stack((top, left, rows, columns))


def _grid_positions(first: Tensor, size: Tensor, centres: Tensor, whole: int) -> Tensor:
    """Return the sampling positions within the boxes along one axis, in [-1, 1].

    They have shape (count, side).
    """
    first, size = first[:, None], size[:, None]
    pixels = torch.clamp(first + size * centres - 0.5, first, first + size - 1)
    return (2 * pixels + 1) / whole - 1


# --- the benchmarks

BENCHMARKS: Mapping[str, ImageBenchmark] = {
    "cifar10": ImageBenchmark(
        splits={"official": CIFAR10},
        default_model="resnet20",
        channels=CIFAR10_CHANNELS,
        augment=random_crop_and_flip,
        side=32,
    ),
    "cifar100": ImageBenchmark(
        splits={"official": CIFAR100},
        default_model="wrn-28-10",
        channels=CIFAR100_CHANNELS,
        augment=random_crop_and_flip,
        side=32,
    ),
    "flowers102": ImageBenchmark(  # "paper" trains on the published training and test splits
        splits=FLOWERS102,
        default_model="wrn-16-8",
        channels=IMAGENET_CHANNELS,
        augment=functools.partial(random_resized_crop_and_flip, side=224),
        side=224,
        stem="7x7",
    ),
    "tiny-imagenet": ImageBenchmark(  # tested on its validation split; its test split has no labels
        splits={"official": TINY_IMAGENET},
        default_model="vit-b-16",
        channels=IMAGENET_CHANNELS,
        augment=functools.partial(random_crop_and_flip, padding=8),
        side=64,
    ),
}
