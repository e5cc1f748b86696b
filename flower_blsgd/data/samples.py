"""Images and texts of a data set as arrays, decoded or tokenized once per machine."""

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError, first_line
from .cache import Prepared, prepared
from .source import COLUMNS, DataSource
from .splits import Convert, as_texts, prepared_rows

SMALL_SIDE = 64
"""Largest side of small images, which are kept in their own size."""

LARGE_SIDE = 224
"""Side to which larger images are resized by default, the usual size of ImageNet's models."""

_LOOKED_AT = 64
"""Number of training images that determine the default size."""

_ENCODED = 1024
"""Number of texts that are encoded at a time."""

TOKENIZER_FILE = "tokenizer.json"
"""File name of the tokenizer in a cache entry."""

LARGEST_VOCABULARY = 30_522
"""The size of BERT's vocabulary."""


# --- images


def prepared_images(source: DataSource, side: int = 0, again: bool = False) -> Prepared:
    """Return the decoded images of a data set, and prepare them if necessary.

    `side` is their height and width in pixels; 0: the median shorter side of the first training
    images if that is at most 64, else 224.
    """

    def opened(stored: Any) -> Any:
        return source.image_at(stored) if isinstance(stored, int) else stored

    def converter(rows: Any, folder: Path) -> tuple[Convert, tuple[int, ...], Mapping[str, Any]]:
        from PIL.Image import init

        init()  # once, not in every thread
        size = side or _default_side(rows[:_LOOKED_AT]["sample"], opened)
        return lambda stored: decoded(opened(stored), size), (3, size, size), {}

    options = {"side": side, "train": source.train, "test": source.test}
    return prepared_rows(source, options, converter, np.uint8, again=again)


def _default_side(samples: list[Any], opened: Callable[[Any], Any]) -> int:
    sides = []
    for stored in samples:
        try:
            with _open(opened(stored)) as image:
                sides.append(min(image.size))
        except Exception:  # reported when it is decoded
            continue
    side = int(np.median(sides)) if sides else LARGE_SIDE
    return side if side <= SMALL_SIDE else LARGE_SIDE


