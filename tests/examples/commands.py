"""How the tests start apps: as a user does, in a process; or all in this one."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_blsgd.flower.app_folder import read_app
from flower_blsgd.flower.internals import load_app

from ..in_process_grid import Handler, InProcessGrid

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

_ACCURACY = re.compile(r"^(.+?):? +test accuracy ([\d.]+)%", re.MULTILINE)


def run(*command: str | Path, cwd: Path = ROOT, path: Path = ROOT) -> str:
    """Run Python with these arguments, which must succeed; return both outputs."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def two_nodes(app: Callable[[], ClientApp], config: Mapping[str, Any]) -> InProcessGrid:
    """Return a grid whose nodes call an app, as it is when a message comes."""

    def node(number: int, tier: str) -> Handler:
        node_config = {"device": "cpu", "tier": tier, "partition-id": number, "num-partitions": 2}
        context = Context(1, 100 + number, node_config, RecordDict(), dict(config))

        def handle(message: Message, _: int) -> Message:
            return app()(message, context)

        return handle

    return InProcessGrid({100: node(0, "fast"), 101: node(1, "slow")})


def train_in_this_process(
    folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any
) -> dict[str, float]:
    """Run an app on two nodes; return the test accuracies in percent, by what stands before."""
    app = read_app(folder)
    config = {**app.config, **settings}
    client = load_app(app.client_app, folder, ClientApp)
    server = load_app(app.server_app, folder, ServerApp)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        server(two_nodes(lambda: client, config), Context(1, 1, {}, RecordDict(), config))
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    return {name.strip(): float(percent) for name, percent in _ACCURACY.findall(output)}
