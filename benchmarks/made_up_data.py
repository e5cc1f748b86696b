"""Made-up data of a task, in the cache, where a run finds them as if they had been prepared.

The task itself stays what it is: its model, augmentation and loss, its way to the data. Neither
the hub nor ``datasets`` is needed.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from flower_blsgd.config import RunConfig
from flower_blsgd.data import image_data, text_data
from flower_blsgd.data.cache import prepared
from flower_blsgd.data.entry import Prepared
from flower_blsgd.data.image_data import ImagePreparation
from flower_blsgd.data.preparation import Contents, OnItems, Preparation
from flower_blsgd.data.source import DataSource
from flower_blsgd.data.tokenizers import LARGEST_VOCABULARY
from flower_blsgd.tasks.prepare import prepare_task

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

    def images(real: ImagePreparation, again: bool = False) -> Prepared:
        side, classes = real.images.side, real.images.num_classes or CLASSES
        names = tuple(map(str, range(classes)))
        return prepared(MadeUp(real, "images", names, _images(side), train, test), again)

    def texts(real: Any, again: bool = False) -> Prepared:
        names, draw = real.texts.class_names, _tokens(real.options["max_tokens"])
        facts = {"vocabulary": LARGEST_VOCABULARY}
        files = {text_data.TOKENIZER_FILE: NO_TOKENIZER}
        return prepared(MadeUp(real, "tokens", names, draw, train, test, facts, files), again)

    with (
        patch.dict(os.environ, BLSGD_CACHE=str(cache)),
        patch.object(image_data, "prepared", images),
        patch.object(text_data, "prepared", texts),
    ):
        prepare_task(config.task, config.data, config.model, **config.task_options)


@dataclass(frozen=True)
class MadeUp:
    """Random samples in the place of those that a preparation would write; a `Preparation`.

    Parameters
    ----------
    real : Preparation
        Whose place in the cache it is.
    inputs : str
        As of `Contents`.
    class_names : tuple of str
        One for each label.
    draw : callable
        Makes inputs.
    train, test : int
        How many samples.
    facts : mapping
        As of `Contents`.
    files : mapping
        Texts of other files, by their names.
    """

    real: Preparation
    inputs: str
    class_names: tuple[str, ...]
    draw: Draw
    train: int
    test: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The task."""
        return self.real.name

    @property
    def source(self) -> DataSource:
        """Where the real data would come from."""
        return self.real.source

    @property
    def options(self) -> Mapping[str, Any]:
        """What would change the real data."""
        return self.real.options

    @property
    def noun(self) -> str:
        """What they stand for."""
        return self.real.noun

    def write(self, part: Path, on_items: OnItems) -> Contents:
        """Write the arrays; see `Preparation`."""
        draws = np.random.default_rng(0)
        for split, count in (("train", self.train), ("test", self.test)):
            np.save(part / f"{split}_{self.inputs}.npy", self.draw(draws, count))
            labels = draws.integers(0, len(self.class_names), count, np.int64)
            np.save(part / f"{split}_labels.npy", labels)
        for name, text in self.files.items():
            (part / name).write_text(text)
        return Contents(self.inputs, self.class_names, {"train": 0, "test": 0}, self.facts)


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
