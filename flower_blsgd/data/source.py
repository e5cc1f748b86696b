"""Sources of data: a folder or a file, a data set of the HF hub, or one of torchvision."""

import contextlib
import errno
import functools
import importlib
import logging
import mimetypes
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, first_line, pip_install
from .image_folders import VALIDATION, image_tables, split_of
from .libraries import (
    hf_hub_reachable,
    is_hf_hub_name,
    split_torchvision,
    torchvision_splits,
    torchvision_tables,
)

_LOG = logging.getLogger(__name__)

_LIBRARIES = {"images": ("vision", "PIL"), "texts": ("text", "tokenizers")}
"""Extra of this package with the libraries that read each kind, and one library besides
``datasets``."""

_LABELS = ("fine_label", "label", "labels", "class")
COLUMNS = {
    "images": (("img", "image"), _LABELS),
    "texts": (("text", "sentence", "content"), _LABELS),
}
"""Possible names of the sample column and of the label column of each kind; the first existing one
is used."""

_FORMS = {
    "images": "image folders {folders}, or {tables} with columns image and label, or the output of "
    "datasets' save_to_disk, or CLASS:FOLDER for a class of torchvision.datasets",
    "texts": "{tables}, or .csv or .jsonl, with columns text and label",
}

_NOT_DATA = (".git", ".cache", ".ipynb_checkpoints", "__MACOSX", "@eaDir")
"""Folders that tools write."""

_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt")
"""Endings of a single file that is a data set."""

