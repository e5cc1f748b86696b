"""Import torchvision beside a CPU-only torch.

torchvision's wheel on the package index is built for CUDA. Beside a CPU build of torch its
compiled operators do not load, and ``import torchvision`` fails with ``operator
torchvision::nms does not exist``, although its transforms, data sets and models need none of
them. Declaring the two operators that it registers fake kernels for is enough.
"""

import importlib
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_libraries: list[torch.library.Library] = []
"""Held for the life of the process: a library that is collected takes its schemas with it."""


def import_torchvision() -> ModuleType:
    """Return torchvision; call it instead of importing torchvision first.

    Where torchvision's operators load, nothing is declared.

    Raises
    ------
    ImportError
        If torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return importlib.import_module("torchvision")
