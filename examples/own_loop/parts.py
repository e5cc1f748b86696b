"""Parts that all scripts share: arguments, images, and accuracy."""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder


def arguments():
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "data", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png"
    )
    parser.add_argument("--steps", type=int, default=20, help="length of a run alone")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1, help="processes that read images")
    parser.add_argument("--size", type=int, default=32, help="side of an image in pixels")
    return parser.parse_args()


def images(folder, size):
    """Return the training and the test images below a folder."""
    test = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])
    train = transforms.Compose([transforms.RandomHorizontalFlip(), test])
    return ImageFolder(folder / "train", train), ImageFolder(folder / "test", test)


def forever(loader):
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


@torch.no_grad()
def accuracy(model, loader, device):
    """Return the share of images that a model classifies correctly."""
    model.eval()
    right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def make_images(folder, per_class=64, size=32):
    """Write a tiny data set: noise with a bright horizontal, vertical or diagonal stripe."""
    draw = np.random.default_rng(0)
    for part, count in (("train", per_class), ("test", per_class // 4)):
        for name in ("diagonal", "horizontal", "vertical"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = draw.integers(0, 128, (size, size, 3), dtype=np.uint8)
                at = draw.integers(size // 4, 3 * size // 4)
                if name == "horizontal":
                    pixels[at : at + 3] += 120
                elif name == "vertical":
                    pixels[:, at : at + 3] += 120
                else:
                    rows = np.arange(size)
                    for shift in range(3):
                        pixels[rows, (rows + at + shift) % size] += 120
                Image.fromarray(pixels).save(folder / part / name / f"{number:03}.png")


if __name__ == "__main__":
    make_images(arguments().data)
