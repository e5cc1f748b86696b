"""The benchmark of texts: AG News, or one's own texts in its layout, in four classes."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.cache import Prepared
from ..data.text_data import (
    TOKENIZER_FILE,
    TextData,
    TokenizerSource,
    prepared_texts,
    vocabulary_of_rows,
)
from ..errors import UsageError, nearest
from ..models.pretrained import (
    folder_tokenizer,
    hf_hub_folder,
    load_weights,
    own_folder,
    tokenizer_identity,
)
from ..models.text_encoder import TextEncoder
from ..models.text_transformer import (
    DISTILBERT,
    DISTILBERT_HF_HUB_NAME,
    DISTILBERT_MICRO,
    TextTransformer,
    check_padding,
    distilbert_config,
    folder_config,
    most_tokens,
    with_dropout,
)
from .task import Benchmark, Task

AG_NEWS = TextData("ag-news", "fancyzhx/ag_news", ("World", "Sports", "Business", "Sci/Tech"))
NUM_CLASSES = len(AG_NEWS.class_names)

_EVALUATION_BATCH_SIZE = 128


class AgNews(Benchmark):
    """120,000 training and 7,600 test texts, four classes.

    Models: ``"distilbert"`` (the default), as published; ``"encoder"``, a small one with a
    vocabulary made of the training rows; ``"distilbert-micro"``, a narrow one to try things; or a
    Hugging Face folder with an encoder and its tokenizer. ``"distilbert"`` without its published
    weights has a vocabulary made of the training rows; a folder keeps its tokenizer.

    A batch is int32 of shape (batch_size, longest text): token numbers, and -1 behind the end of
    a text. The tokenizer is an asset of the task, which a run copies into its folder.
    """

    options = ("skip_bad", "max_samples", "max_tokens", "pretrained", "dropout")

    def task(self, data: str, model: str, options: Mapping[str, Any]) -> Task:
        """Return the task; see `Benchmark.task`."""
        chosen = text_model(model, options)
        texts = _prepared(chosen, data, options)
        return Task(
            model=functools.partial(chosen.model, TextShape.of_texts(texts)),
            train=texts.train,
            test=texts.test,
            data_fingerprint=texts.fingerprint,
            pretrained=chosen.pretrained,
            evaluation_batch_size=_EVALUATION_BATCH_SIZE,
            assets={TOKENIZER_FILE: texts.folder / TOKENIZER_FILE},
        )

    def prepare(
        self, data: str, model: str, options: Mapping[str, Any], again: bool = False
    ) -> Prepared:
        """Return the texts cut into tokens; see `Benchmark.prepare`."""
        return _prepared(text_model(model, options), data, options, again)

    def saved_model(
        self, name: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a fresh model for the vocabulary and the text length that saved weights have."""
        shape = TextShape.of_weights(tensors)
        # Where texts were cut, and which weights it began with, make no other model.
        options = {"max_tokens": shape.longest, "pretrained": False, "dropout": dropout}
        return text_model(name, options).model(shape)

    def check_weights(self, model: str) -> None:
        """Refuse a model whose published weights cannot be had; see `Benchmark.check_weights`.

        A model that is not known is refused later, by `task`.
        """
        name = model or DISTILBERT
        if name == DISTILBERT:
            hf_hub_folder(name, DISTILBERT_HF_HUB_NAME)
        elif name not in _MODELS and Path(name).expanduser().is_dir():
            own_folder(name)


BENCHMARKS: Mapping[str, Benchmark] = {"ag-news": AgNews()}


@dataclass(frozen=True)
class TextShape:
    """The sizes of a model that follow from its texts.

    Parameters
    ----------
    vocabulary : int
        Tokens that the tokenizer knows.
    longest : int
        Tokens of the longest text.
    """

    vocabulary: int
    longest: int

    @classmethod
    def of_texts(cls, texts: Prepared) -> "TextShape":
        """Return the shape of prepared texts, training and test."""
        longest = max(inputs.shape[1] for inputs, _ in (texts.train, texts.test))
        return cls(texts.facts["vocabulary"], longest)

    @classmethod
    def of_weights(cls, tensors: Mapping[str, Tensor]) -> "TextShape":
        """Return the shape of the texts that saved weights were trained on.

        A size is 1 where no tensor shows it: such a model's config has it.
        """
        rows = {"words.weight": 1, "positions.weight": 1}
        for name, tensor in tensors.items():
            last = ".".join(name.split(".")[-2:]).replace("word_embeddings", "words")
            if last in rows:
                rows[last] = len(tensor)
        return cls(rows["words.weight"], rows["positions.weight"])


