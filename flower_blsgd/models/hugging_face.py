"""Use transformers where it is installed, without what it says on the way."""

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from types import ModuleType

from ..errors import UsageError
from .torchvision_ops import import_torchvision


def import_transformers(needed_for: str, extra: str) -> ModuleType:
    """Return transformers, ready to make models.

    Parameters
    ----------
    needed_for : str
        How the message begins where it is missing, such as ``"model = 'vit-b-16'"``.
    extra : str
        The extra of ours that brings it: ``"vision"`` or ``"text"``.

    Raises
    ------
    UsageError
        If it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{needed_for} needs transformers; pip install 'flower-blsgd[{extra}]'")
    # transformers imports torchvision where it is installed, which does not always go by itself.
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    return importlib.import_module("transformers")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from logging and drawing bars: what matters is told by us."""
    told = importlib.import_module("transformers.utils.logging")
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity(logging.CRITICAL)
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()
