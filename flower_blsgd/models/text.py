"""Text classifiers for token arrays: a small encoder, and the encoders of transformers."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .pretrained import folder_config, import_transformers, quiet

DISTILBERTS: Mapping[str, Mapping[str, int]] = {
    "distilbert": {},  # uncased, the defaults of transformers
    "distilbert-micro": {"n_layers": 2, "dim": 64, "n_heads": 4, "hidden_dim": 256},
}
"""DistilBERT configs by name, as differences from the published one."""

_READY_MASK = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Architectures that accept a prepared mask of four dimensions.

For a two-dimensional mask, transformers checks whether anything is masked. The host then waits for
the GPU, and the step cannot be captured as a CUDA graph. Other architectures get the
two-dimensional mask, because a prepared mask would disable local attention.
"""

ENCODERS = frozenset(
    (*_READY_MASK, "albert", "deberta", "deberta-v2", "ernie", "mobilebert", "modernbert", "mpnet")
)
"""Supported architectures: their output for a text does not depend on the padding.

In others, such as XLNet, it changes with the longest text of a batch.
"""

_POSITIONS_BEHIND_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Architectures whose positions start after the id of the padding token."""

_WIDTH, _HEADS = 64, 2
_SCALE = 16.0
"""Factor of the embeddings, which also multiplies their effective learning rate with AdamW."""

_STD = 0.02


def without_empty_columns(tokens: Tensor) -> Tensor:
    """Return a view of a batch without the columns that are padding in all texts.

    `tokens` are integers of shape (batch_size, width), padded with -1. At least one column remains.
    The logits do not change. The width stays unchanged where no value may be read: while
    torch.compile traces the model, so that one graph serves all batches, and where torch forbids
    synchronization with the GPU.
    """
    if torch.compiler.is_compiling():
        return tokens
    try:
        longest = int((tokens >= 0).any(dim=0).sum())
    except RuntimeError:
        return tokens
    return tokens[:, : max(longest, 1)]


# --- a small encoder, for training from scratch on a few thousand texts


class TextEncoder(nn.Module):
    """Text classifier: the mean of word embeddings, refined by a transformer layer.

    It is initially a linear model on a bag of words, which learns fast from few texts: the layer is
    initialized to add nothing, and no norm follows it. Against overfitting, most words and often
    the layer are dropped in training.

    Texts of more than `longest` tokens are truncated. `dropout` is the rate in the layers and
    before the last one, `word_dropout` the share of words to drop from each text in training, and
    `layer_dropout` the share of texts for which a layer is skipped in training (stochastic depth).
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        longest: int,
        *,
        dropout: float = 0.1,
        word_dropout: float = 0.6,
        layer_dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, _WIDTH)
        self.positions = nn.Embedding(longest, _WIDTH)
        self.layers = nn.ModuleList([_Layer(dropout, layer_dropout)])
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(_WIDTH, num_classes)
        self._word_dropout = word_dropout
        for layer in (self.words, self.positions, self.linear):
            nn.init.normal_(layer.weight, std=_STD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts: integers of shape (batch_size, width), padded with -1."""
        tokens = without_empty_columns(tokens)
        tokens = tokens[:, : self.positions.num_embeddings]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.training and self._word_dropout:
            # The first word of a text is never dropped, so that no text becomes empty.
            left_out = torch.rand(tokens.shape, device=tokens.device) < self._word_dropout
            tokens = tokens.masked_fill(left_out & (positions > 0), -1)
            # The remaining words move to the front, in order, with their original positions.
            positions = torch.argsort((tokens < 0).to(torch.uint8), dim=1, stable=True)
            tokens = without_empty_columns(tokens.gather(1, positions))
            positions = positions[:, : tokens.shape[1]]
        empty = tokens < 0
        # Attention over nothing is NaN, so a text without tokens attends to all columns.
        unseen = empty & ~empty.all(dim=1, keepdim=True)
        outputs = (self.words(tokens.clamp(min=0)) + self.positions(positions)) * _SCALE
        for layer in self.layers:
            outputs = layer(outputs, unseen)
        filled = (~empty).unsqueeze(2).to(outputs.dtype)
        mean = (outputs * filled).sum(dim=1) / filled.sum(dim=1).clamp(min=1)
        logits: Tensor = self.linear(self.dropout(mean))
        return logits


class _Layer(nn.Module):
    """Transformer layer with zero-initialized output and stochastic depth."""

    def __init__(self, dropout: float, layer_dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 2 * _WIDTH, dropout, "gelu", batch_first=True, norm_first=True
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


# --- encoders of transformers


class TextTransformer(nn.Module):
    """Text classifier for stored tokens; `network` is a model of transformers.

    ``model.network.save_pretrained(folder)`` saves it as a Hugging Face folder. `config` is one of
    `text_config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        transformers = import_transformers(config.model_type)
        make = transformers.AutoModelForSequenceClassification.from_config
        config = copy.deepcopy(config)  # transformers modifies it
        with quiet():
            self.network: Any = make(config, dtype=torch.float32, trust_remote_code=False)
        self._pad = int(config.pad_token_id or 0)
        self._ready_mask = config.model_type in _READY_MASK

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts: integers of shape (batch_size, width), padded with -1."""
        tokens = without_empty_columns(tokens)
        filled = tokens >= 0
        numbers = tokens.long().masked_fill(~filled, self._pad)
        if self._ready_mask:
            mask = filled[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        else:
            mask = filled.long()
        logits: Tensor = self.network(input_ids=numbers, attention_mask=mask).logits
        return logits


def text_config(name: str, num_classes: int, dropout: float | str = "auto") -> Any:
    """Return the config of a DistilBERT by name, or of a Hugging Face folder with an encoder.

    `name` is a key of `DISTILBERTS`, or a folder, whose weights are not read. `dropout` is the rate
    of every dropout layer; ``"auto"``: unchanged.
    """
    transformers = import_transformers(name)
    if name in DISTILBERTS:
        config = transformers.DistilBertConfig(num_labels=num_classes, **DISTILBERTS[name])
    else:
        config = folder_config(name, num_classes)
    if config.model_type not in ENCODERS:
        raise UsageError(
            f"model = {name!r}: its config.json has model_type {config.model_type!r}, but a text "
            f"encoder is needed: {', '.join(sorted(ENCODERS))}"
        )
    if dropout != "auto":
        for key, value in config.to_dict().items():
            if "dropout" in key and value is not None:
                setattr(config, key, dropout)
    return config


def most_tokens(config: Any) -> int:
    """Return the maximum number of tokens of a model; 0 if its config does not limit it."""
    most = int(getattr(config, "max_position_embeddings", 0) or 0)
    behind = most and config.model_type in _POSITIONS_BEHIND_PADDING
    return most - ((config.pad_token_id or 0) + 1 if behind else 0)
