"""Made-up data of a task, in the cache, where a run finds them as if they had been prepared.

The task itself stays what it is: its model, augmentation and loss, its way to the data. Neither
the HF hub nor ``datasets`` is needed.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from flower_blsgd.config import RunConfig
from flower_blsgd.data import splits
from flower_blsgd.data.cache import Prepared, Write, prepared
from flower_blsgd.data.samples import LARGEST_VOCABULARY, TOKENIZER_FILE
from flower_blsgd.data.source import DataSource
from flower_blsgd.tasks.by_name import prepare_task

CLASSES = 10
"""Where a data set may have any number."""

MEDIAN_TOKENS, DEVIATION_OF_LOG = 47, 0.29
"""Of 7,600 rows of AG News, words and punctuation marks with the two marks of DistilBERT."""

FEWEST_TOKENS = 8

NO_TOKENIZER = "{}\n"
"""A run copies the file that such tokens would come from, and does not read it."""

Draw = Callable[[np.random.Generator, int], npt.NDArray[Any]]
"""(generator, count) -> so many inputs."""


def make_up(cache: Path, config: RunConfig, train: int, test: int) -> None:
    """Fill a cache with random samples for a run.

    Parameters
    ----------
    cache : Path
        What ``BLSGD_CACHE`` must be in the run.
    config : RunConfig
        Of the run: its task, model and all that goes into the cache.
    train, test : int
        How many samples.

    Raises
    ------
    UsageError
        If the task refuses a setting, or a library is missing.
    """

    def made_up(
        source: DataSource, options: Mapping[str, Any], write: Write, again: bool = False
    ) -> Prepared:
        classes = options["classes"] or CLASSES
        images = "side" in options
        draw = _images(options["side"]) if images else _tokens(options["max_tokens"])
        return prepared(source, options, _writer(classes, draw, train, test), again)

    with (
        patch.dict(os.environ, BLSGD_CACHE=str(cache)),
        patch.object(splits, "prepared", made_up),
    ):
        prepare_task(config.task, config.data, config.model, **config.task_options)


def _writer(classes: int, draw: Draw, train: int, test: int) -> Write:
    """Return what writes random samples in the place of the real ones."""

    def write(folder: Path, scratch: Path) -> Mapping[str, Any]:
        generator = np.random.default_rng(0)
        for part, count in (("train", train), ("test", test)):
            np.save(folder / f"{part}_inputs.npy", draw(generator, count))
            labels = generator.integers(0, classes, count, np.int64)
            np.save(folder / f"{part}_labels.npy", labels)
        (folder / TOKENIZER_FILE).write_text(NO_TOKENIZER)
        skipped = {"train": 0, "test": 0}
        return {"num_classes": classes, "skipped": skipped, "vocabulary": LARGEST_VOCABULARY}

    return write


def _images(side: int) -> Draw:
    def draw(draws: np.random.Generator, count: int) -> npt.NDArray[Any]:
        return draws.integers(0, 256, (count, 3, side, side), np.uint8)

    return draw


def _tokens(longest: int) -> Draw:
    def draw(draws: np.random.Generator, count: int) -> npt.NDArray[Any]:
        tokens = draws.integers(0, LARGEST_VOCABULARY, (count, longest), np.int32)
        lengths = draws.lognormal(np.log(MEDIAN_TOKENS), DEVIATION_OF_LOG, (count, 1))
        tokens[np.arange(longest) >= np.clip(lengths, FEWEST_TOKENS, longest)] = -1
        return tokens

    return draw
