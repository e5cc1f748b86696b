"""The images of the benchmarks: a part of CIFAR-10, or made-up ones of the same shape."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from flower_blsgd import Task
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.images import BENCHMARKS, random_crop_and_flip

ROOT = Path(__file__).parents[1]
PLACES = (ROOT / "data" / "cifar10", ROOT.parent / "shared" / "data" / "cifar10")
"""Where CIFAR-10 is looked for, as parquet files or image folders."""

TEST_IMAGES = 256

Samples = tuple[torch.Tensor, torch.Tensor]
"""Images and labels."""


def required_images(given: Path | None) -> str:
    """Return the folder of the images; SystemExit if there is none."""
    if given is not None and not given.is_dir():
        raise SystemExit(f"--data {given}: there is no such folder")
    places = PLACES if given is None else (given,)
    folder = next((place.resolve() for place in places if place.is_dir()), None)
    if folder is None:
        raise SystemExit("no images: name a folder with --data, or put them into data/cifar10")
    return str(folder)


def some_images(data: str, model_name: str) -> Task:
    """Return the task of ``COUNT@FOLDER``, or of ``COUNT`` made-up images.

    As a task of the run config: ``task = "benchmarks.images:some_images"``.
    """
    text, _, folder = data.partition("@")
    count = int(text)
    if not folder:
        return _task(model_name, _made_up(count), _made_up(TEST_IMAGES))
    whole = load_task("cifar10", folder, model_name)
    images, labels = whole.train
    if count > len(labels):
        raise SystemExit(f"{count} images were asked for, but there are {len(labels)}")
    tested, answers = whole.test
    return replace(
        whole,
        train=(images[:count], labels[:count]),
        test=(tested[:TEST_IMAGES], answers[:TEST_IMAGES]),
        data_fingerprint=f"{whole.data_fingerprint} {count}",
    )


def carried_images(data: str, model_name: str) -> Task:
    """Return the task of parquet files, read without the library ``datasets``."""
    files = (next(Path(data).glob(f"{part}-*.parquet")) for part in ("train", "test"))
    train, test = map(_decoded, files)
    return _task(model_name, train, test)


def _task(model_name: str, train: Samples, test: Samples) -> Task:
    return Task(
        model=lambda: BENCHMARKS["cifar10"].maker(model_name)(10, False),
        train=train,
        test=test,
        augment=random_crop_and_flip,
    )


def _decoded(file: Path) -> Samples:
    import pyarrow.parquet
    from PIL import Image

    table = pyarrow.parquet.read_table(file).to_pydict()
    stored = (io.BytesIO(one["bytes"]) for one in table["img" if "img" in table else "image"])
    pixels = np.stack([np.asarray(Image.open(one).convert("RGB")) for one in stored])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(table["label"])


def _made_up(count: int) -> Samples:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)
    return images, torch.randint(0, 10, (count,), generator=draw)
