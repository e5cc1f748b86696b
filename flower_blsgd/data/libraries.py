"""Access to the HF hub and to torchvision, and how the setting ``data`` names their data sets."""

import importlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UsageError, first_line, nearest, pip_install

_LOG = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
_HF_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TORCHVISION_NAME = re.compile(r"([A-Za-z]\w*):(.+)")
_TORCHVISION_SPLITS = ("train", "trainval", "test", "val", "valid")


# --- the HF hub


def is_hf_hub_name(name: str) -> bool:
    """Return whether a name has the form ``OWNER/NAME`` of the HF hub."""
    return _HF_HUB_NAME.fullmatch(name) is not None


def hf_hub_reachable() -> bool:
    """Return whether the HF hub answers within seconds and is not disabled (``HF_HUB_OFFLINE``).

    The hub's own library tries for half a minute.
    """
    import huggingface_hub.constants as hf_hub

    return not hf_hub.HF_HUB_OFFLINE and answers(str(hf_hub.ENDPOINT))


def answers(url: str) -> bool:
    """Return whether a server answers within seconds."""
    import urllib.error
    import urllib.request

    answered = threading.Event()

    def request() -> None:
        try:
            head = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(head, timeout=_TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # also an answer
        except Exception:  # no network, no such address, or no HTTP
            return
        answered.set()

    requesting = threading.Thread(target=request, daemon=True)  # resolving a name has no timeout
    requesting.start()
    requesting.join(_TIMEOUT_SECONDS)
    return answered.is_set()


# --- torchvision


def split_torchvision(data: str) -> tuple[str, str]:
    """Return class and folder of ``CLASS:FOLDER``; an empty class and `data` for anything else."""
    match = _TORCHVISION_NAME.fullmatch(data)
    return (match[1], match[2]) if match and not Path(data).exists() else ("", data)


def torchvision_splits(name: str, folder: Path, setting: str) -> Mapping[str, Any]:
    """Return all splits of a class of ``torchvision.datasets``; nothing is downloaded.

    UsageError, which begins with the `setting`, if there is no such class or it cannot be read.
    """
    module = import_torchvision().datasets
    make: Any = getattr(module, name, dict)
    parameters = inspect.signature(make).parameters if name in module.__all__ else {}
    if "train" not in parameters and "split" not in parameters:
        raise UsageError(
            f"{setting}: torchvision.datasets has no {name} with a parameter train or "
            f"split; {nearest(name, set(module.__all__) - {name})}"
        )
    splits: dict[str, Any] = {}
    why = ""
    for split in ("train", "test") if "train" in parameters else _TORCHVISION_SPLITS:
        choice = {"train": split == "train"} if "train" in parameters else {"split": split}
        try:
            splits.setdefault(split.removesuffix("val") or split, make(folder, **choice))
        except ValueError as error:  # no such split
            why = why or first_line(error)
        except Exception as error:
            why = first_line(error).partition(". You can")[0]
    if not splits:
        raise UsageError(
            f"{setting}: torchvision cannot read it ({why}); download it first, with "
            f"torchvision.datasets.{name}(FOLDER, download=True)"
        )
    return splits


def torchvision_tables(datasets: Any, splits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return splits as tables; an image is its number in all splits."""
    first = 0
    tables = {}
    for split, items in splits.items():
        names = [name for name in ("targets", "labels", "_labels") if hasattr(items, name)]
        if names:
            labels = getattr(items, names[0])
        else:  # decodes the images
            labels = [items[number][1] for number in range(len(items))]
        numbers = range(first, first := first + len(items))
        columns = {"image": numbers, "label": [int(label) for label in labels]}
        tables[split] = datasets.Dataset.from_dict(columns)
    return tables


_declared: list[Any] = []
"""Keeps the declarations of operators alive."""


def import_torchvision() -> Any:
    """Return the module torchvision, which is part of our extra "vision".

    A torchvision that was built for another torch cannot load its compiled operators and fails at
    the first one. Classification needs none of them, so the missing ones are declared, with one
    line in the log. UsageError if torchvision is not installed or cannot be imported.
    """
    repair_torchvision()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UsageError(f"task: images need {error.name}; {pip_install('vision')}") from None
    except RuntimeError as error:
        raise UsageError(f"torchvision cannot be imported ({first_line(error)})") from None


def repair_torchvision() -> None:
    """Let imports of torchvision succeed in this process as `import_torchvision` does."""
    if _TorchvisionFinder not in sys.meta_path:
        sys.meta_path.insert(0, _TorchvisionFinder)


class _TorchvisionFinder:
    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a spec whose loader declares missing operators when the import fails."""
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                run(module)
            except RuntimeError as error:
                if "torchvision::nms does not exist" not in str(error):
                    raise
                _declare_operators()
                run(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _declare_operators() -> None:
    from torch.library import Library

    library: Any = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    _LOG.warning(
        "torchvision was built for another torch, so its compiled operators are missing; "
        "classification works without them"
    )


def is_repaired() -> bool:
    """Return whether `import_torchvision` had to declare operators in this process."""
    return bool(_declared)
