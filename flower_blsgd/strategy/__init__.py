"""Biased local SGD as a Flower strategy: what the server does in a run."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .biased_local_sgd import BiasedLocalSGD

__all__ = ["BiasedLocalSGD"]


def __getattr__(name: str) -> Any:
    """Load the strategy when it is first used: nodes import only modules beside it."""
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.biased_local_sgd"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
