"""Images of any size and kind become one array; those that are damaged are named or left out."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from flower_blsgd.data import image_decoding
from flower_blsgd.data.image_decoding import decode_split, image_bytes, squared
from flower_blsgd.data.splits import Split
from flower_blsgd.errors import UsageError

from ..log_capture import captured_log
from .image_files import broken_jpeg, pixels, png

# --- one image


def grey_columns(columns: list[int], height: int) -> Image.Image:
    """Return a grey image, the same in every row."""
    return Image.fromarray(np.tile(np.array(columns, np.uint8), (height, 1)))


def reds(image: Image.Image) -> list[list[int]]:
    values = np.asarray(image)
    assert (values == values[..., :1]).all()  # grey
    red: list[list[int]] = values[..., 0].tolist()
    return red


@pytest.mark.parametrize("upright", [False, True])
def test_of_the_longer_side_the_middle_is_kept(upright: bool) -> None:
    image = grey_columns([9, 100, 200, 9], 2)
    square = squared(image.transpose(Image.Transpose.TRANSPOSE) if upright else image, 2)
    assert reds(square) == ([[100, 100], [200, 200]] if upright else [[100, 200], [100, 200]])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        # Half the size: 3/8 each of two pixels and 1/8 of those beside; at an end 3/7 and 1/7.
        ([0, 70, 140, 210], [50, 160]),  # (3 * 0 + 3 * 70 + 140) / 7
        # Pixels beyond the cut still count: (255 + 3 * 0 + 3 * 70 + 140) / 8.
        ([255, 255, 0, 70, 140, 210, 255, 255], [76, 172]),
    ],
)
def test_resizing_is_bilinear_without_aliasing(columns: list[int], expected: list[int]) -> None:
    assert reds(squared(grey_columns(columns, 4), 2)) == [expected] * 2


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
    square = squared(image, side)
    assert np.asarray(square).tolist() == [[list(colour)] * side] * side


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_sixteen_bits_is_scaled(order: str) -> None:
    """White is 65535; 128 and 129 lie on both sides of a half (257 / 2)."""
    values = np.array([[0, 128, 129, 257], [32896, 65278, 65535, 25700]], order)
    buffer = io.BytesIO()
    mode = "I;16" if order == "<u2" else "I;16B"
    Image.frombytes(mode, (4, 2), values.tobytes()).save(buffer, "TIFF")
    with Image.open(buffer) as image:
        assert image.mode.startswith("I;16")
        assert reds(squared(image.crop((0, 0, 2, 2)), 2)) == [[0, 0], [128, 254]]
        assert reds(squared(image.crop((2, 0, 4, 2)), 2)) == [[1, 1], [255, 100]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_without_a_known_white_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=rf"its kind {mode} \(32 bits\) does not say what is whi"):
        squared(Image.new(mode, (4, 4), 70_000), 4)


def test_relative_paths_of_images_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be read relative to wherever one starts a run."""
    (tmp_path / "a.png").write_bytes(png(1))
    monkeypatch.chdir(tmp_path)
    for path in ("a.png", "./a.png"):
        with pytest.raises(ValueError, match="no image but a relative path"):
            image_bytes({"bytes": None, "path": path})
    assert image_bytes({"bytes": None, "path": str(tmp_path / "a.png")}) == png(1)
    assert image_bytes({"bytes": b"1", "path": "a.png"}) == b"1"


# --- a split


def split_of(images: list[Any]) -> Split:
    """Return a split that numbers its images as their labels."""
    return Split("test", np.arange(len(images)), (), lambda first, last: images[first:last])


def decode(
    images: list[Any], folder: Path, side: int = 8, skip_bad: bool = True
) -> tuple[npt.NDArray[np.uint8], list[int], list[int]]:
    """Return pixels, labels and the numbers of images that were reported as done."""
    done: list[int] = []
    skipped = decode_split(split_of(images), folder, "train", side, skip_bad, done.append)
    pixels, labels = (np.load(folder / f"train_{kind}.npy") for kind in ("images", "labels"))
    assert (pixels.dtype, labels.dtype, skipped) == (np.uint8, np.int64, len(images) - len(labels))
    return pixels, labels.tolist(), done


def test_images_are_decoded_in_order_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_decoding, "_LARGEST_CHUNK", 4)
    (tmp_path / "4.png").write_bytes(png(4, 8))
    images: list[Any] = [png(k, 8) for k in range(10)]
    images[3:6] = [
        {"bytes": images[3], "path": None},
        {"bytes": None, "path": str(tmp_path / "4.png")},
        pixels(5, 8).transpose(2, 0, 1),
    ]
    found, labels, done = decode(images, tmp_path)
    assert np.array_equal(found, np.stack([pixels(k, 8).transpose(2, 0, 1) for k in range(10)]))
    assert labels == list(range(10))
    assert done == [4, 4, 2]


def test_bad_images_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    images = [broken_jpeg(), png(1, 8), None, png(3, 16), b"no image", png(5, 8)]
    with pytest.raises(UsageError, match="none of the 2 images of test can be decoded"):
        decode([b"bad", b"worse"], tmp_path)
    with captured_log() as log:
        found, labels, done = decode(images, tmp_path)
    assert labels == [1, 3, 5]
    assert np.array_equal(found[2], pixels(5, 8).transpose(2, 0, 1))
    assert done == [6]
    assert log.lines() == ["left out 3 of 6 images of test that cannot be decoded"]


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"no image", "cannot identify image file"),
        (None, "there is no image"),
        ({"bytes": None, "path": "/no/such/a.png"}, "No such file or directory: '/no/such/a.png'"),
        ({"bytes": b"x", "path": "/x/a.png"}, "cannot identify image file, /x/a.png"),
    ],
)
def test_a_bad_image_is_refused_by_its_number_and_file(
    tmp_path: Path, image: Any, reason: str
) -> None:
    with pytest.raises(UsageError) as refused:
        decode([png(0), image, b"worse"], tmp_path, skip_bad=False)
    message = str(refused.value)
    assert message.startswith("data: image 1 of test cannot be decoded (")
    assert f"{reason}); skip-bad = true leaves such images out" in message
    assert message.count("a.png") <= 1
