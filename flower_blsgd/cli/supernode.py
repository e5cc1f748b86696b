"""The command ``blsgd supernode``: run Flower's SuperNodes with the right devices and keys.

It chooses the arguments of ``flower-supernode``, pins it to the worker's cores, checks that the
SuperLink answers (Flower would retry silently without end), and shows the output.
"""

import argparse
import contextlib
import http.client
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server

from ..devices.pinning import environment, on_cores_of
from ..devices.worker_spec import WorkerSpec, check_workers_of_script, cores_note, parse_workers
from ..errors import UsageError
from ..processes import signal_at_parents_end
from .options import add_workers, terminated_like_interrupted

KEY_FLAG = "--auth-supernode-private-key"
GRACE_SECONDS = 10.0
"""Time for a SuperNode and its ClientApp to end. Flower takes up to 5 s."""

_TIMEOUT_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LOOPBACK = "127.0.0.1"
_PARTITION_ID = re.compile(r"(?<![\w-])partition-id=([0-9]{1,9})\s*")
_NOT_REGISTERED = re.compile(r"\[code: 200[14]\]")  # of Flower's SuperLink


@dataclass(frozen=True)
class NodeCommand:
    """The command line of one SuperNode, which is pinned to `cores`; empty for all.

    `label` is its name in the output, and `key` the file of its private key in messages.
    """

    label: str
    arguments: tuple[str, ...]
    cores: tuple[int, ...]
    environment: Mapping[str, str] = field(repr=False)
    key: str = "KEY"


def _add_supernode(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--superlink", metavar="HOST:PORT", required=True, help="where it listens for SuperNodes"
    )
    add_workers(command)
    command.add_argument(
        "--one-node-per-device",
        action="store_true",
        help="start one SuperNode per worker instead of one for all (always with role=evaluate)",
    )
    command.add_argument(
        "--name",
        default="",
        help="name in logs; identifies the node when it reconnects; several get a number appended",
    )
    security = command.add_mutually_exclusive_group(required=True)
    security.add_argument(
        "--root-certificates",
        metavar="FILE",
        type=_file,
        help="PEM; verifies the SuperLink: its ca.crt",
    )
    security.add_argument("--insecure", action="store_true", help="the SuperLink has no TLS")
    command.add_argument(
        KEY_FLAG,
        dest="keys",
        metavar="FILE",
        type=_file,
        action="append",
        default=[],
        help="the registered private key; give it once per SuperNode",
    )
    command.add_argument(
        "--node-config",
        metavar="'KEY=VALUE ...'",
        default="",
        help="further keys for each node, such as partition-id",
    )
    command.add_argument(
        "--script",
        metavar="'SCRIPT ARGUMENTS'",
        default="",
        help="run this training script as the worker, one SuperNode per device",
    )
    command.add_argument("further", nargs="*", metavar="-- FLAG ...", help=argparse.SUPPRESS)


