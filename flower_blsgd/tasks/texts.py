"""Text tasks: custom texts, and the benchmark AG News."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.samples import TOKENIZER_FILE, TokenizerSource, prepared_texts, vocabulary_of_rows
from ..data.source import DataSource
from ..errors import UsageError, nearest
from ..models.pretrained import folder_tokenizer, hf_hub_name, load_weights, model_folder
from ..models.text import DISTILBERTS, TextEncoder, TextTransformer, most_tokens, text_config
from .by_name import Benchmark
from .task import Task

_ENCODER = "encoder"
_FRESH = (_ENCODER, "distilbert-micro")
"""Models without published weights, whose vocabulary is always built from the training rows."""


@dataclass(frozen=True, kw_only=True)
class TextTask(Benchmark):
    """Classification of texts.

    Models: ``"encoder"``, a small one with a vocabulary built from the training rows;
    ``"distilbert"``, as published; ``"distilbert-micro"``, a narrow one for tests; or an encoder of
    transformers with its tokenizer, as ``OWNER/NAME`` of the HF hub or as a folder. Without its
    published weights, ``"distilbert"`` has a vocabulary built from the training rows; other
    encoders keep their tokenizer.

    A batch consists of rows of `prepared_texts`. The tokenizer is an asset of the task, which a run
    copies into its folder. `source` are the data if the setting `data` is empty, and the number of
    classes.
    """

    source: DataSource
    default_model: str = _ENCODER

    def task(
        self,
        data: str,
        model: str,
        *,
        again: bool,
        max_tokens: int,
        dropout: float | str,
        pretrained: bool,
        skip_bad: bool,
        max_samples: int,
        needs_test: bool,
    ) -> Task:
        """Return the task; see `Benchmark`."""
        make = model_maker(model, dropout, max_tokens)
        source = replace(
            self.source,
            data=data,
            skip_bad=skip_bad,
            max_samples=max_samples,
            needs_test=needs_test,
        )
        texts = prepared_texts(source, tokenizer_source(model, pretrained), max_tokens, again)
        longest = max(inputs.shape[1] for inputs, _ in (texts.train, texts.test))
        published = pretrained and model not in _FRESH
        return Task(
            model=functools.partial(make, texts.num_classes, texts.vocabulary, longest),
            train=texts.train,
            test=texts.test,
            data_fingerprint=texts.fingerprint,
            pretrained=functools.partial(load_weights, name=model) if published else None,
            evaluation_batch_size=128,
            assets={TOKENIZER_FILE: texts.folder / TOKENIZER_FILE},
            prepared=texts,
        )

    def check_weights(self, model: str) -> None:
        """Find the published weights of a model; see `Benchmark`."""
        if model not in _FRESH and (hf_hub_name(model) or Path(model).expanduser().is_dir()):
            model_folder(model)

    def saved_model(
        self, model: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a new model with the classes, vocabulary and text length of saved weights."""
        classes = _rows(
            tensors, "linear.weight", ".classifier.weight", "classifier.out_proj.weight"
        )
        vocabulary = _rows(tensors, "words.weight", "word_embeddings.weight")
        longest = _rows(tensors, "positions.weight")
        return model_maker(model, dropout)(classes, vocabulary, longest)


BENCHMARKS: Mapping[str, Benchmark] = {
    "text": TextTask(source=DataSource(name="text", noun="texts")),
    # 120,000 + 7,600 beginnings of news articles.
    "ag-news": TextTask(
        source=DataSource(
            name="ag-news", noun="texts", hf_hub_name="fancyzhx/ag_news", num_classes=4
        ),
        default_model="distilbert",
    ),
}


def _rows(tensors: Mapping[str, Tensor], *endings: str) -> int:
    """Return the rows of the first tensor with one of these endings; 1 if none matches."""
    return next((len(tensor) for name, tensor in tensors.items() if name.endswith(endings)), 1)


def tokenizer_source(name: str, pretrained: bool) -> TokenizerSource:
    """Return the source of a model's tokenizer; see `TextTask`."""
    if name in _FRESH or (name in DISTILBERTS and not pretrained):
        return vocabulary_of_rows(marked=name != _ENCODER)
    if hub := hf_hub_name(name):
        return TokenizerSource(f"hub {hub}", lambda _: folder_tokenizer(name))
    tokenizer = folder_tokenizer(name)
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return TokenizerSource(f"folder {digest[:16]}", lambda _: tokenizer)


def model_maker(
    name: str, dropout: float | str = "auto", max_tokens: int = 0
) -> Callable[[int, int, int], nn.Module]:
    """Return a function of classes, vocabulary size and longest text that creates a model.

    `name` is one of `TextTask`. `dropout` is the rate of all dropout layers; ``"auto"``: the
    model's own rates. ``"encoder"`` also drops words and layers at its own rates, unless `dropout`
    is 0. UsageError if the model is unknown or does not support texts of `max_tokens` tokens.
    """
    if name == _ENCODER:
        rates: dict[str, Any] = {} if dropout == "auto" else {"dropout": float(dropout)}
        if dropout == 0:
            rates |= {"word_dropout": 0.0, "layer_dropout": 0.0}
        return lambda classes, *sizes: TextEncoder(sizes[0], classes, sizes[1], **rates)
    known = name in DISTILBERTS or hf_hub_name(name) or Path(name).expanduser().is_dir()
    if not known:
        raise UsageError(
            f"model = {name!r} is not known; {nearest(name, (_ENCODER, *DISTILBERTS))}, an encoder "
            "OWNER/NAME of the HF hub, or a Hugging Face folder"
        )
    config = text_config(name, 2, dropout)
    if (limit := most_tokens(config)) and max_tokens > limit:
        raise UsageError(
            f"max-tokens = {max_tokens}: model = {name!r} supports at most {limit}; set "
            f"max-tokens = {limit}"
        )

    def make(classes: int, vocabulary: int, longest: int) -> nn.Module:
        config.num_labels = classes
        # A published model keeps its size, even if the rows use only part of its vocabulary.
        if name in _FRESH:
            config.vocab_size = vocabulary
        if vocabulary > config.vocab_size:
            raise UsageError(
                f"model = {name!r}: its tokenizer has {vocabulary:,} tokens, but its model "
                f"{config.vocab_size:,}; they do not match"
            )
        return TextTransformer(config)

    return make