_PATTERN_SIGNS = ("*", "?", "[", "]", "::")
"""Characters that ``datasets`` interprets as a pattern in a path."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data set in a folder or a file, of the HF hub, or of ``torchvision.datasets``.

    `data` is a folder or file, ``OWNER/NAME`` of the HF hub, or ``CLASS:FOLDER`` for a class of
    ``torchvision.datasets``; if it is empty, `hf_hub_name` is read. `name` is that of the task, and
    `noun` is ``"images"`` or ``"texts"``. `num_classes` is the required number; None: any.

    Several splits of `train` or `test` are joined in this order, and the validation split replaces
    a missing test split. With `needs_test`, data without a test split are invalid. `max_samples`
    keeps the first N samples of the training and of the test part, or N evenly spaced ones if they
    are sorted by class; 0: all. UsageError if the folder does not exist.
    """

    name: str
    noun: str = "images"
    hf_hub_name: str = ""
    num_classes: int | None = None
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("test",)
    data: str = ""
    skip_bad: bool = False
    max_samples: int = 0
    needs_test: bool = True

    def __post_init__(self) -> None:
        data = self.data
        remedy = f"name a folder with {self.layout}"
        if self.hf_hub_name:
            remedy += f", or leave data empty for the HF hub's {self.hf_hub_name}"
        try:
            path = self.folder
            found = path is None or path.is_dir() or (path.is_file() and path.suffix in _TABLES)
        except (OSError, RuntimeError, ValueError) as error:  # too long, a link cycle, a NUL
            raise UsageError(f"data = {data!r} is not a valid path ({error}); {remedy}") from None
        if not found:
            raise UsageError(f"data = {data!r} is not a folder, or does not exist; {remedy}")
        if signs := [sign for sign in _PATTERN_SIGNS if self.folder and sign in str(self.folder)]:
            raise UsageError(
                f"data = {data!r}: the path {self.folder} contains {' '.join(signs)}, which the "
                "library datasets interprets as a pattern; rename the folder"
            )

    def __str__(self) -> str:
        prefix = self._torchvision and f"{self._torchvision}:"
        return f"the HF hub's {self._hub}" if self.folder is None else f"{prefix}{self.folder}"

    @functools.cached_property
    def folder(self) -> Path | None:
        """Absolute path of the folder or file; None for the HF hub."""
        name, data = split_torchvision(self.data)
        path = Path(os.path.expanduser(data))
        on_hub = not data or (is_hf_hub_name(data) and not name and not path.exists())
        return None if on_hub else path.resolve()

    @functools.cached_property
    def _torchvision(self) -> str:
        """Name of a class of ``torchvision.datasets``, or empty."""
        return split_torchvision(self.data)[0]

    @property
    def _hub(self) -> str:
        return self.data or self.hf_hub_name

    @property
    def layout(self) -> str:
        """Description of a valid folder."""
        names = (*self.train, *self.test)
        text = _FORMS[self.noun].format(
            tables=" and ".join(f"{name}-*.parquet" for name in names),
            folders=" and ".join(f"{name}/<class>/*.png" for name in names),
        )
        return f"{text}; without a {self.test[-1]} split, set validation-share"

    @property
    def setting(self) -> str:
        """Key and value of the source, the beginning of messages."""
        shown = self.data if self._torchvision or self.folder is None else str(self.folder)
        return f"data = {shown!r}"

    def state(self) -> str:
        """Return a string that changes with any path, size or time of a file in the folder."""
        if self.folder is None:
            if not self._hub:
                raise UsageError(
                    f"data is empty, but task = {self.name!r} needs data; name a folder with "
                    f"{self.layout}; or a data set OWNER/NAME of the HF hub"
                )
            return f"hub {self._hub}"
        try:
            files = sorted(map(" ".join, _files_below(self.folder)))
        except OSError as error:
            raise UsageError(
                f"{self.setting} cannot be read ({error}); repair it or name another folder"
            ) from None
        kind = self._torchvision or "folder"
        return "\n".join([f"{kind} {self.folder}", *files])

    def tables(self, scratch: Path) -> Mapping[str, Any]:
        """Return all splits by name, each a ``datasets.Dataset``, which may use files in `scratch`.

        UsageError if there are no data, or the HF hub is not reachable.
        """
        import datasets

        reachable = self.folder is not None or hf_hub_reachable()
        try:
            with _quiet(datasets, bars=self.folder is None, offline=not reachable):
                tables = self._read(datasets, scratch)
            return {VALIDATION.get(name, name): table for name, table in tables.items()}
        except UsageError:
            raise
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            why = first_line(cause) if reachable else "not reachable"
            raise UsageError(
                f"{self.setting}: {self} cannot be read ({why}); name a folder with {self.layout}"
            ) from error

    def check_libraries(self) -> None:
        """Raise UsageError if a library that reads such data is not installed."""
        extra, library = _LIBRARIES[self.noun]
        try:
            importlib.import_module("datasets")
            importlib.import_module(library)
        except ImportError as error:
            raise UsageError(
                f"task: reading {self.noun} needs {error.name}; {pip_install(extra)}"
            ) from None

    def _read(self, datasets: Any, scratch: Path) -> Mapping[str, Any]:
        if self.folder is None:
            return dict(datasets.load_dataset(self._hub))
        if self._torchvision:
            return torchvision_tables(datasets, self._splits)
        if (self.folder / "dataset_dict.json").is_file():
            return dict(datasets.load_from_disk(str(self.folder)))
        if all((self.folder / f"{name}.json").is_file() for name in ("state", "dataset_info")):
            return {"train": datasets.load_from_disk(str(self.folder))}
        if self.noun == "images" and self._images and not self._has_metadata():
            paths = self._paths, self._images
            return image_tables(datasets, self.folder, self.setting, self.train, *paths)
        builder = self._builder(datasets, scratch, self._data_files())
        for split, found in (builder.config.data_files or {}).items():
            self._files[VALIDATION.get(str(split), str(split))] = [str(file) for file in found]
        files = [file for found in self._files.values() for file in found]
        if len(set(files)) < len(files):
            raise UsageError(
                f"{self.setting}: the names of some files match two splits; put the splits into "
                "top-level folders train and test"
            )
        # A data set card may list more files than the folder has.
        builder.download_and_prepare(verification_mode="no_checks")
        tables = dict(builder.as_dataset())
        if builder.name == "imagefolder":
            self._check_metadata(datasets, tables)
        return tables

    def _builder(self, datasets: Any, scratch: Path, data_files: Any) -> Any:
        """Return the library's reader of files; values in CSV files stay strings."""
        assert self.folder is not None
        folder = str(self.folder.parent if self.folder.is_file() else self.folder)
        builder = datasets.load_dataset_builder(
            folder, data_files=data_files, cache_dir=str(scratch)
        )
        if builder.name == "text":  # a row for each file, not for each line
            builder.config.sample_by, builder.config.encoding = "document", "utf-8-sig"
        elif builder.name == "csv":
            columns = (name for names in COLUMNS[self.noun] for name in names)
            builder.config.converters = dict.fromkeys(columns, str)
            builder.config.keep_default_na = False
        return builder

    @functools.cached_property
    def _files(self) -> dict[str, list[str]]:
        """Paths of the files that each split was read from."""
        return {}

    def where(self, split: str, row: int) -> str:
        """Return the file of a row of a split and its number in this file, counted from 1."""
        import datasets

        files = self._files.get(split, ())
        for file in files:
            if len(files) > 1:  # reads it again, only for a message
                with tempfile.TemporaryDirectory() as scratch, _quiet(datasets):
                    builder = self._builder(datasets, Path(scratch), {"train": file})
                    builder.download_and_prepare()
                    count = len(builder.as_dataset()["train"])
                if row >= count:
                    row -= count
                    continue
            return f"{file}, row {row + 1}"
        return f"row {row + 1} of {split}"

    def _data_files(self) -> Any:
        """Return the files of each split as patterns; None to let ``datasets`` find the splits."""
        from huggingface_hub import DatasetCard

        assert self.folder is not None
        if self.folder.is_file():
            return {"train": self.folder.name}
        # datasets searches for names of splits at any depth. Without patterns, CIFAR-100's class
        # "train" in the folder "test" would belong to both. A data set card may name the files.
        card = self.folder / "README.md"
        names_files = card.is_file() and DatasetCard.load(card).data.get("configs")
        names = () if names_files else ("train", "test", *VALIDATION)
        patterns = {name: f"{name}/**" for name in names if (self.folder / name).is_dir()}
        return patterns if len(patterns) > 1 else None

    # --- image folders

    @functools.cached_property
    def _paths(self) -> list[str]:
        """Relative paths of all files and, with a slash at the end, of all folders."""
        return sorted(path for path, _ in _files_below(self.folder)) if self.folder else []

    @functools.cached_property
    def _images(self) -> list[str]:
        """Relative paths of all images; empty if there are Parquet files of splits."""
        from PIL.Image import OPEN, registered_extensions

        if any(path.endswith((".parquet", ".arrow")) and split_of(path) for path in self._paths):
            return []
        known = {end for end, form in registered_extensions().items() if form in OPEN}
        return [path for path in self._paths if os.path.splitext(path)[1].lower() in known]

    def _has_metadata(self) -> bool:
        """Return whether metadata files give the labels of images."""
        for path in self._paths:
            if path.endswith(("metadata.csv", "metadata.jsonl")):
                with open(f"{self.folder}/{path}", errors="replace") as file:
                    head = file.readline()
                if "file_name" in head and any(name in head for name in _LABELS):
                    return True
        return False

    def _check_metadata(self, datasets: Any, tables: Mapping[str, Any]) -> None:
        """Raise UsageError if metadata files do not list all images."""
        listed = {
            str(image["path"])
            for table in tables.values()
            for image in table.cast_column("image", datasets.Image(decode=False))["image"]
        }
        if more := [path for path in self._images if f"{self.folder}/{path}" not in listed]:
            raise UsageError(
                f"{self.setting}: the metadata do not list {len(more)} images, such as {more[0]}; "
                "add or remove them"
            )

    # --- torchvision

    @functools.cached_property
    def _splits(self) -> Mapping[str, Any]:
        assert self.folder is not None
        return torchvision_splits(self._torchvision, self.folder, self.setting)

    def image_at(self, number: int) -> Any:
        """Return an image of a torchvision data set, by its number in all splits."""
        from torch.utils.data import ConcatDataset

        return ConcatDataset(self._splits.values())[number][0]


