"""What models of texts do with tokens first: drop what no text fills, and leave out words."""

import torch
from torch import Tensor


def without_empty_columns(tokens: Tensor) -> Tensor:
    """Return a batch of texts as wide as its longest text.

    The numbers do not change by it, only the time. Where nobody may look at a value, the batch
    stays as wide as it is: while a CUDA graph is recorded or torch.compile traces (so that one
    recording serves all batches), where torch forbids to wait for the GPU, and inside
    ``torch.func.vmap``.

    Parameters
    ----------
    tokens : torch.Tensor
        Integers of shape (batch_size, width), -1 behind the end of each text.

    Returns
    -------
    torch.Tensor
        A view of shape (batch_size, longest), at least one column.
    """
    if torch.compiler.is_compiling():
        return tokens
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        return tokens
    try:
        longest = int((tokens >= 0).any(dim=0).sum())
    except RuntimeError:
        return tokens
    return tokens[:, : max(longest, 1)]


def leave_out_words(tokens: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return texts without some of their words, drawn from torch's generator of the device.

    The first word of a text always stays, so that none becomes empty.

    Parameters
    ----------
    tokens : torch.Tensor
        Integers of shape (batch_size, width), -1 behind the end of each text.
    share : float
        How many of the words are left out on average, in [0, 1).

    Returns
    -------
    tokens : torch.Tensor
        Of the same shape: the words that stay, in order, and -1 behind them.
    places : torch.Tensor
        int64 of the same shape: in which place each was.
    """
    drawn = torch.rand(tokens.shape, device=tokens.device)
    stays = (drawn >= share) | (torch.arange(tokens.shape[1], device=tokens.device) == 0)
    left = tokens.masked_fill(~stays, -1)
    places = torch.argsort((left < 0).to(torch.uint8), dim=1, stable=True)
    return left.gather(1, places), places