def decoded(stored: Any, side: int) -> npt.NDArray[np.uint8]:
    """Return the center of an image, as RGB of shape (3, side, side).

    The shorter side is resized to `side`, bilinearly with antialiasing, and the longer one is
    center-cropped. `stored` is the content of a file in any format of PIL, a mapping with the
    content as ``bytes`` or with its ``path``, or an image of PIL. 16-bit gray values are scaled,
    and transparency is dropped. ValueError if the file is damaged, the white level is undefined or
    the path is relative.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        with _open(stored) as image:
            if image.mode in ("I", "F"):
                raise ValueError(f"the white level of mode {image.mode} (32 bits) is undefined")
            if image.mode.startswith("I;16"):  # PIL would clip values at 255
                grey = np.rint(np.asarray(image) / 257).astype(np.uint8)
                colours = PIL.Image.fromarray(grey).convert("RGB")
            else:
                colours = image.convert("RGB")
    except Exception as error:  # PIL raises any kind for damaged files
        path = stored.get("path") if isinstance(stored, Mapping) else None
        named = f"{path}: " if path and path not in str(error) else ""
        raise ValueError(f"{named}{first_line(error)}") from error
    square = PIL.ImageOps.fit(colours, (side, side), PIL.Image.Resampling.BILINEAR)
    return np.asarray(square).transpose(2, 0, 1)


def _open(stored: Any) -> Any:
    import PIL.Image

    if isinstance(stored, PIL.Image.Image):
        return stored
    content = stored if isinstance(stored, bytes) else stored["bytes"]
    if content is None and not Path(stored["path"]).is_absolute():
        raise ValueError("a relative path is ambiguous")
    return PIL.Image.open(stored["path"] if content is None else io.BytesIO(content))


# --- texts


class TokenizerSource(NamedTuple):
    """Source of a tokenizer, with an identity that is part of the cache key."""

    identity: str
    """Equal only for sources that produce equal tokens for equal training rows."""
    make: Callable[[Iterable[str]], Any]
    """``(training texts) -> tokenizers.Tokenizer``; called only when texts are prepared."""


def vocabulary_of_rows(marked: bool = False) -> TokenizerSource:
    """Return a tokenizer source for the words of the training rows.

    Texts are lowercased without accents. The tokens are the 30,522 most frequent words and
    punctuation marks that occur at least twice, ties in alphabetical order. Unlike the library's
    WordPiece, equal rows give an equal tokenizer on every machine. `marked` texts begin with
    ``[CLS]`` and end with ``[SEP]``, as BERT-like models expect.
    """

    def make(texts: Iterable[str]) -> Any:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordLevelTrainer(
            vocab_size=LARGEST_VOCABULARY,
            min_frequency=2,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        if marked:
            marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single="[CLS] $A [SEP]", special_tokens=marks
            )
        return tokenizer

    return TokenizerSource("words of the rows" + (", marked" if marked else ""), make)


def prepared_texts(
    source: DataSource, tokenizer: TokenizerSource, max_tokens: int = 128, again: bool = False
) -> Prepared:
    """Return the tokens of a data set, and prepare them if necessary.

    Inputs are int32 of shape (N, longest text): token ids, padded with -1. Texts are truncated to
    `max_tokens`, including special tokens. The folder also contains the tokenizer.
    """

    def converter(rows: Any, folder: Path) -> tuple[Convert, tuple[int, ...], Mapping[str, Any]]:
        from tokenizers import Tokenizer

        path = str(folder / TOKENIZER_FILE)
        texts = (text for text in rows["sample"] if isinstance(text, str))
        tokenizer.make(texts).save(path)
        saved = Tokenizer.from_file(path)  # as readers will load it
        saved.no_padding()
        saved.enable_truncation(max_length=max_tokens)
        marks = saved.num_special_tokens_to_add(is_pair=False)

        def tokens_of(text: str) -> list[int]:
            tokens: list[int] = saved.encode(text).ids
            if len(tokens) == marks:
                raise ValueError(f"no tokens in {text[:40]!r}")
            return tokens

        return tokens_of, (max_tokens,), {"vocabulary": saved.get_vocab_size()}

    options = {"tokenizer": tokenizer.identity, "max_tokens": max_tokens}
    return prepared_rows(source, options, converter, np.int32, filler=-1, again=again)


def prepared_blocks(
    source: DataSource,
    tokenizer: TokenizerSource,
    length: int,
    end_of_text: int | None = None,
    again: bool = False,
) -> Prepared:
    """Return the texts of a data set as blocks of tokens for a language model.

    The texts of a split are joined, each followed by the token `end_of_text`, and cut into blocks.
    A shorter block at the end is left out. ``source.max_samples`` counts blocks. Inputs are int32
    of shape (N, length); labels are zeros. The folder also contains the tokenizer.
    """

    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        source.check_libraries()
        tables = source.tables(scratch)
        made = tokenizer.make(())
        made.save(str(folder / TOKENIZER_FILE))
        made.no_padding()
        made.no_truncation()
        ending = [] if end_of_text is None else [end_of_text]
        skipped = {}
        for part, splits in (("train", source.train), ("test", source.test)):
            if part == "test" and not set(splits) & set(tables):
                continue  # with a validation share
            texts = [text for split in splits for text in _texts_of(source, tables, split)]
            parts = [np.zeros(0, np.int32)]
            for first in range(0, len(texts), _ENCODED):  # an encoding is many times its tokens
                encoded = made.encode_batch(
                    texts[first : first + _ENCODED], add_special_tokens=False
                )
                parts += [np.array([*one.ids, *ending], np.int32) for one in encoded]
            tokens = np.concatenate(parts)
            if (count := min(len(tokens) // length, source.max_samples or len(tokens))) == 0:
                raise UsageError(
                    f"{source.setting}: {part} has {len(tokens)} tokens, but a block has {length}; "
                    "use more text, or a smaller max-tokens"
                )
            np.save(folder / f"{part}_inputs.npy", tokens[: count * length].reshape(count, length))
            np.save(folder / f"{part}_labels.npy", np.zeros(count, np.int64))
            skipped[part] = 0
        return {"num_classes": 0, "skipped": skipped, "vocabulary": made.get_vocab_size()}

    options = {"tokenizer": tokenizer.identity, "length": length, "end": end_of_text}
    options |= {"max_blocks": source.max_samples, "kind": "blocks"}
    found = prepared(source, options, write, again)
    if source.needs_test and not found.has_test:
        raise UsageError(
            f"{source.setting}: no {source.test[0]} split; add one, or set validation-share"
        )
    return found


def _texts_of(source: DataSource, tables: Mapping[str, Any], split: str) -> list[str]:
    if split not in tables:
        raise UsageError(
            f"{source.setting}: no {split} split, found {', '.join(tables)}; name a file, or a "
            f"folder with {split}.txt"
        )
    table = tables[split]
    column = next((name for name in COLUMNS["texts"][0] if name in table.column_names), None)
    if column is None:
        raise UsageError(
            f"{source.setting}: {split} has no column of texts ({', '.join(COLUMNS['texts'][0])}), "
            f"but {', '.join(table.column_names)}; rename it"
        )
    return [text for text in as_texts(source, split, table, column, column)[column] if text]
