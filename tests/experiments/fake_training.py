"""A run that takes no time: it writes the folder that a real one leaves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_blsgd.config import RunConfig
from flower_blsgd.results.folder import RunFolder

from .test_finished_run import SUMMARY, epoch


def write_run(config: RunConfig, accuracy: float = 0.875, interrupted: bool = False) -> Path:
    """Write the results folder of these settings."""
    written = RunFolder.new(config.out, "unnamed")
    written.write_config(config.to_run_config())
    written.add_epoch(epoch(1, accuracy=accuracy, loss=0.5))
    summary = {"algorithm": config.algorithm, "seed": config.seed, "accuracy": accuracy}
    written.write_summary({**SUMMARY, **summary, "interrupted": interrupted})
    return written.path


class FakeTrain:
    """Notes what it is asked to train, and ends as it is told to.

    Parameters
    ----------
    fates : mapping of (str, int) to BaseException
        By algorithm and seed: raised after the run was left as an interruption leaves it.
    """

    def __init__(self, fates: Mapping[tuple[str, int], BaseException] | None = None) -> None:
        self.fates = dict(fates or {})
        self.configs: list[RunConfig] = []

    @property
    def trained(self) -> list[tuple[str, int]]:
        return [(config.algorithm, config.seed) for config in self.configs]

    def __call__(self, config: RunConfig, *_: Any) -> None:
        self.configs.append(config)
        fate = self.fates.pop((config.algorithm, config.seed), None)
        write_run(config, 0.9 + 0.001 * config.seed, interrupted=fate is not None)
        if fate is not None:
            raise fate
