"""A SuperLink and SuperNodes that a test can kill, and runs that it can follow and stop."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.flower_engine import BIN, Engine, session_members, signal_session

from ..runtime.processes import wait_until

APP = Path(__file__).with_name("stream_app")


class StreamEngine(Engine):
    """As the script's, but it waits for no process that it did not start."""

    def node(self, partition: int) -> subprocess.Popen[bytes]:
        """Start a SuperNode, in a session of its own."""
        self.start_supernode(f"partition-id={partition}")
        return self.processes[-1]

    def run(self, notes: Path, **settings: Any) -> "Run":
        """Start a run of the app."""
        notes.mkdir(exist_ok=True)
        values = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in settings.items())
        said = self.flwr(
            "run", str(APP), "engine", "-c", f"notes={json.dumps(str(notes))} {values}"
        )
        return Run(self, str(json.loads(said)["run-id"]), notes)

    def flwr(self, *arguments: str) -> str:
        """Call flwr; return the JSON that it printed."""
        done = subprocess.run(
            [BIN / "flwr", *arguments, "--format", "json"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def client_apps(self) -> list[int]:
        """Return the processes of ClientApps that live now."""
        found = []
        for process in self.processes:
            for member in session_members(process.pid):
                try:
                    command = Path(f"/proc/{member}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"flwr-clientapp" in command:
                    found.append(member)
        return found

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a SuperNode with all that it started."""
        signal_session(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End every process that was started, and all that those started."""
        for process in reversed(self.processes):
            signal_session(process.pid, signal.SIGTERM)
        wait_until(
            lambda: not any(session_members(p.pid) for p in self.processes if p.poll() is None), 10
        )
        for process in self.processes:
            signal_session(process.pid, signal.SIGKILL)
            process.wait()


class Run:
    """A run, and what its ServerApp noted."""

    def __init__(self, engine: StreamEngine, run_id: str, notes: Path) -> None:
        self.engine, self.run_id, self._notes = engine, run_id, notes

    def notes(self) -> list[dict[str, Any]]:
        """Return the lines so far."""
        file = self._notes / "notes.jsonl"
        text = file.read_text() if file.exists() else ""
        # The last line may be half written.
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def rounds(self) -> list[dict[str, Any]]:
        """Return the lines of the loop."""
        return [line for line in self.notes() if "sent" in line]

    def wait_for(self, *partitions: int, seconds: float = 100) -> None:
        """Wait until a round has replies of just these nodes."""
        since = len(self.rounds())
        expected = sorted(partitions)
        assert wait_until(
            lambda: any(sorted(line["partitions"]) == expected for line in self.rounds()[since:]),
            seconds,
        ), f"{self.rounds()[-1:]}\n{self.log()}"

    def finish(self, seconds: float = 150) -> list[dict[str, Any]]:
        """Wait for the end of the run; return the notes."""
        (self._notes / "enough").touch()
        assert wait_until(lambda: self.notes() and "done" in self.notes()[-1], seconds), self.log()
        assert wait_until(lambda: self.status().startswith("finished")), self.log()
        assert self.status() == "finished:completed", self.log()
        return self.notes()

    def status(self) -> str:
        """Return what Flower says of the run."""
        runs = json.loads(self.engine.flwr("ls", "engine"))["runs"]
        return str(next(run["status"] for run in runs if str(run["run-id"]) == self.run_id))

    def stop(self) -> float:
        """Call ``flwr stop``; return when it had returned."""
        self.engine.flwr("stop", self.run_id, "engine")
        return time.monotonic()

    def log(self) -> str:
        """Return the ServerApp's log."""
        done = subprocess.run(
            [BIN / "flwr", "log", self.run_id, "engine", "--show"],
            env=self.engine.environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return done.stdout + done.stderr


@contextmanager
def deployment(home: Path, nodes: int) -> Iterator[StreamEngine]:
    """Give a SuperLink with this many SuperNodes; their partition ids are 0, 1, ..."""
    engine = StreamEngine(home)
    try:
        engine.start_superlink(simulation=False)
        for partition in range(nodes):
            engine.node(partition)
        yield engine
    finally:
        engine.stop()
