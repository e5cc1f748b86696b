"""Where labelled images come from: a folder of one's own, or a data set of the hub."""

import contextlib
import errno
import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .image_columns import LAYOUT, ImageSplit, image_split

HUB_NAMES = {"cifar10": "uoft-cs/cifar10"}
"""The hub's name of each task's data."""

_HUB_PATIENCE_SECONDS = 5.0
_PATTERN_SIGNS = set("*?[]")


@dataclass(frozen=True)
class ImageSource:
    """A folder, or a data set of the hub if `folder` is None."""

    hub_name: str
    folder: Path | None = None

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

    def load(self, scratch: Path) -> tuple[ImageSplit, ImageSplit]:
        """Return the training and the test split, not yet decoded.

        Parameters
        ----------
        scratch : Path
            Where the library may keep what it makes of a folder; may be removed afterwards.

        Raises
        ------
        UsageError
            If there are no labelled images in two splits, or the hub is out of reach.
        OSError
            If the disk is full.
        """
        try:
            import datasets
            import PIL  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"task: reading images needs {error.name}; pip install 'flower-blsgd[vision]'"
            ) from None
        if self.folder is None:
            splits = self._from_hub(datasets)
        else:
            splits = self._from_folder(datasets, self.folder, scratch)
        for needed in ("train", "test"):
            if needed not in splits:
                raise UsageError(
                    f"{self.said}: no {needed} split, found {', '.join(splits)}; expected {LAYOUT}"
                )
        train, test = (image_split(self.said, name, splits[name]) for name in ("train", "test"))
        return train, test

    def _from_folder(self, datasets: Any, folder: Path, scratch: Path) -> Any:
        try:
            with _quiet(datasets, progress=False):
                return datasets.load_dataset(str(folder), cache_dir=str(scratch))
        except Exception as error:
            _raise_if_disk_is_full(error)
            if isinstance(error, FileNotFoundError):
                raise UsageError(f"{self.said} holds no readable data; expected {LAYOUT}") from None
            raise UsageError(
                f"{self.said} cannot be read ({_reason(error)}); expected {LAYOUT}"
            ) from error

    def _from_hub(self, datasets: Any) -> Any:
        import huggingface_hub.constants as hub

        offline = hub.HF_HUB_OFFLINE or not _answers(str(hub.ENDPOINT))
        try:
            with _quiet(datasets, progress=True), _offline(offline, datasets.config, hub):
                return datasets.load_dataset(self.hub_name)  # offline: from its own cache
        except Exception as error:
            _raise_if_disk_is_full(error)
            why = "is out of reach" if offline else f"refused ({_reason(error)})"
            raise UsageError(
                f"{self.said}: the hub with {self.hub_name} {why}; give data=<folder> that holds "
                f"{LAYOUT}"
            ) from None


def find_source(name: str, data: str) -> ImageSource:
    """Return the source of a task's images.

    Parameters
    ----------
    name : str
        The task, a key of `HUB_NAMES`.
    data : str
        A folder; empty for the hub.

    Raises
    ------
    UsageError
        If there is no such folder.
    """
    hub_name = HUB_NAMES[name]
    if not data:
        return ImageSource(hub_name)
    folder = Path(data).expanduser()
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(
            f"data = {data!r} {what}; name a folder with {LAYOUT}, or leave data empty for the "
            f"hub's {hub_name}"
        )
    folder = folder.resolve()
    if signs := "".join(sorted(set(str(folder)) & _PATTERN_SIGNS)):
        raise UsageError(
            f"data = {data!r}: the path {folder} holds {signs}, which the library that reads it "
            "takes for a pattern; rename the folder"
        )
    return ImageSource(hub_name, folder)


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


def _answers(endpoint: str) -> bool:
    """Say whether a server answers at all; the hub's own library tries for half a minute."""
    answered = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            urllib.request.urlopen(request, timeout=_HUB_PATIENCE_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit
    asking.start()
    asking.join(_HUB_PATIENCE_SECONDS)
    return answered.is_set()


@contextlib.contextmanager
def _offline(offline: bool, *modules: Any) -> Iterator[None]:
    """Keep the hub's library from trying again and again."""
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules if offline else ():
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


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
