"""Where data come from: a folder of one's own, or a data set of the hub."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..hub import hub_answers, offline

_PATTERN_SIGNS = set("*?[]")

_SAVED = "dataset_dict.json"
"""What ``datasets.DatasetDict.save_to_disk`` writes beside the splits."""

_SAVED_ALONE = ("dataset_info.json", "state.json")
"""What ``datasets.Dataset.save_to_disk`` writes: a single split without a name."""

_ALIASES = (frozenset({"validation", "valid", "val", "dev"}),)
"""Names of one and the same split."""


@dataclass(frozen=True)
class DataSource:
    """A folder, or a data set of the hub if `folder` is None.

    Parameters
    ----------
    hub_name : str
        Such as ``"uoft-cs/cifar10"``.
    folder : Path, optional
        Read instead of the hub.
    layout : str
        What a folder must look like, for messages.
    noun, extra : str
        What is read, and what must be installed for that, for messages.
    """

    hub_name: str
    folder: Path | None = None
    layout: str = ""
    noun: str = "images"
    extra: str = "vision"

    def __str__(self) -> str:
        return f"the hub's {self.hub_name}" if self.folder is None else str(self.folder)

    @property
    def said(self) -> str:
        """The setting that names it, as messages begin."""
        return f"data = {'' if self.folder is None else str(self.folder)!r}"

    def state(self) -> str:
        """Return a text that changes when files of the folder do.

        Raises
        ------
        UsageError
            If the folder cannot be read.
        """
        if self.folder is None:
            return f"hub {self.hub_name}"
        try:
            files = sorted(_files_below(self.folder))
        except OSError as error:
            raise UsageError(
                f"{self.said}: {error.filename} cannot be read ({error.strerror}); mend it or name "
                "another folder"
            ) from None
        return "\n".join([f"folder {self.folder}", *files])

    def tables(self, scratch: Path) -> Mapping[str, Any]:
        """Return all splits, each a ``datasets.Dataset``.

        Parameters
        ----------
        scratch : Path
            Where the library may keep what it makes of a folder; may be removed when the tables
            are no longer needed.

        Raises
        ------
        UsageError
            If there are no data, or the hub is out of reach.
        OSError
            If the disk is full.
        """
        try:
            import datasets
        except ImportError as error:
            raise self.missing(error) from None
        tables = (
            self._from_hub(datasets)
            if self.folder is None
            else self._from_folder(datasets, self.folder, scratch)
        )
        return dict(tables)

    def find_split(self, tables: Mapping[str, Any], wanted: str) -> Any:
        """Return one of the splits, whichever of its usual names it has.

        Raises
        ------
        UsageError
            If there is no such split.
        """
        names = next((names for names in _ALIASES if wanted in names), {wanted})
        found = [name for name in (wanted, *sorted(names)) if name in tables]
        if not found:
            raise UsageError(
                f"{self.said}: no {wanted} split, found {', '.join(tables)}; expected {self.layout}"
            )
        return tables[found[0]]

    def missing(self, error: ImportError) -> UsageError:
        """Return the line that names a library which is not installed."""
        return UsageError(
            f"task: reading {self.noun} needs {error.name}; "
            f"pip install 'flower-blsgd[{self.extra}]'"
        )

    def unreadable(self, error: BaseException) -> UsageError:
        """Return the line that says that the data cannot be read, and why."""
        return UsageError(f"{self.said} cannot be read ({_reason(error)}); expected {self.layout}")

    def _from_folder(self, datasets: Any, folder: Path, scratch: Path) -> Any:
        try:
            with _quiet(datasets, progress=False):
                if (folder / _SAVED).is_file():
                    return datasets.load_from_disk(str(folder))
                if all((folder / name).is_file() for name in _SAVED_ALONE):
                    return {"train": datasets.load_from_disk(str(folder))}
                return datasets.load_dataset(str(folder), cache_dir=str(scratch))
        except Exception as error:
            _raise_if_disk_is_full(error)
            if isinstance(error, FileNotFoundError) and not (folder / _SAVED).is_file():
                raise UsageError(
                    f"{self.said} holds no readable data; expected {self.layout}"
                ) from None
            raise self.unreadable(error) from error

    def _from_hub(self, datasets: Any) -> Any:
        reached = hub_answers()
        try:
            with _quiet(datasets, progress=True), offline(not reached):
                return datasets.load_dataset(self.hub_name)  # offline: from its own cache
        except Exception as error:
            _raise_if_disk_is_full(error)
            why = f"refused ({_reason(error)})" if reached else "is out of reach"
            raise UsageError(
                f"{self.said}: the hub with {self.hub_name} {why}; give data=<folder> that holds "
                f"{self.layout}"
            ) from None


def find_source(
    hub_name: str, data: str, layout: str, noun: str = "images", extra: str = "vision"
) -> DataSource:
    """Return the source of a task's data.

    Parameters
    ----------
    hub_name : str
        Such as ``"uoft-cs/cifar10"``.
    data : str
        A folder; empty for the hub.
    layout : str
        What a folder must look like, for messages.
    noun, extra : str
        What is read, and the extra of this package that brings the libraries for it.

    Raises
    ------
    UsageError
        If there is no such folder.
    """
    if not data:
        return DataSource(hub_name, None, layout, noun, extra)
    folder = Path(data).expanduser()
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(
            f"data = {data!r} {what}; name a folder with {layout}, or leave data empty for the "
            f"hub's {hub_name}"
        )
    folder = folder.resolve()
    if signs := "".join(sorted(set(str(folder)) & _PATTERN_SIGNS)):
        raise UsageError(
            f"data = {data!r}: the path {folder} holds {signs}, which the library that reads it "
            "takes for a pattern; rename the folder"
        )
    return DataSource(hub_name, folder, layout, noun, extra)


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


@contextlib.contextmanager
def _quiet(datasets: Any, progress: bool) -> Iterator[None]:
    """Let the library say nothing: what is wrong is told once, by us."""
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


def _raise_if_disk_is_full(error: BaseException | None) -> None:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """Return the first line of what was wrong at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