@dataclass(frozen=True)
class TextModel:
    """A model of texts, with the tokenizer that belongs to it.

    Parameters
    ----------
    tokenizer : TokenizerSource
        Cuts the texts.
    model : callable
        ``(shape of the texts) -> Module`` with fresh weights.
    pretrained : callable, optional
        Puts published weights into a fresh model, and refuses one that cannot be trained here.
    """

    tokenizer: TokenizerSource
    model: Callable[[TextShape], nn.Module]
    pretrained: Callable[[Any], None] | None = None


def text_model(name: str, options: Mapping[str, Any]) -> TextModel:
    """Return a model by name.

    Parameters
    ----------
    name : str
        See `AgNews`; empty for the default.
    options : mapping
        ``max_tokens``, where texts are cut; ``pretrained``, whether it begins with published
        weights, where there are any; ``dropout``, a number for all its dropouts, or ``"auto"`` for
        its own. ``"encoder"`` leaves out words and layers at its own rates as well, but for 0,
        which switches all three off.

    Raises
    ------
    UsageError
        If there is no such model, or it does not go with the options.
    """
    name = name or DISTILBERT
    if name in _MODELS:
        return _MODELS[name](name, options)
    if Path(name).expanduser().is_dir():
        return _folder(name, options)
    if set(name) & set("/\\.~"):
        raise UsageError(f"model = {name!r}: there is no such folder; known: {', '.join(_MODELS)}")
    raise UsageError(
        f"model = {name!r} is not known; {nearest(name, _MODELS)}, or a Hugging Face folder"
    )


def _encoder(name: str, options: Mapping[str, Any]) -> TextModel:
    dropout = options["dropout"]
    rates: dict[str, Any] = {} if dropout == "auto" else {"dropout": float(dropout)}
    if dropout == 0:
        rates |= {"word_dropout": 0.0, "layer_dropout": 0.0}
    return TextModel(
        vocabulary_of_rows(),
        lambda shape: TextEncoder(shape.vocabulary, NUM_CLASSES, shape.longest, **rates),
    )


def _fresh_distilbert(name: str, options: Mapping[str, Any]) -> TextModel:
    def config(**changes: int) -> Any:
        return with_dropout(
            distilbert_config(name, NUM_CLASSES, **changes), name, options["dropout"]
        )

    _check_length(name, config(), options["max_tokens"])

    def model(shape: TextShape) -> nn.Module:
        # Of the published size where it has one, though the rows may fill less of its vocabulary.
        sizes = {} if name == DISTILBERT else {"vocab_size": shape.vocabulary}
        return TextTransformer(config(**sizes))

    return TextModel(vocabulary_of_rows(marked=True), model)


def _distilbert(name: str, options: Mapping[str, Any]) -> TextModel:
    fresh = _fresh_distilbert(name, options)
    if not options["pretrained"]:
        return fresh
    folder = functools.partial(hf_hub_folder, name, DISTILBERT_HF_HUB_NAME)
    return TextModel(
        TokenizerSource(
            f"hub {DISTILBERT_HF_HUB_NAME}",
            lambda _: folder_tokenizer(name, folder(weights=False)),
        ),
        fresh.model,
        lambda model: load_weights(model.network, folder(), name),
    )


def _folder(name: str, options: Mapping[str, Any]) -> TextModel:
    folder = own_folder(name, weights=False)  # only the server needs those
    config = with_dropout(folder_config(name, folder, NUM_CLASSES), name, options["dropout"])
    _check_length(name, config, options["max_tokens"])

    def model(shape: TextShape) -> nn.Module:
        if shape.vocabulary > config.vocab_size:
            raise UsageError(
                f"model = {name!r}: its tokenizer knows {shape.vocabulary:,} tokens, but its model "
                f"{config.vocab_size:,}; they do not belong together"
            )
        return TextTransformer(config, name)

    def begin(model: Any) -> None:
        if options["pretrained"]:
            load_weights(model.network, own_folder(name), name)
        check_padding(model, name)

    return TextModel(
        TokenizerSource(tokenizer_identity(name, folder), lambda _: folder_tokenizer(name, folder)),
        model,
        begin,
    )


_MODELS: Mapping[str, Callable[[str, Mapping[str, Any]], TextModel]] = {
    "encoder": _encoder,
    DISTILBERT: _distilbert,
    DISTILBERT_MICRO: _fresh_distilbert,
}


def _check_length(name: str, config: Any, max_tokens: int) -> None:
    limit = most_tokens(config, name)
    if limit is not None and max_tokens > limit:
        raise UsageError(
            f"max-tokens = {max_tokens}: model = {name!r} takes at most {limit}; set max-tokens = "
            f"{limit}"
        )


def _prepared(
    chosen: TextModel, data: str, options: Mapping[str, Any], again: bool = False
) -> Prepared:
    return prepared_texts(
        AG_NEWS,
        chosen.tokenizer,
        data,
        max_tokens=options["max_tokens"],
        skip_bad=options["skip_bad"],
        max_samples=options["max_samples"],
        again=again,
    )
