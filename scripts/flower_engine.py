r"""Run this app on one of Flower's own engines, and take everything down again.

Examples::

    python scripts/flower_engine.py simulation -c 'epochs=3'
    python scripts/flower_engine.py deployment --node "device='cpu:0' tier='fast'" \
        --node "device='cpu:1' tier='slow'"

It starts a SuperLink (and SuperNodes) with a private FLWR_HOME on free ports, calls
``flwr run``, shows the run's log, and ends every process that it started. These are the
commands of docs/how-to/deployment.md, in one.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
START_SECONDS = 60


def main() -> int:
    """Start the engine, run the app, stop the engine."""
    options = parse_arguments()
    simulation = options.engine == "simulation"
    with tempfile.TemporaryDirectory(prefix="flwr-home-") as home:
        engine = Engine(Path(home))
        try:
            engine.start_superlink(simulation)
            for node in options.node:
                engine.start_supernode(node)
            command = ["run", options.app, "engine", "--stream"]
            if simulation:
                command += engine.federation(options.num_supernodes, options.stock)
            for config in options.run_config:
                command += ["-c", config]
            code = engine.flwr(*command).returncode
            listing = engine.flwr("ls", "engine", "--format", "json", stdout=subprocess.PIPE)
            return code or int("finished:completed" not in listing.stdout)
        finally:
            engine.stop()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", choices=["simulation", "deployment"])
    parser.add_argument("--node", action="append", default=[], help="a SuperNode's node config")
    parser.add_argument("--num-supernodes", type=int, default=2, help="of a simulation")
    parser.add_argument(
        "--stock", action="store_true", help="leave the simulation's resources as Flower has them"
    )
    parser.add_argument("--app", default=".", help="folder of the Flower app")
    parser.add_argument("-c", "--run-config", action="append", default=[])
    return parser.parse_args()


class Engine:
    """A SuperLink with its SuperNodes.

    Parameters
    ----------
    home : Path
        An empty folder: Flower's home, and the logs of all programs.
    """

    def __init__(self, home: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.home = home
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "engine"\n'
            f'[superlink.engine]\naddress = "{self.address}"\ninsecure = true\n'
        )

    def start_superlink(self, simulation: bool) -> None:
        """Start the SuperLink and wait until it answers."""
        host, _, port = self.address.partition(":")
        self.start(
            *["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"],
            *["--host", host, "--port", port],
            *(["--simulation"] if simulation else []),
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://{self.address}/health", timeout=1).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise SystemExit(f"the SuperLink did not answer within {START_SECONDS} s")

    def start_supernode(
        self, node_config: str, prefix: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start a SuperNode; `prefix` is what its command begins with, as for `start`."""
        return self.start(
            *["flower-supernode", "--insecure", "--superlink", self.address],
            *["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", node_config],
            prefix=prefix,
        )

    def start(
        self, program: str, *arguments: str, prefix: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start a program quietly, in a session of its own; with a prefix inside another one."""
        with (self.home / f"{program}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*prefix, BIN / program, *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def flwr(
        self, *arguments: str | Path, stdout: int | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Call ``flwr``; both outputs go to `stdout`, by default this process's own."""
        return subprocess.run(
            [BIN / "flwr", *arguments],
            env=self.environment,
            stdout=stdout,
            stderr=None if stdout is None else subprocess.STDOUT,
            text=True,
            check=False,
        )

    def federation(self, num_supernodes: int, stock: bool = False) -> list[str]:
        """Return the arguments of ``flwr run`` for so many virtual nodes.

        Each has one core, and Ray believes in as many CPUs as nodes, whatever the machine has;
        `stock` leaves both as Flower has them.
        """
        resources = f" client-resources-num-cpus=1 init-args-num-cpus={num_supernodes}"
        config = f"num-supernodes={num_supernodes}{'' if stock else resources}"
        return ["--federation-config", config]

    def stop(self, *processes: "subprocess.Popen[bytes]") -> None:
        """End these programs, or all, and all that those started."""
        chosen = processes or tuple(reversed(self.processes))
        for process in chosen:
            signal_session(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(session_members(p.pid) for p in chosen):
            for process in chosen:
                process.poll()
            time.sleep(0.1)
        self.kill(*chosen)

    def kill(self, *processes: "subprocess.Popen[bytes]") -> None:
        """Kill these programs with all that they started."""
        for process in processes:
            signal_session(process.pid, signal.SIGKILL)
            process.wait()
            self.processes.remove(process)


def session_members(session: int) -> list[int]:
    """Return the processes of a session that are not zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(own_session) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def signal_session(session: int, number: int) -> None:
    """Send a signal to all processes of a session."""
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
