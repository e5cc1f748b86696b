"""Which transformer it is: DistilBERT, a narrow one, or what a Hugging Face folder describes."""

from pathlib import Path
from typing import Any

from ..errors import UsageError
from .hugging_face import import_transformers, quiet

DISTILBERT_HUB_NAME = "distilbert/distilbert-base-uncased"

_DROPOUTS = (
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "embedding_dropout",
    "mlp_dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
)
"""What the architectures call it."""


def distilbert_config(num_classes: int) -> Any:
    """Return DistilBERT as published, without case: 66,956,548 parameters for four classes."""
    return _distilbert_config(num_labels=num_classes)


def narrow_distilbert_config(num_classes: int, vocabulary: int) -> Any:
    """Return the same with two layers of width 64, to try things."""
    return _distilbert_config(
        num_labels=num_classes, vocab_size=vocabulary, n_layers=2, dim=64, n_heads=4, hidden_dim=256
    )


def folder_config(model: str, folder: Path, num_classes: int) -> Any:
    """Return what the config.json of a folder describes, for so many classes.

    Raises
    ------
    UsageError
        If transformers does not know it.
    """
    transformers = import_transformers(f"model = {model!r}", "text")
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(
                folder, num_labels=num_classes, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise UsageError(
            f"model = {model!r}: transformers cannot use its config.json ({brief(error)})"
        ) from None


def with_dropout(config: Any, model: str, dropout: float | str) -> Any:
    """Return the config with every dropout set to a number; ``"auto"`` leaves them.

    Raises
    ------
    UsageError
        If it has none.
    """
    if dropout == "auto":
        return config
    known = [name for name in _DROPOUTS if hasattr(config, name)]
    if not known:
        raise UsageError(
            f"dropout = {dropout}: model = {model!r} ({config.model_type}) has none; leave it out"
        )
    for name in known:
        setattr(config, name, dropout)
    return config


def brief(error: BaseException) -> str:
    """Return the first line of what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _distilbert_config(**changes: int) -> Any:
    transformers = import_transformers("model = 'distilbert'", "text")
    return transformers.DistilBertConfig(**changes)
