"""The benchmark of texts: AG News, or one's own texts in its layout, in four classes."""

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
    vocabulary made of the training rows; ``"distilbert-micro"``, a narrow one to try things; or a
    Hugging Face folder with an encoder and its tokenizer. ``"distilbert"`` without its published
    weights has a vocabulary made of the training rows; a folder keeps its tokenizer.

    A batch has rows of `prepared_texts`. The tokenizer is an asset of the task, which a run copies
    into its folder.
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
        """Return a fresh model for the vocabulary and the text length that saved weights have."""
        vocabulary = _rows(tensors, "words.weight", "word_embeddings.weight")
        longest = _rows(tensors, "positions.weight")
        return model_maker(name, dropout)(vocabulary, longest)


BENCHMARKS: Mapping[str, Benchmark] = {"ag-news": AgNews()}


def _rows(tensors: Mapping[str, Tensor], *endings: str) -> int:
    """Return the rows of the first tensor whose name ends so; 1 if none: its config says them."""
    return next((len(tensor) for name, tensor in tensors.items() if name.endswith(endings)), 1)


def tokenizer_source(name: str, pretrained: bool) -> TokenizerSource:
    """Return where the tokenizer of a model comes from; see `AgNews`.

    Raises
    ------
    UsageError
        If a folder has none.
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
    """Return what makes a model of a vocabulary and a longest text, with fresh weights.

    Parameters
    ----------
    name : str
        See `AgNews`.
    dropout : float or "auto" (default: "auto")
        A number for all its dropouts, or its own. ``"encoder"`` leaves out words and layers at
        its own rates as well, but for 0, which switches all three off.
    max_tokens : int (default: 0)
        Where texts are cut.

    Raises
    ------
    UsageError
        If there is no such model, or it takes no texts as long as these.
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
            f"max-tokens = {max_tokens}: model = {name!r} takes at most {limit}; set max-tokens = "
            f"{limit}"
        )

    def make(vocabulary: int, longest: int) -> nn.Module:
        # A published model keeps its size, though the rows may fill less of its vocabulary.
        if name in DISTILBERTS and name not in HF_HUB_NAMES:
            config.vocab_size = vocabulary
        if vocabulary > config.vocab_size:
            raise UsageError(
                f"model = {name!r}: its tokenizer knows {vocabulary:,} tokens, but its model "
                f"{config.vocab_size:,}; they do not belong together"
            )
        return TextTransformer(config)

    return make