def _file(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file")
    return path


def _supernode(options: argparse.Namespace) -> None:
    workers = parse_workers(options.workers or "auto")
    if note := cores_note(workers):
        _show(note)
    commands = node_commands(options, workers)
    check_superlink(options.superlink, options.root_certificates)
    with terminated_like_interrupted():
        run_nodes(commands)


def _show(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # at once: nodes have threads


# --- commands -----------------------------------------------------------------------------------


def node_commands(options: argparse.Namespace, workers: Sequence[WorkerSpec]) -> list[NodeCommand]:
    """Return the flower-supernode commands: one for all workers, or one per worker.

    With ``"auto"``, the workers that train share a node, and one that evaluates gets another one.
    """
    devices = " ".join((options.workers or "auto").split())
    evaluating = [worker for worker in workers if worker.role == "evaluate"]
    script = _script(options.script)
    if script:
        check_workers_of_script(workers)
    if options.one_node_per_device or script or (evaluating and devices != "auto"):
        groups = [[worker] for worker in workers]
    else:  # on a shared node, the other workers would wait for one that evaluates
        training = [worker for worker in workers if worker.role == "train"]
        groups = [training, *([worker] for worker in evaluating)]
    keys: list[Path] = options.keys
    if keys and len(keys) != len(groups):
        raise UsageError(
            f"{len(keys)} {KEY_FLAG} for {len(groups)} SuperNodes; give it once per SuperNode, "
            "each with a separate key, in the order of --workers"
        )
    security = ["--insecure"]
    if options.root_certificates is not None:
        security = ["--root-certificates", str(options.root_certificates)]
    commands = []
    for i, (group, port) in enumerate(zip(groups, _free_ports(len(groups)), strict=True)):
        several = f"-{i}" if len(groups) > 1 else ""
        config: dict[str, object] = dict(group[0].to_node_config(workers))
        config.pop("python", None)  # the SuperNode itself is of this interpreter
        together = len(group) > 1
        if together:
            config = {"devices": devices}
        if options.name:
            config.setdefault("name", options.name + several)
        config["superlink"] = options.superlink
        further = options.node_config
        if script:  # its workers count from the given partition-id, whose 0 is the main one
            given = re.search(_PARTITION_ID, further)
            further = re.sub(_PARTITION_ID, "", further)
            first = int(given[1]) if given else 0
            config |= {"script": script, "partition-id": first + i}
        arguments = ["flower-supernode", "--superlink", options.superlink, *security]
        if keys:
            arguments += [KEY_FLAG, str(keys[i])]
        arguments += ["--host", _LOOPBACK, "--port", str(port)]
        arguments += ["--node-config", f"{node_config_text(config)} {further}".strip()]
        arguments += options.further
        # With several devices, each worker process is pinned separately as well.
        cores = {core for worker in group for core in worker.cores}
        pinned = sorted(cores) if all(worker.cores for worker in group) else []
        commands.append(
            NodeCommand(
                str(config.get("name", i)),
                tuple(arguments),
                tuple(pinned),
                _environment(group, workers),
                str(keys[i]) if keys else "KEY",
            )
        )
    return commands


def _script(text: str) -> str:
    """Return the command line of a script with its absolute path; UsageError if it cannot run."""
    if not text:
        return ""
    from ..config import task_of_script

    try:
        script, *arguments = shlex.split(text) or [""]
    except ValueError as error:  # quotes that are not closed
        raise UsageError(f"--script {text!r}: {error}; write 'SCRIPT ARGUMENTS'") from None
    if script != "-m":
        script = str(Path(script).expanduser().absolute())
    task_of_script(script, *arguments)
    return shlex.join([script, *arguments])


def _environment(group: Sequence[WorkerSpec], workers: Sequence[WorkerSpec]) -> dict[str, str]:
    """Return the environment of a SuperNode for a group of all workers."""
    alone = len(group) == 1
    pinning = environment(group[0], workers=workers) if alone else {}
    # flower-supernode looks for flower-superexec, and that for flwr-clientapp, in PATH.
    python = (alone and group[0].python) or sys.executable
    if python != sys.executable and not Path(python).with_name("flower-supernode").is_file():
        raise UsageError(f"workers: python={python}: its folder has no flower-supernode")
    path = [str(Path(python).parent), os.environ.get("PATH", os.defpath)]
    defaults = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **os.environ, **pinning, "PATH": os.pathsep.join(path)}


def _free_ports(count: int) -> list[int]:
    """Return different free ports of the loopback interface."""
    with contextlib.ExitStack() as probes:  # all are open together
        opened = [probes.enter_context(create_server((_LOOPBACK, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in opened]


def node_config_text(values: Mapping[str, object]) -> str:
    """Write a node config as ``flower-supernode --node-config`` reads it.

    >>> node_config_text({"device": "cpu:0", "steps": 3, "slowdown": 4.0})
    "device='cpu:0' steps=3 slowdown=4.0"
    """
    for key, value in values.items():
        if isinstance(value, str) and ("'" in value or not value.isprintable()):
            raise UsageError(
                f"{key} = {value!r} cannot be in a node config; leave out quotes, and in a path or "
                "an argument also spaces and other characters that a shell would have quoted"
            )
    return " ".join(
        f"{key}='{value}'" if isinstance(value, str) else f"{key}={value!r}"
        for key, value in values.items()
    )


def check_superlink(address: str, root_certificates: Path | None) -> None:
    """Raise UsageError unless a SuperLink answers, over the same proxy as Flower."""
    context = None
    if root_certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts only these, as Flower does
        try:
            context.load_verify_locations(root_certificates)
        except OSError as error:
            raise UsageError(
                f"--root-certificates {root_certificates} cannot be used ({error.strerror}); give "
                "the PEM certificate of the authority that signed the SuperLink's: its ca.crt"
            ) from None
    scheme = "http" if context is None else "https"
    url = f"{scheme}://{address}/health"
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
    try:
        opener.open(url, timeout=_TIMEOUT_SECONDS).close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise UsageError(
            f"no SuperLink answers at {url} ({reason}); check HOST:PORT, that flower-superlink "
            "runs there with --host 0.0.0.0, and TLS: --insecure if it has no certificate, else "
            "--root-certificates FILE with the authority that signed it for this name"
        ) from None


# --- processes ----------------------------------------------------------------------------------


def run_nodes(commands: Sequence[NodeCommand]) -> None:
    """Start SuperNodes, show their output, and wait until all have ended; leave none behind.

    If one fails, the others are ended. Then UsageError if the SuperLink does not know its key, and
    SystemExit for another error.
    """
    running: list[_Node] = []
    try:
        for command in commands:
            running.append(_Node(command, len(commands) > 1))
        for node in running:  # after all forks, since these are threads
            node.output.start()
        while running:
            time.sleep(_POLL_SECONDS)
            for node in [node for node in running if node.process.poll() is not None]:
                running.remove(node)
                _end([node])
                node.check()
                _show(f"SuperNode {node.command.label} has ended")
    finally:
        _end(running)


def _end(nodes: Sequence["_Node"]) -> None:
    """End nodes with all their processes; kill them after the grace time."""
    for node in nodes:  # once: a second SIGTERM would kill it before it leaves the SuperLink
        node.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(node.is_alive() for node in nodes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for node in nodes:
        node.signal(signal.SIGKILL)
        node.process.wait()
        if node.output.ident is not None:
            node.output.join(_TIMEOUT_SECONDS)


class _Node:
    """A SuperNode and its child processes, as one process group."""

    def __init__(self, command: NodeCommand, prefixed: bool) -> None:
        self.command = command
        self.output = threading.Thread(target=self._show_output, daemon=True)
        self._prefix = f"[{command.label}] " if prefixed else ""
        self._not_registered = False
        _show(f"{self._prefix}{shlex.join(command.arguments)}")
        # Pinned from the start, so that its children are pinned, too.
        with on_cores_of(WorkerSpec("cpu", command.cores)):
            self.process = subprocess.Popen(
                command.arguments,
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches this process alone
                preexec_fn=_set_up_child,  # noqa: PLW1509  # safe: there are no other threads yet
            )

    def _show_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            _show(self._prefix + line.rstrip("\n"))
            self._not_registered |= bool(_NOT_REGISTERED.search(line))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the SuperNode."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def is_alive(self) -> bool:
        """Return whether the SuperNode or one of its child processes still runs."""
        if self.process.poll() is None:
            return True
        with contextlib.suppress(ChildProcessError):  # inherited, as by a container's first process
            os.waitpid(-self.process.pid, os.WNOHANG)
        try:
            os.killpg(self.process.pid, 0)
        except OSError:
            return False
        return True

    def check(self) -> None:
        """Raise an error if the SuperNode failed."""
        code = self.process.returncode
        who = f"SuperNode {self.command.label}"
        if code and self._not_registered:
            key = self.command.key
            raise UsageError(
                f"{who}: the SuperLink rejects its key; register it with `flwr supernode "
                f"register {key}.pub NAME`, and give {KEY_FLAG} {key} (a registered key may be in "
                "use, or its SuperNode was killed less than a minute ago)"
            )
        if code:
            raise SystemExit(f"blsgd: {who} ended with exit code {code}; see the output above")


def _set_up_child() -> None:
    # A shell starts background jobs with SIGINT ignored. Flower's programs would inherit that, and
    # they use the signal to end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal_at_parents_end(signal.SIGTERM)
