"""The models of a text task, each with the tokenizer that belongs to it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.entry import Prepared
from ..data.tokenizers import TokenizerSource, vocabulary_of_rows
from ..errors import UsageError, nearest
from ..models.text_configs import (
    DISTILBERT_HUB_NAME,
    distilbert_config,
    folder_config,
    narrow_distilbert_config,
    with_dropout,
)
from ..models.text_encoder import TextEncoder
from ..models.text_padding import check_padding
from ..models.text_tokenizer import folder_tokenizer, tokenizer_state
from ..models.text_transformer import TextTransformer, load_weights, most_tokens
from ..models.weights_folder import hub_folder, own_folder


@dataclass(frozen=True)
class TextShape:
    """What a model must know of its texts: tokens of the vocabulary, and of the longest text."""

    vocabulary: int
    longest: int

    @classmethod
    def of_texts(cls, texts: Prepared) -> "TextShape":
        """Return that of prepared texts."""
        longest = max(inputs.shape[1] for inputs, _ in (texts.train, texts.test))
        return cls(texts.facts["vocabulary"], longest)

    @classmethod
    def of_weights(cls, tensors: Mapping[str, Tensor]) -> "TextShape":
        """Return that of the texts that saved weights were trained on; 1 where none of them tell.

        Whatever else a model is made of, its config tells.
        """
        rows = {"words.weight": 1, "positions.weight": 1}
        for name, tensor in tensors.items():
            last = ".".join(name.split(".")[-2:]).replace("word_embeddings", "words")
            if last in rows:
                rows[last] = len(tensor)
        return cls(rows["words.weight"], rows["positions.weight"])


Maker = Callable[[TextShape], Callable[[], nn.Module]]
"""(shape of the texts) -> what makes a fresh model for them."""


@dataclass(frozen=True)
class TextModel:
    """A model, and what its texts must become.

    Parameters
    ----------
    tokenizer : TokenizerSource
        Cuts the texts.
    maker : callable
        ``(shape of the texts) -> function that makes a fresh model``.
    pretrained : callable, optional
        Puts published weights into a fresh model, and refuses one that is of no use.
    """

    tokenizer: TokenizerSource
    maker: Maker
    pretrained: Callable[[Any], None] | None = None


def text_model(
    name: str, num_classes: int, *, max_tokens: int, pretrained: bool, dropout: float | str
) -> TextModel:
    """Return a model by name.

    Parameters
    ----------
    name : str
        ``"encoder"``, ``"distilbert"``, ``"distilbert-micro"``, or a Hugging Face folder.
    num_classes : int
        Its outputs.
    max_tokens : int
        Where texts are cut.
    pretrained : bool
        Whether it begins with published weights, where there are any.
    dropout : float or "auto"
        Of all its dropouts; ``"auto"`` for its own. ``"encoder"`` leaves out words and layers at
        its own rates as well, but for 0, which switches all three off.

    Raises
    ------
    UsageError
        If there is no such model, or it does not go with the settings.
    """
    if name in _MAKERS:
        return _MAKERS[name](num_classes, max_tokens, pretrained, dropout)
    if Path(name).expanduser().is_dir():
        return _folder(name, num_classes, max_tokens, pretrained, dropout)
    if set(name) & set("/\\.~"):
        raise UsageError(f"model = {name!r}: there is no such folder; known: {', '.join(_MAKERS)}")
    raise UsageError(
        f"model = {name!r} is not known; {nearest(name, _MAKERS)}, or a Hugging Face folder"
    )


def find_text_weights(name: str) -> None:
    """Look for the weights that a model begins with, downloading them if need be.

    Nothing is said of a model that has none, or is not known.

    Raises
    ------
    UsageError
        If they cannot be had.
    """
    if name == "distilbert":
        hub_folder(name, DISTILBERT_HUB_NAME)
    elif name not in _MAKERS and Path(name).expanduser().is_dir():
        own_folder(name)


def _encoder(num_classes: int, _: int, __: bool, dropout: float | str) -> TextModel:
    settings: dict[str, Any] = {} if dropout == "auto" else {"dropout": float(dropout)}
    if dropout == 0:
        settings |= {"word_dropout": 0.0, "layer_dropout": 0.0}

    def maker(shape: TextShape) -> Callable[[], nn.Module]:
        return functools.partial(
            TextEncoder, shape.vocabulary, num_classes, shape.longest, **settings
        )

    return TextModel(vocabulary_of_rows(), maker)


def _distilbert(
    num_classes: int, max_tokens: int, pretrained: bool, dropout: float | str
) -> TextModel:
    name = "distilbert"
    config = with_dropout(distilbert_config(num_classes), name, dropout)
    _check_length(name, config, max_tokens)
    make = functools.partial(TextTransformer, config)
    if not pretrained:
        return TextModel(vocabulary_of_rows(marked=True), lambda _: make)
    hub = functools.partial(hub_folder, name, DISTILBERT_HUB_NAME)
    return TextModel(
        TokenizerSource(
            f"hub {DISTILBERT_HUB_NAME}", lambda _: folder_tokenizer(name, hub(weights=False))
        ),
        lambda _: make,
        lambda model: load_weights(model, hub(), name),
    )


def _narrow_distilbert(
    num_classes: int, max_tokens: int, _: bool, dropout: float | str
) -> TextModel:
    name = "distilbert-micro"

    def config(vocabulary: int) -> Any:
        return with_dropout(narrow_distilbert_config(num_classes, vocabulary), name, dropout)

    _check_length(name, config(vocabulary=1), max_tokens)
    return TextModel(
        vocabulary_of_rows(marked=True),
        lambda shape: functools.partial(TextTransformer, config(shape.vocabulary)),
    )


def _folder(
    name: str, num_classes: int, max_tokens: int, pretrained: bool, dropout: float | str
) -> TextModel:
    folder = own_folder(name, weights=False)  # only the server needs those
    config = with_dropout(folder_config(name, folder, num_classes), name, dropout)
    _check_length(name, config, max_tokens)

    def maker(shape: TextShape) -> Callable[[], nn.Module]:
        if shape.vocabulary > config.vocab_size:
            raise UsageError(
                f"model = {name!r}: its tokenizer knows {shape.vocabulary:,} tokens, but its model "
                f"{config.vocab_size:,}; they do not belong together"
            )
        return functools.partial(TextTransformer, config, name)

    def begin(model: Any) -> None:
        if pretrained:
            load_weights(model, own_folder(name), name)
        check_padding(model, name)

    return TextModel(
        TokenizerSource(tokenizer_state(name, folder), lambda _: folder_tokenizer(name, folder)),
        maker,
        begin,
    )


def _check_length(name: str, config: Any, max_tokens: int) -> None:
    limit = most_tokens(config, name)
    if limit is not None and max_tokens > limit:
        raise UsageError(
            f"max-tokens = {max_tokens}: model = {name!r} takes at most {limit}; set max-tokens = "
            f"{limit}"
        )


_MAKERS = {
    "encoder": _encoder,
    "distilbert": _distilbert,
    "distilbert-micro": _narrow_distilbert,
}
