"""Flower's engines for tests, and one run of our app that must give the same bits on all."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from flower_blsgd.devices.machine import usable_cores
from scripts.flower_engine import Engine

FIRST, LAST = usable_cores()[0], usable_cores()[-1]

# (32 + 12) x 16 = 704 samples a round, so an epoch of 1,437 samples has two rounds.
DIGITS = (
    "epochs=1 local-steps-fast=32 local-steps-slow=12 batch-size=16 threads=1 seed=3 "
    f"workers='1x cpu:{FIRST} fast; 1x cpu:{LAST} slow'"
)

Weights = Mapping[str, np.ndarray]


class Deployment(Engine):
    """A SuperLink and the SuperNodes that a test wants."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.2"  # 1 s is Flower's default
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def use_nodes(self, *configs: str) -> None:
        """Let just the nodes of these configurations be there; those that are, stay."""
        for config in self._nodes.keys() - set(configs):
            self.stop(self._nodes.pop(config))
        for config in configs:
            if config not in self._nodes:
                self._nodes[config] = self.start_supernode(config)

    def output_of(self, *arguments: str | Path) -> str:
        """Call ``flwr``, which must succeed; return its output."""
        done = self.flwr(*arguments, stdout=subprocess.PIPE)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def run(self, app: Path, *configs: str) -> str:
        """Run an app to its end; return its log."""
        arguments = [part for config in configs for part in ("-c", config)]
        return self.output_of("run", app, "engine", "--stream", *arguments)


def weights(out: Path) -> Weights:
    """Return the model of a run of `DIGITS`, which must have gone as planned."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 2
    workers = [(w["device"], w["tier"], w["local_steps"]) for w in summary["workers"]]
    assert workers == [(f"cpu:{FIRST}", "fast", 32), (f"cpu:{LAST}", "slow", 12)]
    return load_file(out / "model.safetensors")


def assert_bit_equal(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tobytes() == theirs[name].tobytes(), name
