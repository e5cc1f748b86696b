"""Losses with one value per sample, for `Task` and `LocalSGD`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

_IGNORED = -1
"""Label of a token that has no loss; transformers has -100."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every sample, shape (batch_size,)."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of every sample over its outputs, shape (batch_size,).

    `targets` has the shape of `outputs`. If that is (batch_size, 1), it may also be (batch_size,).
    """
    errors = (outputs - targets.view_as(outputs)).square()
    return errors.flatten(1).mean(dim=1) if errors.dim() > 1 else errors


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross entropy of every sample over its logits, shape (batch_size,).

    Shapes are those of `mean_squared_error`; targets are in [0, 1].
    """
    targets = targets.view_as(outputs).to(outputs.dtype)
    losses = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return each text's mean cross entropy of the next token, shape (batch_size,).

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model of transformers, or one that returns logits of shape (batch_size,
        length, vocabulary).
    batch : mapping
        ``input_ids`` of shape (batch_size, length), as from a tokenizer, and optionally two of the
        same shape: ``attention_mask``, 0 where there is padding, which never counts, and
        ``labels``, which replace ``input_ids`` as the targets; labels of -100 are ignored.
    """
    tokens, mask = batch["input_ids"], batch.get("attention_mask")
    outputs = model(input_ids=tokens, attention_mask=mask)
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    labels = batch.get("labels", tokens)
    return next_token_loss(logits, labels if mask is None else labels.masked_fill(mask == 0, -100))


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each text's mean cross entropy of the next token, shape (batch_size,).

    `outputs` are logits of shape (batch_size, length, vocabulary), `targets` the tokens of shape
    (batch_size, length); tokens below 0 have no loss.
    """
    labels = targets[:, 1:].long()
    losses = functional.cross_entropy(
        outputs[:, :-1].transpose(1, 2).float(),
        labels.clamp(min=_IGNORED),
        reduction="none",
        ignore_index=_IGNORED,
    )
    means: Tensor = losses.sum(dim=1) / (labels >= 0).sum(dim=1).clamp(min=1)
    return means
