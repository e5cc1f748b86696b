"""Where data come from: a folder, or a data set of the Hugging Face hub, read by ``datasets``."""

import functools
import importlib
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, first_line, pip_install

_LIBRARIES = {"images": ("vision", "PIL"), "texts": ("text", "tokenizers")}
"""Which extra of this package brings the libraries that read them, and one beside ``datasets``."""

_VALIDATION = dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""What the split for validation may be called."""

_PATTERN_SIGNS = ("*", "?", "[", "]", "::")
"""What ``datasets`` takes for a pattern in a path, which may fit another folder."""

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set of the Hugging Face hub, or a folder in its layout.

    Parameters
    ----------
    name : str
        The task, such as ``"cifar10"``.
    hf_hub_name : str
        Such as ``"uoft-cs/cifar10"``.
    noun : str (default: "images")
        What is read: ``"images"`` or ``"texts"``.
    forms : str
        What a folder must look like, for messages; in it ``{tables}`` and ``{folders}`` stand
        for the names of the splits.
    columns : pair of tuple of str
        What the columns of samples and of labels may be called; the first that exists counts.
    num_classes : int, optional
        How many it must have; None for any number.
    train, test : tuple of str (default: ("train",), ("test",))
        The splits to train and to test on; several are joined in this order.
    data : str (default: "")
        A folder that is read instead of the HF hub.

    Raises
    ------
    UsageError
        If there is no such folder.
    """

    name: str
    hf_hub_name: str
    noun: str = "images"
    forms: str
    columns: tuple[tuple[str, ...], tuple[str, ...]]
    num_classes: int | None = None
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("test",)
    data: str = ""

    def __post_init__(self) -> None:
        data, remedy = self.data, f"name a folder with {self.layout}"
        remedy += f", or leave data empty for the HF hub's {self.hf_hub_name}"
        try:
            found = self.folder is None or self.folder.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, a NUL
            raise UsageError(f"data = {data!r} is no folder's path ({error}); {remedy}") from None
        if not found:
            raise UsageError(f"data = {data!r} is not a folder, or does not exist; {remedy}")
        if signs := [sign for sign in _PATTERN_SIGNS if self.folder and sign in str(self.folder)]:
            raise UsageError(
                f"data = {data!r}: the path {self.folder} holds {' '.join(signs)}, which the "
                "library that reads it takes for a pattern; rename the folder"
            )

    def __str__(self) -> str:
        return f"the HF hub's {self.hf_hub_name}" if self.folder is None else str(self.folder)

    @functools.cached_property
    def folder(self) -> Path | None:
        """The whole path of the folder; None for the HF hub."""
        return Path(os.path.expanduser(self.data)).resolve() if self.data else None

    @property
    def layout(self) -> str:
        """What a folder must look like."""
        names = (*self.train, *self.test)
        return self.forms.format(
            tables=" and ".join(f"{name}-*.parquet" for name in names),
            folders=" and ".join(f"{name}/<class>/*.png" for name in names),
        )

    @property
    def setting(self) -> str:
        """The key and value that name the source, as messages begin."""
        return f"data = {str(self.folder or '')!r}"

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
                f"{self.setting} cannot be read ({error}); repair it or name another folder"
            ) from None
        return "\n".join([f"folder {self.folder}", *files])

    def tables(self, scratch: Path) -> Mapping[str, Any]:
        """Return all splits, each a ``datasets.Dataset``; validation goes by this name.

        Parameters
        ----------
        scratch : Path
            Where the library may write; must live as long as the tables do.

        Raises
        ------
        UsageError
            If there are no data, or the HF hub is out of reach.
        """
        import datasets
        import huggingface_hub.constants as hf_hub

        reachable = self.folder is not None or hf_hub_reachable()
        level = datasets.logging.get_verbosity()
        offline = hf_hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said here
        if not reachable:  # offline it reads what it has downloaded before
            hf_hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            tables = self._read(datasets, scratch)
            return {_VALIDATION.get(name, name): table for name, table in tables.items()}
        except UsageError:
            raise
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            why = first_line(cause) if reachable else "out of reach"
            raise UsageError(
                f"{self.setting}: {self} cannot be read ({why}); name a folder with {self.layout}"
            ) from error
        finally:
            datasets.logging.set_verbosity(level)
            hf_hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline

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
        from huggingface_hub import DatasetCard

        if self.folder is None:
            return dict(datasets.load_dataset(self.hf_hub_name))
        if (self.folder / "dataset_dict.json").is_file():
            return dict(datasets.load_from_disk(str(self.folder)))
        # datasets looks for the names of splits at any depth: without patterns, CIFAR-100's class
        # "train" of the folder "test" would belong to both. A data set card may name the files.
        card = self.folder / "README.md"
        names_files = card.is_file() and DatasetCard.load(card).data.get("configs")
        names = () if names_files else ("train", "test", *_VALIDATION)
        patterns = {name: f"{name}/**" for name in names if (self.folder / name).is_dir()}
        builder = datasets.load_dataset_builder(
            str(self.folder),
            data_files=patterns if len(patterns) > 1 else None,
            cache_dir=str(scratch),
        )
        files = [file for split in (builder.config.data_files or {}).values() for file in split]
        if len(set(files)) < len(files):
            raise UsageError(
                f"{self.setting}: some files belong by their names to two splits; put the splits "
                "into folders train and test at the top"
            )
        # A data set card may speak of more files than this folder has.
        builder.download_and_prepare(verification_mode="no_checks")
        return dict(builder.as_dataset())


def _files_below(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield path, size and time of every file; hidden ones are not data."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files_below(Path(entry.path), f"{path}/")
            else:
                status = entry.stat()
                yield f"{path} {status.st_size} {status.st_mtime_ns}"


def hf_hub_reachable() -> bool:
    """Return whether the hub is not switched off (``HF_HUB_OFFLINE``), and answers at all.

    Its own library tries for half a minute before it gives up.
    """
    import huggingface_hub.constants as hf_hub

    if hf_hub.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def request() -> None:
        try:
            head = urllib.request.Request(str(hf_hub.ENDPOINT), method="HEAD")
            urllib.request.urlopen(head, timeout=_TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except Exception:  # there is no network, no such address, or something else answers
            return
        answered.set()

    requesting = threading.Thread(target=request, daemon=True)  # resolving a name has no timeout
    requesting.start()
    requesting.join(_TIMEOUT_SECONDS)
    return answered.is_set()
