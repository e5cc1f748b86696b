"""Classifiers of texts as token arrays: a small encoder, and the encoders of transformers."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .pretrained import folder_config, import_transformers, quiet

DISTILBERTS: Mapping[str, Mapping[str, int]] = {
    "distilbert": {},  # uncased, as transformers' own defaults describe it
    "distilbert-micro": {"n_layers": 2, "dim": 64, "n_heads": 4, "hidden_dim": 256},
}
"""How each differs from DistilBERT as published."""

_READY_MASK = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Architectures that take a ready mask of four dimensions.

One of two dimensions lets transformers look whether anything is masked, for which the host waits
for the GPU, so that the step could not be captured as a CUDA graph. Others get it all the same:
where attention is local, the ready mask would replace that.
"""

ENCODERS = frozenset(
    (*_READY_MASK, "albert", "deberta", "deberta-v2", "ernie", "mobilebert", "modernbert", "mpnet")
)
"""Architectures that a folder may have: what they say of a text is the same beside a longer one.

Of others, such as XLNet, it changes with the longest text of a batch.
"""

_POSITIONS_BEHIND_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Architectures that count positions from the number of their padding on."""

_WIDTH, _HEADS = 64, 2
_SCALE = 16.0
"""Embeddings are multiplied by it, so that AdamW moves them by as much more than the layer."""

_STD = 0.02


def without_empty_columns(tokens: Tensor) -> Tensor:
    """Return a batch of texts as wide as its longest text, at least one column: a view.

    `tokens` are integers of shape (batch_size, width), -1 behind the end of each text. The logits
    do not change by it, only the time. The batch stays as wide as it is where no value may be read:
    while a CUDA graph is captured or torch.compile traces (so that one capture serves all batches),
    and where torch forbids to wait for the GPU.
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


# --- a small encoder, to be trained from scratch on some thousand texts


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
        """Return the logits of texts: integers of shape (batch_size, width), -1 behind the end."""
        tokens = without_empty_columns(tokens)
        tokens = tokens[:, : self.positions.num_embeddings]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.training and self._word_dropout:
            # The first word of a text always stays, so that none becomes empty.
            left_out = torch.rand(tokens.shape, device=tokens.device) < self._word_dropout
            tokens = tokens.masked_fill(left_out & (positions > 0), -1)
            # Those that stay move to the front, in order, and keep the positions that they had.
            positions = torch.argsort((tokens < 0).to(torch.uint8), dim=1, stable=True)
            tokens = without_empty_columns(tokens.gather(1, positions))
            positions = positions[:, : tokens.shape[1]]
        empty = tokens < 0
        # Attention to nothing is not a number: a text without tokens attends to all columns.
        unseen = empty & ~empty.all(dim=1, keepdim=True)
        outputs = (self.words(tokens.clamp(min=0)) + self.positions(positions)) * _SCALE
        for layer in self.layers:
            outputs = layer(outputs, unseen)
        filled = (~empty).unsqueeze(2).to(outputs.dtype)
        mean = (outputs * filled).sum(dim=1) / filled.sum(dim=1).clamp(min=1)
        logits: Tensor = self.linear(self.dropout(mean))
        return logits


class _Layer(nn.Module):
    """A transformer layer that adds nothing at first, and to some texts nothing in training."""

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
    """A classifier of texts for tokens as they are stored; `network` is transformers' own model.

    ``model.network.save_pretrained(folder)`` makes a Hugging Face folder of it.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        See `text_config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        transformers = import_transformers(config.model_type, "text")
        make = transformers.AutoModelForSequenceClassification.from_config
        config = copy.deepcopy(config)  # transformers writes into it
        with quiet():
            self.network: Any = make(config, dtype=torch.float32, trust_remote_code=False)
        self._pad = int(config.pad_token_id or 0)
        self._ready_mask = config.model_type in _READY_MASK

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts: integers of shape (batch_size, width), -1 behind the end."""
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

    Parameters
    ----------
    name : str
        Of `DISTILBERTS`, or a folder; its weights are not looked at.
    num_classes : int
        Outputs.
    dropout : float or "auto" (default: "auto")
        What every dropout becomes; ``"auto"`` leaves them.

    Raises
    ------
    UsageError
        If transformers is not installed, or the folder is not that of an encoder in `ENCODERS`.
    """
    transformers = import_transformers(name, "text")
    if name in DISTILBERTS:
        config = transformers.DistilBertConfig(num_labels=num_classes, **DISTILBERTS[name])
    else:
        config = folder_config(name, num_classes)
    if config.model_type not in ENCODERS:
        raise UsageError(
            f"model = {name!r}: its config.json has model_type {config.model_type!r}, but an "
            f"encoder of texts is needed: {', '.join(sorted(ENCODERS))}"
        )
    if dropout != "auto":
        for key, value in config.to_dict().items():
            if "dropout" in key and value is not None:
                setattr(config, key, dropout)
    return config


def most_tokens(config: Any) -> int:
    """Return the most tokens that a text may have for an encoder."""
    behind = config.model_type in _POSITIONS_BEHIND_PADDING
    return int(config.max_position_embeddings) - (config.pad_token_id + 1 if behind else 0)
