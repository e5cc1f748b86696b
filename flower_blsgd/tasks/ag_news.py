"""AG News, or one's own texts in its layout: news in four classes."""

from collections.abc import Mapping

from torch import Tensor, nn

from ..data.entry import Prepared
from ..data.text_data import TOKENIZER_FILE, TextData, prepared_texts
from .task import Task
from .text_models import TextModel, TextShape, find_text_weights, text_model

AG_NEWS = TextData("ag-news", "fancyzhx/ag_news", ("World", "Sports", "Business", "Sci/Tech"))

_DEFAULT_MODEL = "distilbert"
_EVALUATION_BATCH_SIZE = 128


def ag_news(
    data: str = "",
    model: str = "",
    *,
    skip_bad: bool = False,
    max_samples: int = 0,
    max_tokens: int = 128,
    pretrained: bool = True,
    dropout: float | str = "auto",
) -> Task:
    """Return the task: 120,000 training and 7,600 test texts, four classes.

    A batch is int32 of shape (batch_size, longest text): token numbers, and -1 behind the end of
    a text. The tokenizer is ``prepare(...).folder / "tokenizer.json"``, for
    ``tokenizers.Tokenizer.from_file``; a run copies it into its folder.

    Parameters
    ----------
    data : str (default: "")
        A folder with parquet or csv files, or one of ``save_to_disk``; empty for the hub's
        ``fancyzhx/ag_news``.
    model : str (default: "")
        ``"distilbert"`` (the default), as published, ``"encoder"``, a small one with a
        vocabulary made of the training rows, ``"distilbert-micro"``, a narrow one to try things,
        or a Hugging Face folder with an encoder and its tokenizer.
    skip_bad : bool (default: False)
        Leave rows out that have no text or no label.
    max_samples : int (default: 0)
        Above 0: use the first so many rows of each split only.
    max_tokens : int (default: 128)
        Longer texts are cut.
    pretrained : bool (default: True)
        Begin with published weights, where the model has any, and with their tokenizer.
        ``"distilbert"`` without them has a vocabulary made of the training rows; a folder keeps
        its tokenizer.
    dropout : float or "auto" (default: "auto")
        ``"auto"`` for the model's own.

    Raises
    ------
    UsageError
        If data, model or tokenizer cannot be had, or do not go with the settings.
    """
    chosen = _chosen(model, max_tokens, pretrained, dropout)
    texts = _prepared(chosen, data, skip_bad, max_samples, max_tokens)
    return Task(
        model=chosen.maker(TextShape.of_texts(texts)),
        train=texts.train,
        test=texts.test,
        data_fingerprint=texts.fingerprint,
        pretrained=chosen.pretrained,
        evaluation_batch_size=_EVALUATION_BATCH_SIZE,
        assets={TOKENIZER_FILE: texts.folder / TOKENIZER_FILE},
    )


def check_weights(model: str = "") -> None:
    """Refuse a model whose published weights cannot be had; see `find_text_weights`."""
    find_text_weights(model or _DEFAULT_MODEL)


def saved_model(
    model: str, tensors: Mapping[str, Tensor], dropout: float | str = "auto"
) -> nn.Module:
    """Return a fresh model for weights that a run has saved; the data is not needed.

    Raises
    ------
    UsageError
        If there is no such model.
    """
    shape = TextShape.of_weights(tensors)
    # Where texts are cut, and which weights it begins with, make no other model.
    return _chosen(model, shape.longest, False, dropout).maker(shape)()


def prepare(
    data: str = "",
    model: str = "",
    *,
    again: bool = False,
    skip_bad: bool = False,
    max_samples: int = 0,
    max_tokens: int = 128,
    pretrained: bool = True,
) -> Prepared:
    """Return the texts as `ag_news` has them, preparing them if that was not done yet.

    Raises
    ------
    UsageError
        If data, model or tokenizer cannot be had.
    """
    chosen = _chosen(model, max_tokens, pretrained, "auto")
    return _prepared(chosen, data, skip_bad, max_samples, max_tokens, again)


def _chosen(model: str, max_tokens: int, pretrained: bool, dropout: float | str) -> TextModel:
    return text_model(
        model or _DEFAULT_MODEL,
        len(AG_NEWS.class_names),
        max_tokens=max_tokens,
        pretrained=pretrained,
        dropout=dropout,
    )


def _prepared(
    chosen: TextModel,
    data: str,
    skip_bad: bool,
    max_samples: int,
    max_tokens: int,
    again: bool = False,
) -> Prepared:
    return prepared_texts(
        AG_NEWS,
        chosen.tokenizer,
        data,
        max_tokens=max_tokens,
        skip_bad=skip_bad,
        max_samples=max_samples,
        again=again,
    )
