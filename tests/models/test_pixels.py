"""What models of images do before their first layer."""

import io

import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")

from PIL import Image as Pillow

from flower_blsgd.models.pixels import CentreCrop, Resize


def numbered(height: int, width: int) -> Tensor:
    return torch.arange(height * width, dtype=torch.float32).view(1, 1, height, width)


def test_centre_crop_by_hand() -> None:
    cut = CentreCrop(2)(numbered(4, 5))
    assert cut.tolist() == [[[[6.0, 7.0], [11.0, 12.0]]]]
    assert CentreCrop(3)(numbered(4, 5)).shape == (1, 1, 3, 3)


def test_centre_crop_leaves_what_is_not_larger() -> None:
    images = numbered(4, 4)
    assert CentreCrop(4)(images) is images
    assert CentreCrop(9)(images) is images
    assert CentreCrop(3)(numbered(2, 5)).tolist() == [[[[1, 2, 3], [6, 7, 8]]]]


def test_centre_crop_of_224_from_256() -> None:
    images = torch.zeros(1, 3, 256, 256, dtype=torch.uint8)
    images[:, :, 16:240, 16:240] = 1
    cut = CentreCrop(224)(images)
    assert cut.shape == (1, 3, 224, 224)
    assert cut.all()


def test_resize_by_hand() -> None:
    row = torch.tensor([[[[0.0, 4.0], [0.0, 4.0]]]])
    expected = torch.tensor([0.0, 1.0, 3.0, 4.0]).expand(1, 1, 4, 4)
    assert torch.allclose(Resize(4)(row), expected)
    assert torch.allclose(Resize(1)(row), torch.tensor(2.0).view(1, 1, 1, 1))  # averages


def test_resize_leaves_its_own_size() -> None:
    images = numbered(5, 5)
    assert Resize(5)(images) is images
    assert Resize(5)(numbered(5, 4)).shape == (1, 1, 5, 5)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (300, 260), (150, 400), (32, 32)])
def test_resize_is_that_of_pil(height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(height)
    coarse = torch.randint(0, 256, (9, 9, 3), generator=generator, dtype=torch.uint8)
    image = Pillow.fromarray(coarse.numpy()).resize((width, height), Pillow.Resampling.BICUBIC)
    expected = image.resize((224, 224), Pillow.Resampling.BILINEAR)
    resized = Resize(224)(tensor_of(image))
    assert resized.shape == (1, 3, 224, 224)
    assert float((resized - tensor_of(expected)).abs().max()) < 1.5  # PIL rounds twice


def tensor_of(image: Pillow.Image) -> Tensor:
    buffer = io.BytesIO()
    image.save(buffer, "PPM")
    flat = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    pixels = flat[-3 * image.width * image.height :].view(1, image.height, image.width, 3)
    return pixels.permute(0, 3, 1, 2).float()
