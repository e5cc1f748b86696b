"""torchvision beside a CPU-only torch, each time in a process of its own."""

import importlib.util
import subprocess
import sys

import pytest

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="the extra `vision` is not installed"
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_torchvision
def test_import_gives_transforms_data_sets_and_models() -> None:
    told = run(
        """
import torch
from flower_blsgd.models.torchvision_ops import import_torchvision
torchvision = import_torchvision()
assert import_torchvision() is torchvision  # may be called twice
from torchvision import datasets, models
from torchvision.transforms import v2
image = torch.arange(3 * 40 * 40, dtype=torch.uint8).reshape(3, 40, 40)
view = v2.Compose([
    v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(p=1.0),
    v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3),
])(image)
flipped = v2.functional.horizontal_flip(image)
assert torch.equal(flipped, image.flip(-1))
model = models.resnet18(num_classes=7).eval()
with torch.inference_mode():
    print(tuple(view.shape), tuple(model(view[None]).shape), len(datasets.FakeData(5)))
"""
    )
    assert told.split("\n")[0] == "(3, 32, 32) (1, 7) 5"


@needs_torchvision
def test_import_of_our_package_alone_does_not_bring_torchvision() -> None:
    code = "import sys, flower_blsgd.tasks, flower_blsgd.models.torchvision_ops as t; "
    assert run(code + "print('torchvision' in sys.modules, t._libraries)") == "False []\n"


def test_import_declares_nothing_where_torchvision_loads() -> None:
    """A torchvision that loads is handed back as it is."""
    told = run(
        """
import sys, types, torch
sys.modules["torchvision"] = types.ModuleType("torchvision")
from flower_blsgd.models import torchvision_ops
assert torchvision_ops.import_torchvision() is sys.modules["torchvision"]
print(torchvision_ops._libraries)
"""
    )
    assert told == "[]\n"


def test_import_of_a_missing_torchvision_says_so() -> None:
    told = run(
        """
import sys
sys.modules["torchvision"] = None
from flower_blsgd.models.torchvision_ops import import_torchvision
try:
    import_torchvision()
except ImportError as error:
    print(error)
"""
    )
    assert "torchvision" in told


def test_import_lets_other_errors_through() -> None:
    told = run(
        """
import importlib, sys
from flower_blsgd.models import torchvision_ops
def broken(name):
    raise RuntimeError("the disk is gone")
importlib.import_module = broken
try:
    torchvision_ops.import_torchvision()
except RuntimeError as error:
    print(error, torchvision_ops._libraries)
"""
    )
    assert told == "the disk is gone []\n"
