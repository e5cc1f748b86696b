"""Where data come from: a folder of one's own, or a data set of the hub."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..hub import hub_answers, offline
from .folder_files import files_below, files_of_splits, pattern_signs, shared_file
from .library_calls import closed_disk, full_disk, odd_name, quiet, reason

_SAVED = "dataset_dict.json"
"""What ``datasets.DatasetDict.save_to_disk`` writes beside the splits."""

_SAVED_ALONE = ("dataset_info.json", "state.json")
"""What ``datasets.Dataset.save_to_disk`` writes: a single split without a name."""

_ALIASES = (frozenset({"validation", "valid", "val", "dev"}),)
"""Names of one and the same split."""

_MANY_CONFIGURATIONS = "Config name is missing"
"""How the library refuses a folder whose card describes more than one data set."""


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
            files = sorted(files_below(self.folder))
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
        return UsageError(f"{self.said} cannot be read ({reason(error)}); expected {self.layout}")

    def _from_folder(self, datasets: Any, folder: Path, scratch: Path) -> Any:
        try:
            with quiet(datasets, progress=False):
                if (folder / _SAVED).is_file():
                    return datasets.load_from_disk(str(folder))
                if all((folder / name).is_file() for name in _SAVED_ALONE):
                    return {"train": datasets.load_from_disk(str(folder))}
                builder = datasets.load_dataset_builder(
                    str(folder), data_files=files_of_splits(folder), cache_dir=str(scratch)
                )
                self._refuse_shared(builder.config.data_files or {})
                # A card may speak of more files than this folder has.
                builder.download_and_prepare(verification_mode="no_checks")
                return builder.as_dataset()
        except UsageError:
            raise
        except Exception as error:
            if full := full_disk(error):
                raise full from None
            if isinstance(error, FileNotFoundError) and not (folder / _SAVED).is_file():
                raise UsageError(
                    f"{self.said} holds no readable data; expected {self.layout}"
                ) from None
            if name := odd_name(error):
                raise UsageError(
                    f"{self.said}: a file name is not UTF-8 ({name!a}), which the "
                    "library that reads it cannot take; rename the file"
                ) from None
            if str(error).startswith(_MANY_CONFIGURATIONS):
                raise UsageError(
                    f"{self.said}: its README.md describes several data sets; remove README.md, "
                    f"or name a folder with one of them, as {self.layout}"
                ) from None
            raise self.unreadable(error) from error

    def _refuse_shared(self, files: Mapping[str, Any]) -> None:
        if shared := shared_file(files):
            path, one, other = shared
            raise UsageError(
                f"{self.said}: {path} belongs by its name to {one} and to {other}; rename files "
                "and folders within the splits, or put the splits into folders train and test "
                "at the top"
            )

    def _from_hub(self, datasets: Any) -> Any:
        reached = hub_answers()
        try:
            with quiet(datasets, progress=True), offline(not reached):
                return datasets.load_dataset(self.hub_name)  # offline: from its own cache
        except Exception as error:
            if no_room := full_disk(error) or closed_disk(error):
                raise UsageError(
                    f"{self.said}: the cache of the hub's library cannot be written "
                    f"({reason(no_room)}); make room, or set HF_HOME to another folder"
                ) from None
            why = f"refused ({reason(error)})" if reached else "is out of reach"
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
    told = f"with {layout}, or leave data empty for the hub's {hub_name}"
    try:
        folder = Path(data).expanduser()
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise UsageError(f"data = {data!r} is not a folder; name a folder {told}")
        folder = folder.resolve()
    except FileNotFoundError:
        raise UsageError(f"data = {data!r} does not exist; name a folder {told}") from None
    except (OSError, RuntimeError) as error:  # the latter: the home of nobody
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UsageError(
            f"data = {data!r} cannot be looked at ({why}); name a folder {told}"
        ) from None
    if signs := pattern_signs(folder):
        raise UsageError(
            f"data = {data!r}: the path {folder} holds {signs}, which the library that reads it "
            "takes for a pattern; rename the folder"
        )
    return DataSource(hub_name, folder, layout, noun, extra)
