"""A small encoder of texts, to be trained from nothing on some thousand of them."""

import torch
from torch import Tensor, nn

from .text_tokens import leave_out_words, without_empty_columns

_STD = 0.02


class TextEncoder(nn.Module):
    """The mean of the words' embeddings, to which transformer layers add what they see in them.

    It begins as a linear model on a bag of words, which learns fast from few texts: the layers
    add nothing at first, and there is no norm behind them. So few texts are learned by heart at
    once; against that most words, and often a whole layer, are left out in training.

    Parameters
    ----------
    vocabulary : int
        Tokens that the tokenizer knows.
    num_classes : int
        Outputs.
    longest : int
        Tokens of the longest text; longer ones are cut.
    width : int (default: 64)
        Of embeddings and layers.
    layers : int (default: 1)
        Transformer layers, pre-norm, with a hidden part twice as wide; 0 leaves the bag of words.
    heads : int (default: 2)
        Of the attention.
    dropout : float (default: 0.1)
        In the layers and before the last one.
    word_dropout : float (default: 0.6)
        Share of the words that are left out of each text in training.
    layer_dropout : float (default: 0.5)
        Share of the texts that a layer leaves as they are in training (stochastic depth).
    scale : float (default: 16.0)
        Embeddings are multiplied by it, so that AdamW moves them by as much more than the layers.
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        longest: int,
        *,
        width: int = 64,
        layers: int = 1,
        heads: int = 2,
        dropout: float = 0.1,
        word_dropout: float = 0.6,
        layer_dropout: float = 0.5,
        scale: float = 16.0,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width) if layers else None
        self.layers = nn.ModuleList(
            _Layer(width, heads, dropout, layer_dropout) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width, num_classes)
        self._word_dropout, self._scale = word_dropout, scale
        for layer in (self.words, self.positions, self.linear):
            if layer is not None:
                nn.init.normal_(layer.weight, std=_STD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts: integers of shape (batch_size, width), -1 behind the end."""
        tokens = without_empty_columns(tokens)
        if self.positions is not None:
            tokens = tokens[:, : self.positions.num_embeddings]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.training and self._word_dropout:
            tokens, places = leave_out_words(tokens, self._word_dropout)
            tokens = without_empty_columns(tokens)
            places = places[:, : tokens.shape[1]]
        empty = tokens < 0
        # Attention to nothing is not a number: a text without tokens attends to all its places.
        unseen = empty & ~empty.all(dim=1, keepdim=True)
        outputs = self.words(tokens.clamp(min=0))
        if self.positions is not None:
            outputs = outputs + self.positions(places)
        outputs = outputs * self._scale
        for layer in self.layers:
            outputs = layer(outputs, unseen)
        logits: Tensor = self.linear(self.dropout(_mean(outputs, ~empty)))
        return logits


class _Layer(nn.Module):
    """A transformer layer that adds nothing at first, and to some texts nothing in training."""

    def __init__(self, width: int, heads: int, dropout: float, layer_dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True
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
    """Return the mean over the filled places of each text; of a text without any, zeros."""
    weights = filled.unsqueeze(2).to(vectors.dtype)
    return (vectors * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
