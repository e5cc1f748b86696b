"""Transformers of the library transformers as classifiers of token arrays."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.hf_hub import first_line
from ..errors import UsageError
from .layers import without_empty_columns
from .pretrained import import_transformers, quiet

DISTILBERT, DISTILBERT_MICRO = "distilbert", "distilbert-micro"
DISTILBERT_HF_HUB_NAME = "distilbert/distilbert-base-uncased"

DISTILBERTS: Mapping[str, Mapping[str, int]] = {
    DISTILBERT: {},  # uncased, as transformers' own defaults describe it
    DISTILBERT_MICRO: {"n_layers": 2, "dim": 64, "n_heads": 4, "hidden_dim": 256},
}
"""How each differs from DistilBERT as published."""

_ATTEND_EVERYWHERE = frozenset(
    ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
)
"""Architectures that take a ready mask of four dimensions.

One of two dimensions lets transformers look whether anything is masked, for which the host waits
for the GPU, so that the step could not be captured as a CUDA graph. Others get it all the same:
where attention is local, the ready mask would replace that.
"""

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
"""What the architectures call their shares of dropout."""

_SHORT, _LONG = 4, 9
"""Tokens of the two texts that `check_padding` tries."""

_ROUNDING = 1e-3
"""Of the largest logit; float32 and bfloat16 kernels that sum in another order stay below it."""


class TextTransformer(nn.Module):
    """A classifier of texts for tokens as they are stored; `network` is transformers' own model.

    ``model.network.save_pretrained(folder)`` makes a Hugging Face folder of it.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        With the number of classes as ``num_labels``.
    name : str (default: "")
        What the user calls it, for messages.

    Raises
    ------
    UsageError
        If this architecture does not classify texts.
    """

    def __init__(self, config: Any, name: str = "") -> None:
        super().__init__()
        make = import_transformers("model", "text").AutoModelForSequenceClassification.from_config
        config = copy.deepcopy(config)  # transformers writes into it
        try:
            with quiet():
                self.network: Any = make(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:
            raise UsageError(
                f"model = {name!r}: transformers has no classifier of texts for "
                f"{config.model_type} ({first_line(error)}); name a folder with an encoder of "
                "texts, such as BERT, or leave model empty"
            ) from None
        self._pad = int(getattr(config, "pad_token_id", None) or 0)
        self._ready_mask = config.model_type in _ATTEND_EVERYWHERE

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


def most_tokens(config: Any, name: str = "") -> int | None:
    """Return the most tokens that a text may have for an architecture; None if it sets no limit.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model.
    name : str (default: "")
        What the user calls it, for messages.

    Raises
    ------
    UsageError
        If this architecture does not classify texts.
    """
    with torch.device("meta"):  # no memory, no random numbers
        model = TextTransformer(config, name)
    limits = [
        # RoBERTa counts positions from the number of its padding on.
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings")
    ]
    most = getattr(config, "max_position_embeddings", None)  # also of a model without a table
    if isinstance(most, int) and most > 0:
        limits.append(most)
    return min(limits, default=None)


def distilbert_config(name: str, num_classes: int, **changes: int) -> Any:
    """Return the config of a fresh DistilBERT.

    Parameters
    ----------
    name : str
        Of `DISTILBERTS`; the published one has 66,956,548 parameters for four classes.
    num_classes : int
        Outputs.
    **changes : int
        Of the config, such as ``vocab_size``.
    """
    transformers = import_transformers(f"model = {name!r}", "text")
    return transformers.DistilBertConfig(
        **{"num_labels": num_classes, **DISTILBERTS[name], **changes}
    )


def folder_config(model: str, folder: Path, num_classes: int) -> Any:
    """Return the config that a Hugging Face folder's config.json describes, for so many classes.

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
            f"model = {model!r}: transformers cannot use its config.json ({first_line(error)})"
        ) from None


def with_dropout(config: Any, model: str, dropout: float | str) -> Any:
    """Return a config with every dropout set to a number; ``"auto"`` leaves them.

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


def check_padding(model: TextTransformer, name: str) -> None:
    """Refuse a model whose logits of a text depend on the text beside it in a batch.

    Tried on a short and a long text, in evaluation mode. Such a model would learn, and be tested,
    on what the batch's longest text happens to be. Torch's random numbers are as before.

    Parameters
    ----------
    model : TextTransformer
        With the weights that it begins with.
    name : str
        What the user calls it.

    Raises
    ------
    UsageError
        If they do, or the model cannot read a batch of two texts.
    """
    config, training = model.network.config, model.training
    # The last numbers of a vocabulary mean words. BART reads a text where its end is marked.
    long = getattr(config, "vocab_size", _LONG) - 1 - torch.arange(_LONG)
    short = long[:_SHORT].clone()
    if (end := getattr(config, "eos_token_id", None)) is not None:
        short[-1] = long[-1] = end
    tokens = torch.stack([functional.pad(short, (0, _LONG - _SHORT), value=-1), long])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            beside, alone = model(tokens)[0], model(tokens[:1, :_SHORT])[0]
    except Exception as error:
        raise UsageError(
            f"model = {name!r}: {config.model_type} cannot read texts of different "
            f"length at once ({first_line(error)}); use an encoder such as BERT"
        ) from None
    finally:
        model.train(training)
    if not (beside - alone).abs().max() <= _ROUNDING * alone.abs().max():
        raise UsageError(
            f"model = {name!r}: what {config.model_type} says of a text changes with "
            "the longer text beside it in a batch, so it cannot be trained here; use an encoder "
            "such as BERT"
        )
