"""Where data come from: a folder, or a data set of the Hugging Face hub, read by ``datasets``."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .hf_hub import first_line, hf_hub_reachable, offline

_GLOB_CHARACTERS = ("*", "::", "?", "[", "]")
"""What ``datasets`` takes for a pattern in a path."""

_SAVED = "dataset_dict.json"
"""What ``datasets.DatasetDict.save_to_disk`` writes beside the splits."""

_SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"""What the folder of a split may be called; the first that exists counts."""


@dataclass(frozen=True)
class DataSource:
    """A folder, or a data set of the Hugging Face hub if `folder` is None.

    Parameters
    ----------
    hf_hub_name : str
        Such as ``"uoft-cs/cifar10"``.
    folder : Path, optional
        Read instead of the HF hub.
    layout : str
        What a folder must look like, for messages.
    noun, extra : str
        What is read, and which extra of this package brings the libraries for it, for messages.
    """

    hf_hub_name: str
    folder: Path | None = None
    layout: str = ""
    noun: str = "images"
    extra: str = "vision"

    def __str__(self) -> str:
        return f"the HF hub's {self.hf_hub_name}" if self.folder is None else str(self.folder)

    @property
    def setting(self) -> str:
        """The key and value that name the source, as messages begin."""
        folder = "" if self.folder is None else str(self.folder)
        return f"data = {folder!r}"

    def state(self) -> str:
        """Return a text that changes with any path, size or time of a file of the folder.

        Raises
        ------
        UsageError
            If the folder cannot be read.
        """
        if self.folder is None:
            return f"hub {self.hf_hub_name}"
        try:
            files = sorted(_files_below(self.folder))
        except OSError as error:
            raise UsageError(
                f"{self.setting}: {error.filename} cannot be read ({error.strerror}); repair it "
                "or name another folder"
            ) from None
        return "\n".join([f"folder {self.folder}", *files])

    def tables(self, scratch: Path) -> Mapping[str, Any]:
        """Return all splits, each a ``datasets.Dataset``.

        Parameters
        ----------
        scratch : Path
            Where the library may write; must live as long as the tables do.

        Raises
        ------
        UsageError
            If there are no data, or the HF hub is out of reach.
        """
        try:
            import datasets
        except ImportError as error:
            raise self.missing_library(error) from None
        if self.folder is None:
            return dict(self._read_hf_hub(datasets))
        return dict(self._read_folder(datasets, self.folder, scratch))

    def find_split(self, tables: Mapping[str, Any], wanted: str) -> Any:
        """Return one of the splits; the validation split may have any of its usual names.

        Raises
        ------
        UsageError
            If there is no such split.
        """
        validation = _SPLIT_NAMES["validation"]
        for name in (wanted, *(validation if wanted in validation else ())):
            if name in tables:
                return tables[name]
        raise UsageError(
            f"{self.setting}: no {wanted} split, found {', '.join(tables)}; expected {self.layout}"
        )

    def missing_library(self, error: ImportError) -> UsageError:
        """Return the error that names a library which is not installed."""
        return UsageError(
            f"task: reading {self.noun} needs {error.name}; "
            f"pip install 'flower-blsgd[{self.extra}]'"
        )

    def _read_folder(self, datasets: Any, folder: Path, scratch: Path) -> Mapping[str, Any]:
        try:
            with _quiet(datasets, progress=False):
                if (folder / _SAVED).is_file():
                    return dict(datasets.load_from_disk(str(folder)))
                builder = datasets.load_dataset_builder(
                    str(folder), data_files=_files_of_splits(folder), cache_dir=str(scratch)
                )
                self._refuse_shared_files(builder.config.data_files or {})
                # A data set card may speak of more files than this folder has.
                builder.download_and_prepare(verification_mode="no_checks")
                return dict(builder.as_dataset())
        except UsageError:
            raise
        except Exception as error:
            cause = _first_cause(error)
            if isinstance(error, FileNotFoundError) and not (folder / _SAVED).is_file():
                raise UsageError(
                    f"{self.setting} holds no readable data; expected {self.layout}"
                ) from None
            raise UsageError(
                f"{self.setting} cannot be read ({first_line(cause)}); expected {self.layout}"
            ) from error

    def _refuse_shared_files(self, files: Mapping[str, Sequence[str]]) -> None:
        """Refuse a file of two splits: test samples among those for training."""
        owners: dict[str, str] = {}
        for split, paths in files.items():
            for path in paths:
                if (owner := owners.setdefault(path, split)) != split:
                    raise UsageError(
                        f"{self.setting}: {path} belongs by its name to {owner} and to {split}; "
                        "put the splits into folders train and test at the top"
                    )

    def _read_hf_hub(self, datasets: Any) -> Mapping[str, Any]:
        reachable = hf_hub_reachable()
        try:
            with _quiet(datasets, progress=True), offline(not reachable):
                # Offline it reads what it has downloaded before.
                return dict(datasets.load_dataset(self.hf_hub_name))
        except Exception as error:
            cause = _first_cause(error)
            why = f"cannot be read ({first_line(cause)})" if reachable else "is out of reach"
            raise UsageError(
                f"{self.setting}: the HF hub's {self.hf_hub_name} {why}; give data=<folder> that "
                f"holds {self.layout}"
            ) from None


def find_source(
    hf_hub_name: str, data: str, layout: str, noun: str = "images", extra: str = "vision"
) -> DataSource:
    """Return the source of a task's data.

    Parameters
    ----------
    data : str
        A folder; empty for the HF hub.
    hf_hub_name, layout, noun, extra
        As of `DataSource`.

    Raises
    ------
    UsageError
        If there is no such folder.
    """
    if not data:
        return DataSource(hf_hub_name, None, layout, noun, extra)
    remedy = f"name a folder with {layout}, or leave data empty for the HF hub's {hf_hub_name}"
    try:
        folder = Path(data).expanduser().resolve()
        found = folder.is_dir()
    except (OSError, RuntimeError) as error:  # the latter: the home of a user who does not exist
        raise UsageError(f"data = {data!r} cannot be looked at ({error}); {remedy}") from None
    if not found:
        raise UsageError(f"data = {data!r} is not a folder, or does not exist; {remedy}")
    if signs := "".join(sign for sign in _GLOB_CHARACTERS if sign in str(folder)):
        raise UsageError(
            f"data = {data!r}: the path {folder} holds {signs}, which the library that reads it "
            "takes for a pattern; rename the folder"
        )
    return DataSource(hf_hub_name, folder, layout, noun, extra)


def _files_below(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield path, size and time of every file; hidden ones are not data."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = f"{prefix}{entry.name}"
            if entry.is_dir():
                yield from _files_below(Path(entry.path), f"{path}/")
            else:
                status = entry.stat()
                yield f"{path} {status.st_size} {status.st_mtime_ns}"


def _files_of_splits(folder: Path) -> dict[str, str] | None:
    """Return the pattern of each split's files where a folder has subfolders of splits.

    ``datasets`` looks for the names of splits at any depth: CIFAR-100's class ``train`` would
    belong to two splits. None where it is to look itself: there are fewer than two such
    subfolders, or a data set card names the files.
    """
    card = folder / "README.md"
    if card.is_file() and card.read_text(errors="replace").lstrip("\ufeff").startswith("---"):
        return None
    patterns = {}
    for split, names in _SPLIT_NAMES.items():
        if found := [name for name in names if (folder / name).is_dir()]:
            patterns[split] = f"{found[0]}/**"
    return patterns if len(patterns) > 1 else None


@contextlib.contextmanager
def _quiet(datasets: Any, progress: bool) -> Iterator[None]:
    """Silence the library's log: what is wrong is said once, by us."""
    level, bars = datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not progress:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
