"""Folders in the form in which a data set was published."""

from pathlib import Path

from ..errors import UsageError
from .source import DataSource


def published_folder(source: DataSource, name: str, mark: str) -> Path | None:
    """Return the folder with the files: the one that was given, or one of that name in it.

    Parameters
    ----------
    source : DataSource
        What was given.
    name : str
        What the folder is called as it was published.
    mark : str
        A file that tells it from others.
    """
    if source.folder is None:
        return None
    places = (source.folder, source.folder / name)
    return next((place for place in places if (place / mark).is_file()), None)


def unusable(source: DataSource, path: Path, why: str) -> UsageError:
    """Return the line that says what is wrong with a file of such a folder."""
    return UsageError(
        f"{source.said}: {path} {why}; unpack the archive again, or name another folder"
    )


def read_lines(source: DataSource, path: Path) -> list[str]:
    """Return the lines of a text file that are not empty.

    Raises
    ------
    UsageError
        If it cannot be read.
    """
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise unusable(source, path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise unusable(source, path, "is not text") from None
