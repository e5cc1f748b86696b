"""A stand-in for training: it writes the folder that a real run leaves, in no time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_blsgd.config import RunConfig
from flower_blsgd.results.folder import RunFolder

from ..results.records import epoch
from .made_runs import made_run


def write_run(config: RunConfig, accuracy: float = 0.875, **summary: Any) -> Path:
    """Write the results folder of these settings: only the last of two epochs was evaluated."""
    written = RunFolder.new(config.out, "unnamed")
    written.write_config(config.to_run_config())
    written.add_epoch(epoch(1, accuracy=None, loss=None))
    own = {key: summary[key] for key in ("metric_name", "metric_mode") if key in summary}
    made = made_run(config.algorithm, config.seed, [accuracy], **own)
    run = {**made, "interrupted": False, **summary}
    figures = {key: run[key] for key in ("accuracy", "metric")}
    written.add_epoch(epoch(2, **figures, device_seconds=1.5))
    added = {"settings", "rows", "arm", "value", "best_value"}
    written.write_summary({key: run[key] for key in run.keys() - added})
    return written.path


class FakeTrain:
    """Records the settings it is called with, writes a run's folder, and fails where it should.

    `fates` has errors by algorithm and seed, which are raised after writing the run as interrupted.
    """

    def __init__(
        self, fates: Mapping[tuple[str, int], BaseException] | None = None, **summary: Any
    ) -> None:
        self.fates, self.summary = dict(fates or {}), summary
        self.configs: list[RunConfig] = []

    @property
    def trained(self) -> list[tuple[str, int]]:
        return [(config.algorithm, config.seed) for config in self.configs]

    def __call__(self, config: RunConfig, *_: Any) -> None:
        self.configs.append(config)
        fate = self.fates.pop((config.algorithm, config.seed), None)
        final = 0.9 + 0.001 * config.seed
        write_run(config, final, interrupted=fate is not None, **self.summary)
        if fate is not None:
            raise fate
