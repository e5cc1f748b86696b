"""A transformer of the library transformers as a classifier of token arrays."""

import copy
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .hugging_face import import_transformers, quiet
from .text_configs import brief
from .text_tokens import without_empty_columns

_LOG = logging.getLogger(__name__)

_ATTEND_EVERYWHERE = frozenset(
    ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
)
"""Architectures that take a ready mask of four dimensions.

One of two dimensions lets transformers look whether anything is masked, for which the host waits
for the GPU, so that the step could not be recorded as a CUDA graph. Others get it all the same:
where attention is local, the ready mask would replace that.
"""

_LONGEST_LIST = 4

_POOLER = "pooler"
"""The part of a body that published weights often lack: it was not trained with them."""


class TextTransformer(nn.Module):
    """Takes tokens as they are stored; `network` is the model as transformers knows it.

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
        make = _auto_class().from_config
        config = copy.deepcopy(config)  # transformers writes into it
        try:
            with quiet():
                self.network: Any = make(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:
            raise UsageError(
                f"model = {name!r}: transformers has no classifier of texts for "
                f"{config.model_type} ({brief(error)}); name a folder with an encoder of texts, "
                "such as BERT, or leave model empty"
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
    """Return how long a text may be for an architecture; None if it sets no limit.

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
    told = getattr(config, "max_position_embeddings", None)  # a model without a table has some too
    if isinstance(told, int) and told > 0:
        limits.append(told)
    return min(limits, default=None)


def load_weights(model: TextTransformer, folder: Path, name: str) -> None:
    """Put the weights of a Hugging Face folder into a model, in place, as float32.

    A head, or a pooler, that the folder lacks or has in another size stays as it is; what the
    model has no part for is left out. One line in the log tells of both. Torch's random numbers
    are as before.

    Parameters
    ----------
    model : TextTransformer
        Of the folder's architecture.
    folder : Path
        With weights as safetensors.
    name : str
        What the user calls it.

    Raises
    ------
    UsageError
        If they cannot be read, or are not all those of this architecture.
    """
    config = copy.deepcopy(model.network.config)
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            loaded, told = _auto_class().from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except Exception as error:
        raise UsageError(f"model = {name!r}: its weights cannot be read ({brief(error)})") from None
    own = model.network.state_dict()
    mismatched = {key if isinstance(key, str) else key[0] for key in told["mismatched_keys"]}
    fresh = (set(told["missing_keys"]) | mismatched) & set(own)
    body = {key for key in own if key.startswith(f"{loaded.base_model_prefix}.")}
    if not body - fresh:
        raise UsageError(
            f"model = {name!r}: its weights are not those of the {config.model_type} that its "
            "config.json describes"
        )
    if lacking := {key for key in body & fresh if _POOLER not in key.split(".")}:
        raise UsageError(
            f"model = {name!r}: its weights lack {len(lacking)} of the {len(body)} tensors of the "
            f"{config.model_type} that its config.json describes, or have them in another size, "
            f"such as {min(lacking)}; name a folder that was saved whole, or set pretrained = "
            "false for fresh ones"
        )
    with torch.no_grad():
        for key, tensor in loaded.state_dict().items():
            if key not in fresh:
                own[key].copy_(tensor)
    _tell(name, fresh, set(told["unexpected_keys"]))


def _tell(name: str, fresh: Collection[str], unused: Collection[str]) -> None:
    parts = []
    if fresh:
        parts.append(f"begins with fresh weights in {_listed(fresh)}")
    if unused:
        parts.append(f"has no part for {_listed(unused)} of the folder")
    if parts:
        _LOG.warning("model = %r %s", name, ", and ".join(parts))


def _listed(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:_LONGEST_LIST])
    rest = len(names) - _LONGEST_LIST
    return f"{first} and {rest} more" if rest > 0 else first


def _auto_class() -> Any:
    return import_transformers("model", "text").AutoModelForSequenceClassification
