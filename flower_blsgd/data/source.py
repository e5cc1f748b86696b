"""Sources of data: a folder or a data set of the HF hub, read by ``datasets``."""

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
"""Extra of this package with the libraries that read each kind, and one library besides
``datasets``."""

_VALIDATION = dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""Names of the validation split."""

_PATTERN_SIGNS = ("*", "?", "[", "]", "::")
"""Characters that ``datasets`` interprets as a pattern in a path."""

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data set of the HF hub, or a folder in its layout.

    Parameters
    ----------
    name : str
        Name of the task, such as ``"cifar10"``.
    hf_hub_name : str
        Name on the HF hub, such as ``"uoft-cs/cifar10"``.
    noun : str (default: "images")
        Kind of samples: ``"images"`` or ``"texts"``.
    forms : str
        Description of valid folders for messages, with placeholders ``{tables}`` and ``{folders}``.
    columns : pair of tuple of str
        Possible names of the sample column and of the label column; the first existing one is used.
    num_classes : int, optional
        Required number of classes; None: any number.
    train, test : tuple of str (default: ("train",), ("test",))
        Training and test splits; several are joined in this order.
    data : str (default: "")
        Folder to read instead of the HF hub.

    Raises
    ------
    UsageError
        If the folder does not exist.
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
        return f"the HF hub's {self.hf_hub_name}" if self.folder is None else str(self.folder)

    @functools.cached_property
    def folder(self) -> Path | None:
        """Absolute path of the folder; None for the HF hub."""
        return Path(os.path.expanduser(self.data)).resolve() if self.data else None

    @property
    def layout(self) -> str:
        """Description of a valid folder."""
        names = (*self.train, *self.test)
        return self.forms.format(
            tables=" and ".join(f"{name}-*.parquet" for name in names),
            folders=" and ".join(f"{name}/<class>/*.png" for name in names),
        )

    @property
    def setting(self) -> str:
        """Key and value of the source, the beginning of messages."""
        return f"data = {str(self.folder or '')!r}"

    def state(self) -> str:
        """Return a string that changes with any path, size or time of a file in the folder.

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
        """Return all splits by name, each a ``datasets.Dataset``.

        Parameters
        ----------
        scratch : Path
            Folder for the library's files; must exist as long as the tables.

        Raises
        ------
        UsageError
            If there are no data, or the HF hub is not reachable.
        """
        import datasets
        import huggingface_hub.constants as hf_hub

        reachable = self.folder is not None or hf_hub_reachable()
        level = datasets.logging.get_verbosity()
        offline = hf_hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our message replaces its own
        if not reachable:  # offline, it uses its downloads
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
            why = first_line(cause) if reachable else "not reachable"
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
        # datasets searches for names of splits at any depth. Without patterns, CIFAR-100's class
        # "train" in the folder "test" would belong to both. A data set card may name the files.
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
                f"{self.setting}: the names of some files match two splits; put the splits into "
                "top-level folders train and test"
            )
        # A data set card may list more files than the folder has.
        builder.download_and_prepare(verification_mode="no_checks")
        return dict(builder.as_dataset())


def _files_below(folder: Path, prefix: str = "") -> Iterator[str]:
    """Yield path, size and time of every file that is not hidden."""
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
    """Return whether the HF hub answers within seconds and is not disabled (``HF_HUB_OFFLINE``).

    The hub's own library tries for half a minute.
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
            pass  # also an answer
        except Exception:  # no network, no such address, or no HTTP
            return
        answered.set()

    requesting = threading.Thread(target=request, daemon=True)  # resolving a name has no timeout
    requesting.start()
    requesting.join(_TIMEOUT_SECONDS)
    return answered.is_set()
