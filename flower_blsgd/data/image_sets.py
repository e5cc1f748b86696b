"""The image data sets that we know by name."""

import dataclasses
import functools
from collections.abc import Mapping

from .cifar_binary import CIFAR10_FILES, CIFAR100_FILES, cifar_splits
from .flowers_folder import flowers_splits
from .image_data import ImageData
from .tiny_imagenet_folder import tiny_imagenet_splits

CIFAR10 = ImageData(
    name="cifar10",
    hub_name="uoft-cs/cifar10",
    side=32,
    num_classes=None,
    train=("train",),
    test=("test",),
    own_form=functools.partial(cifar_splits, CIFAR10_FILES),
    own_layout="the binary version (data_batch_1.bin)",
)
"""50,000 + 10,000 photographs of ten things, or one's own in its layout."""

CIFAR100 = ImageData(
    name="cifar100",
    hub_name="uoft-cs/cifar100",
    side=32,
    num_classes=100,
    train=("train",),
    test=("test",),
    label_column="fine_label",
    own_form=functools.partial(cifar_splits, CIFAR100_FILES),
    own_layout="the binary version (train.bin)",
)
"""50,000 + 10,000 photographs of a hundred things; of the two kinds of labels the fine one."""

TINY_IMAGENET = ImageData(
    name="tiny-imagenet",
    hub_name="zh-plus/tiny-imagenet",
    side=64,
    num_classes=200,
    train=("train",),
    test=("valid",),
    own_form=tiny_imagenet_splits,
    own_layout="the published folder (tiny-imagenet-200)",
)
"""100,000 + 10,000 photographs of 200 things; what it calls test has no labels."""

_FLOWERS102 = ImageData(
    name="flowers102",
    hub_name="dpdl-benchmark/oxford_flowers102",
    side=256,
    num_classes=102,
    train=("train",),
    test=("test",),
    any_size=True,
    own_form=flowers_splits,
    own_layout="the published files (jpg, imagelabels.mat and setid.mat)",
)

FLOWERS102: Mapping[str, ImageData] = {
    "official": _FLOWERS102,
    "paper": dataclasses.replace(_FLOWERS102, train=("train", "test"), test=("validation",)),
}
"""8,189 photographs of flowers, cut into 1,020 + 6,149 as published (validation is not used), or
into 7,169 + 1,020 as the paper must have cut them. The hub's copy keeps them as PNG: 3.4 GB, ten
times the published files."""
