"""Text benchmark: AG News, or custom texts in its layout, with four classes."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.text_data import (
    NUM_CLASSES,
    TOKENIZER_FILE,
    TokenizerSource,
    prepared_texts,
    vocabulary_of_rows,
)
from ..errors import UsageError, nearest
from ..models.pretrained import HF_HUB_NAMES, folder_tokenizer, is_published, load_weights
from ..models.text import DISTILBERTS, TextEncoder, TextTransformer, most_tokens, text_config
from .task import Benchmark, Task

_ENCODER = "encoder"


class AgNews(Benchmark):
    """120,000 training and 7,600 test texts, four classes.

    Models: ``"distilbert"`` (the default), as published; ``"encoder"``, a small one with a
    vocabulary built from the training rows; ``"distilbert-micro"``, a narrow one for tests; or a
    Hugging Face folder with an encoder and its tokenizer. Without its published weights,
    ``"distilbert"`` has a vocabulary built from the training rows; a folder keeps its tokenizer.

    A batch consists of rows of `prepared_texts`. The tokenizer is an asset of the task, which a run
    copies into its folder.
    """

    default_model = "distilbert"

    def task(
        self,
        data: str,
        model: str,
        *,
        again: bool,
        skip_bad: bool,
        max_samples: int,
        max_tokens: int,
        dropout: float | str,
        pretrained: bool,
    ) -> Task:
        """Return the task; see `Benchmark`."""
        make = model_maker(model, dropout, max_tokens)
        texts = prepared_texts(
            tokenizer_source(model, pretrained),
            data,
            max_tokens=max_tokens,
            skip_bad=skip_bad,
            max_samples=max_samples,
            again=again,
        )
        longest = max(inputs.shape[1] for inputs, _ in (texts.train, texts.test))
        published = pretrained and is_published(model)
        return Task(
            model=functools.partial(make, texts.vocabulary, longest),
            train=texts.train,
            test=texts.test,
            data_fingerprint=texts.fingerprint,
            pretrained=functools.partial(load_weights, name=model) if published else None,
            evaluation_batch_size=128,
            assets={TOKENIZER_FILE: texts.folder / TOKENIZER_FILE},
            prepared=texts,
        )

    def saved_model(
        self, name: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a new model with the vocabulary and the text length of saved weights."""
        vocabulary = _rows(tensors, "words.weight", "word_embeddings.weight")
        longest = _rows(tensors, "positions.weight")
        return model_maker(name, dropout)(vocabulary, longest)


BENCHMARKS: Mapping[str, Benchmark] = {"ag-news": AgNews()}


def _rows(tensors: Mapping[str, Tensor], *endings: str) -> int:
    """Return the rows of the first tensor with one of these endings; 1 if none matches."""
    return next((len(tensor) for name, tensor in tensors.items() if name.endswith(endings)), 1)


def tokenizer_source(name: str, pretrained: bool) -> TokenizerSource:
    """Return the source of a model's tokenizer; see `AgNews`.

    Raises
    ------
    UsageError
        If a folder has no tokenizer.
    """
    if name in HF_HUB_NAMES and pretrained:
        return TokenizerSource(f"hub {HF_HUB_NAMES[name]}", lambda _: folder_tokenizer(name))
    if name == _ENCODER or name in DISTILBERTS:
        return vocabulary_of_rows(marked=name != _ENCODER)
    tokenizer = folder_tokenizer(name)
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return TokenizerSource(f"folder {digest[:16]}", lambda _: tokenizer)


def model_maker(
    name: str, dropout: float | str = "auto", max_tokens: int = 0
) -> Callable[[int, int], nn.Module]:
    """Return a function of the vocabulary size and the longest text that creates a model.

    Parameters
    ----------
    name : str
        See `AgNews`.
    dropout : float or "auto" (default: "auto")
        Rate of all dropout layers, or the model's own rates. ``"encoder"`` also drops words and
        layers at its own rates, unless `dropout` is 0.
    max_tokens : int (default: 0)
        Maximum text length.

    Raises
    ------
    UsageError
        If the model is unknown or does not support texts of this length.
    """
    if name == _ENCODER:
        rates: dict[str, Any] = {} if dropout == "auto" else {"dropout": float(dropout)}
        if dropout == 0:
            rates |= {"word_dropout": 0.0, "layer_dropout": 0.0}
        return lambda vocabulary, longest: TextEncoder(vocabulary, NUM_CLASSES, longest, **rates)
    if name not in DISTILBERTS and not Path(name).expanduser().is_dir():
        known = nearest(name, (_ENCODER, *DISTILBERTS))
        raise UsageError(f"model = {name!r} is not known; {known}, or a Hugging Face folder")
    config = text_config(name, NUM_CLASSES, dropout)
    if max_tokens > (limit := most_tokens(config)):
        raise UsageError(
            f"max-tokens = {max_tokens}: model = {name!r} supports at most {limit}; set "
            f"max-tokens = {limit}"
        )

    def make(vocabulary: int, longest: int) -> nn.Module:
        # A published model keeps its size, even if the rows use only part of its vocabulary.
        if name in DISTILBERTS and name not in HF_HUB_NAMES:
            config.vocab_size = vocabulary
        if vocabulary > config.vocab_size:
            raise UsageError(
                f"model = {name!r}: its tokenizer has {vocabulary:,} tokens, but its model "
                f"{config.vocab_size:,}; they do not match"
            )
        return TextTransformer(config)

    return make