@contextlib.contextmanager
def _quiet(datasets: Any, bars: bool = False, offline: bool = False) -> Iterator[None]:
    """Silence ``datasets``; keep its progress `bars`; `offline`, it uses only its downloads."""
    import huggingface_hub.constants as hf_hub

    level, shown = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    before = hf_hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our message replaces its own
    if not bars:
        datasets.disable_progress_bars()
    if offline:
        hf_hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()
        hf_hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _files_below(
    folder: Path, prefix: str = "", above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[str, str]]:
    """Yield path, and size and time, of every file, of every folder, or of a single file.

    The paths of folders end with a slash. Links are followed; `above` are the folders around.
    OSError for a link to nothing or to a folder around it.
    """
    status = folder.stat()
    if not folder.is_dir():
        yield "", f"{status.st_size} {status.st_mtime_ns}"
        return
    if (status.st_dev, status.st_ino) in above:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
    above |= {(status.st_dev, status.st_ino)}
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if entry.is_dir():
                if entry.name not in _NOT_DATA:
                    yield f"{path}/", ""
                    yield from _files_below(Path(entry.path), f"{path}/", above)
            elif not entry.name.startswith(".") or _is_hidden_image(entry.name):
                status = entry.stat()
                yield path, f"{status.st_size} {status.st_mtime_ns}"


def _is_hidden_image(name: str) -> bool:
    """Return whether a hidden file is an image, and not what macOS or an editor writes."""
    kind = mimetypes.guess_type(name)[0] or ""
    return kind.startswith("image/") and not name.startswith(("._", ".#"))
