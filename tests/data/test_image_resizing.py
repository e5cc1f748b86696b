"""Images of any size and kind, as small squares."""

import io

import numpy as np
import pytest
from PIL import Image

from flower_blsgd.data.image_resizing import squared


def grey_columns(columns: list[int], height: int) -> Image.Image:
    """Return a grey image, the same in every row."""
    return Image.fromarray(np.tile(np.array(columns, np.uint8), (height, 1)))


def reds(image: Image.Image) -> list[list[int]]:
    pixels = np.asarray(image)
    assert (pixels == pixels[..., :1]).all()  # grey
    red: list[list[int]] = pixels[..., 0].tolist()
    return red


def test_an_image_of_the_size_stays_as_it_is() -> None:
    square, resized = squared(grey_columns([1, 2], 2), 2)
    assert reds(square) == [[1, 2], [1, 2]]
    assert square.mode == "RGB"
    assert not resized


@pytest.mark.parametrize("upright", [False, True])
def test_of_the_longer_side_the_middle_is_kept(upright: bool) -> None:
    image = grey_columns([9, 100, 200, 9], 2)
    square, resized = squared(image.transpose(Image.Transpose.TRANSPOSE) if upright else image, 2)
    expected = [[100, 100], [200, 200]] if upright else [[100, 200], [100, 200]]
    assert reds(square) == expected
    assert resized


def test_resizing_is_bilinear_without_aliasing() -> None:
    """Half the size: 3/8 each of two pixels and 1/8 of those beside; at an end 3/7 and 1/7."""
    square, _ = squared(grey_columns([0, 70, 140, 210], 4), 2)
    assert reds(square) == [[50, 160]] * 2  # (3 * 0 + 3 * 70 + 140) / 7


def test_the_middle_is_cut_out_of_the_resized_image() -> None:
    """So that pixels beyond the cut still count: (255 + 3 * 0 + 3 * 70 + 140) / 8."""
    square, _ = squared(grey_columns([255, 255, 0, 70, 140, 210, 255, 255], 4), 2)
    assert reds(square) == [[76, 172]] * 2


def test_a_small_image_is_made_larger() -> None:
    square, resized = squared(Image.new("RGB", (3, 1), (5, 6, 7)), 4)
    assert np.asarray(square).tolist() == [[[5, 6, 7]] * 4] * 4
    assert resized


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (4, 4), 77), (77, 77, 77)),
        (Image.new("1", (4, 4), 1), (255, 255, 255)),
        (Image.new("LA", (4, 4), (77, 0)), (77, 77, 77)),
        (Image.new("RGBA", (4, 4), (1, 2, 3, 0)), (1, 2, 3)),
        (Image.new("RGB", (4, 4), (10, 20, 30)).quantize(2), (10, 20, 30)),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), (255, 0, 0)),
    ],
    ids=["L", "1", "LA", "RGBA", "P", "CMYK"],
)
@pytest.mark.parametrize("side", [4, 2])
def test_all_kinds_become_rgb(image: Image.Image, colour: tuple[int, ...], side: int) -> None:
    square, _ = squared(image, side)
    assert np.asarray(square).tolist() == [[list(colour)] * side] * side


def test_a_large_jpeg_is_decoded_at_a_fraction() -> None:
    """Of 1024 pixels an eighth is enough for 32 with a factor of 2 to spare."""
    buffer = io.BytesIO()
    halves = np.zeros((1024, 1024, 3), np.uint8)
    halves[:, 512:] = 200
    Image.fromarray(halves).save(buffer, "JPEG")
    with Image.open(buffer) as image:
        square, resized = squared(image, 32)
        assert image.size == (128, 128)
    assert resized
    pixels = np.asarray(square)
    assert pixels[:, :15].max() <= 2
    assert abs(pixels[:, 17:].astype(int) - 200).max() <= 2


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_sixteen_bits_is_scaled(order: str) -> None:
    """White is 65535; 128 and 129 lie on both sides of a half (257 / 2)."""
    values = np.array([[0, 128, 129, 257], [32896, 65278, 65535, 25700]], order)
    buffer = io.BytesIO()
    Image.frombytes("I;16" if order == "<u2" else "I;16B", (4, 2), values.tobytes()).save(
        buffer, "TIFF"
    )
    with Image.open(buffer) as image:
        assert image.mode.startswith("I;16")
        square, _ = squared(image.crop((0, 0, 2, 2)), 2)
        assert reds(square) == [[0, 0], [128, 254]]
        square, _ = squared(image.crop((2, 0, 4, 2)), 2)
        assert reds(square) == [[1, 1], [255, 100]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_without_a_known_white_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=rf"its kind {mode} \(32 bits\) does not say what is whi"):
        squared(Image.new(mode, (4, 4), 70_000), 4)
