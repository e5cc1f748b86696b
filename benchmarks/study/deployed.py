"""A run of this project on a SuperLink with two SuperNodes, the slow one beyond a slow link.

``python -m benchmarks.study.deployed SETTINGS``, at the link's near end; as `ours`, with ``nodes``
(node configs) and ``far`` (what a command begins with to run at the far end).
"""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.flower_engine import Engine

from .link import ADDRESSES
from .ours import result_of


class _Joined(Engine):
    """A SuperLink that the far end reaches, too."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        config, before = home / "config.toml", self.address
        self.address = before.replace("127.0.0.1", ADDRESSES[0])
        config.write_text(config.read_text().replace(before, self.address))


def main(text: str) -> None:
    """Start the engine, train, stop the engine, and write the result."""
    given = json.loads(text)
    folder = Path(given["folder"])
    run = {**given["run"], "out": str(folder / "run")}
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in run.items())
    with tempfile.TemporaryDirectory(prefix="flwr-home-") as home:
        engine = _Joined(Path(home))
        try:
            engine.start_superlink(simulation=False)
            for node, prefix in zip(given["nodes"], ([], given["far"]), strict=True):
                engine.start_supernode(node, prefix)
            words = ("run", ".", "engine", "--stream", "-c", config)
            done = engine.flwr(*words, stdout=subprocess.PIPE)
            listing = engine.flwr("ls", "engine", "--format", "json", stdout=subprocess.PIPE)
        finally:
            engine.stop()
    print(done.stdout)
    if done.returncode or "finished:completed" not in listing.stdout:
        raise SystemExit("the run failed")
    if "not on the stream" in done.stdout:
        raise SystemExit("a node was not on the stream")
    result = result_of(folder / "run", given["task"], run["seed"])
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engine is stopped all the same
    main(sys.argv[1])
