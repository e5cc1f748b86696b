"""A small encoder of texts, to be trained from scratch on some thousand of them."""

import torch
from torch import Tensor, nn

from .layers import without_empty_columns

_HEADS = 2
_SCALE = 16.0
"""Embeddings are multiplied by it, so that AdamW moves them by as much more than the layer."""

_STD = 0.02


class TextEncoder(nn.Module):
    """A classifier of texts: the mean of word embeddings, refined by a transformer layer.

    It begins as a linear model on a bag of words, which learns fast from few texts: the layer
    adds nothing at first, and there is no norm behind it. Against overfitting most words, and
    often the layer, are left out in training.

    Parameters
    ----------
    vocabulary : int
        Tokens that the tokenizer knows.
    num_classes : int
        Outputs.
    longest : int
        Tokens of the longest text; longer ones are cut.
    width : int (default: 64)
        Of embeddings and of the one layer, which is pre-norm with a hidden part twice as wide.
    dropout : float (default: 0.1)
        In the layers and before the last one.
    word_dropout : float (default: 0.6)
        Share of the words that are left out of each text in training.
    layer_dropout : float (default: 0.5)
        Share of the texts that a layer leaves as they are in training (stochastic depth).
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        longest: int,
        *,
        width: int = 64,
        dropout: float = 0.1,
        word_dropout: float = 0.6,
        layer_dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList([_Layer(width, dropout, layer_dropout)])
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width, num_classes)
        self._word_dropout = word_dropout
        for layer in (self.words, self.positions, self.linear):
            nn.init.normal_(layer.weight, std=_STD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts: integers of shape (batch_size, width), -1 behind the end."""
        tokens = without_empty_columns(tokens)
        tokens = tokens[:, : self.positions.num_embeddings]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.training and self._word_dropout:
            tokens, positions = leave_out_words(tokens, self._word_dropout)
            tokens = without_empty_columns(tokens)
            positions = positions[:, : tokens.shape[1]]
        empty = tokens < 0
        # Attention to nothing is not a number: a text without tokens attends to all columns.
        unseen = empty & ~empty.all(dim=1, keepdim=True)
        outputs = (self.words(tokens.clamp(min=0)) + self.positions(positions)) * _SCALE
        for layer in self.layers:
            outputs = layer(outputs, unseen)
        logits: Tensor = self.linear(self.dropout(_mean(outputs, ~empty)))
        return logits


class _Layer(nn.Module):
    """A transformer layer that adds nothing at first, and to some texts nothing in training."""

    def __init__(self, width: int, dropout: float, layer_dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, _HEADS, 2 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layer.self_attn.dropout = 0.0
        for weight in (self.layer.self_attn.out_proj.weight, self.layer.linear2.weight):
            nn.init.zeros_(weight)
        nn.init.zeros_(self.layer.linear2.bias)
        self._layer_dropout = layer_dropout

    def forward(self, inputs: Tensor, empty: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs, src_key_padding_mask=empty)
        if not self.training or self._layer_dropout == 0:
            return outputs
        share = 1 - self._layer_dropout
        kept = torch.rand(len(inputs), 1, 1, device=inputs.device) < share
        return inputs + (outputs - inputs) * kept / share


def _mean(vectors: Tensor, filled: Tensor) -> Tensor:
    """Return the mean over the filled columns of each text; of a text without any, zeros."""
    weights = filled.unsqueeze(2).to(vectors.dtype)
    return (vectors * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


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
    positions : torch.Tensor
        int64 of the same shape: at which position each was.
    """
    drawn = torch.rand(tokens.shape, device=tokens.device)
    stays = (drawn >= share) | (torch.arange(tokens.shape[1], device=tokens.device) == 0)
    left = tokens.masked_fill(~stays, -1)
    positions = torch.argsort((left < 0).to(torch.uint8), dim=1, stable=True)
    return left.gather(1, positions), positions
