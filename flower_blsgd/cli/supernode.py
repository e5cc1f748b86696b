"""The command ``blsgd supernode``: start Flower's SuperNodes with the right devices and keys."""

import argparse
import contextlib
import os
import re
import socket
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from ..errors import UsageError
from ..runtime.devices import WorkerSpec, parse_workers, sharing_note
from ..runtime.pinning import environment
from .node_processes import KEY_FLAG, NodeCommand, run_nodes
from .options import add_workers, terminated_like_interrupted
from .superlink import SuperLinkAddress, check_superlink

Value = bool | float | int | str

OWN_KEYS = (
    *("device", "devices", "tier", "steps", "slowdown", "name"),
    *("seconds-per-step", "seconds-per-step-alone", "superlink"),
)
"""The keys of the node config that this command writes."""

_OWN_FLAGS = (
    *("--superlink", "--host", "--port", "--node-config"),
    *("--insecure", "--root-certificates", KEY_FLAG),
)
_LOOPBACK = "127.0.0.1"
_PROGRAM = "flower-supernode"
_MAKE_KEY = 'make one with ssh-keygen -t ecdsa -b 384 -N "" -f FILE'

# As Flower reads a node config: pairs separated by spaces, texts in quotes of one kind.
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")


def add_supernode(commands: Any) -> argparse.ArgumentParser:
    """Add the command to a parser's, and return its parser."""
    command: argparse.ArgumentParser = commands.add_parser(
        "supernode",
        help="be a node of a SuperLink: one SuperNode with this machine's devices, or one each",
        epilog="What follows -- is handed to flower-supernode as it is.",
    )
    command.set_defaults(command=_supernode)
    command.add_argument("--superlink", metavar="HOST:PORT", required=True)
    add_workers(command)
    command.add_argument(
        "--one-node-per-device",
        action="store_true",
        help="a SuperNode for each worker, instead of one for all",
    )
    command.add_argument("--name", default="", help="name in logs, by which it is known again")
    command.add_argument(
        "--root-certificates", metavar="FILE", type=Path, help="PEM; verifies the SuperLink"
    )
    command.add_argument("--insecure", action="store_true", help="the SuperLink has no TLS")
    command.add_argument(
        KEY_FLAG,
        dest="keys",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="the key that is registered; with several SuperNodes once for each",
    )
    command.add_argument(
        "--node-config",
        metavar="'KEY=VALUE ...'",
        default="",
        help="further keys for each node, such as partition-id",
    )
    command.add_argument(
        "--port", type=int, help="of the SuperNode's own API on this machine (default: a free one)"
    )
    command.add_argument("further", nargs="*", metavar="-- FLAG ...", help=argparse.SUPPRESS)
    return command


def _supernode(options: argparse.Namespace) -> None:
    commands = _checked_commands(options)
    with terminated_like_interrupted():
        run_nodes(commands, _show)


def _show(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader has gone; the nodes work on
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _checked_commands(options: argparse.Namespace) -> list[NodeCommand]:
    """Check everything that can be checked before a process is started."""
    address = SuperLinkAddress.parse(options.superlink)
    root_certificates = _root_certificates(options)
    _check_further_flags(options.further)
    if options.keys and root_certificates is None:
        raise UsageError(
            f"{KEY_FLAG} needs TLS, but --insecure is given; give --root-certificates FILE and "
            "start the SuperLink with certificates"
        )
    further_config = read_node_config(options.node_config)
    specification = options.workers or "auto"
    workers = parse_workers(specification)
    alone = len(workers) == 1 or options.one_node_per_device
    num_nodes = len(workers) if alone else 1
    if note := sharing_note(workers):
        _show(note)
    keys = check_keys([_absolute(key) for key in options.keys], num_nodes)
    commands = node_commands(
        workers,
        "" if alone else specification,
        options.name,
        address,
        root_certificates,
        keys,
        free_ports(num_nodes, options.port),
        further_config,
        options.further,
    )
    check_superlink(address, root_certificates)
    return commands


def _root_certificates(options: argparse.Namespace) -> Path | None:
    given: Path | None = options.root_certificates
    if given is not None and options.insecure:
        raise UsageError(
            "--insecure and --root-certificates exclude each other; --insecure is for a SuperLink "
            "without TLS"
        )
    if given is None and not options.insecure:
        raise UsageError(
            "give --root-certificates FILE (the ca.crt of the SuperLink), or --insecure if it "
            "runs without TLS"
        )
    return None if given is None else _absolute(given)


def _check_further_flags(flags: list[str]) -> None:
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"{flags[0]} is no flag of blsgd supernode; what is for flower-supernode comes "
            "behind --"
        )
    for flag in flags:
        if flag.partition("=")[0] in _OWN_FLAGS:
            raise UsageError(f"{flag.partition('=')[0]} comes before --, not behind it")


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def node_commands(
    workers: Sequence[WorkerSpec],
    devices: str,
    name: str,
    superlink: SuperLinkAddress,
    root_certificates: Path | None,
    keys: Sequence[Path | None],
    ports: Sequence[int],
    further_config: Mapping[str, Value],
    further_flags: Sequence[str],
) -> list[NodeCommand]:
    """Return the flower-supernode command of one node with all workers, or of one for each.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        At least one.
    devices : str
        What they were read from if one node has several of them; empty: a node for each.
    name : str
        By which the node is known when it comes back, or empty; several get a number behind it.
    superlink : SuperLinkAddress
        Where the SuperLink is.
    root_certificates : Path, optional
        What verifies it; None: no TLS.
    keys, ports : sequence
        Of the i-th node: its key (or None) and the port of its Runtime API.
    further_config : mapping
        Further keys of the node config.
    further_flags : sequence of str
        Handed to flower-supernode as they are.

    Raises
    ------
    UsageError
        If flower-supernode is not installed beside this Python (the apps import what is here), or
        a worker and its node are both named.
    """
    program = Path(sys.executable).with_name(_PROGRAM)
    if not program.exists():
        raise UsageError(
            f"{_PROGRAM} is not beside {sys.executable}; install flwr in the same environment"
        )
    devices = " ".join(devices.split())
    named = next((worker.name for worker in workers if worker.name), "")
    if name and named and not devices:
        raise UsageError(f"--name {name}: the worker is named name={named} already; name it once")
    if devices:
        groups, names = [tuple(workers)], [name]
    else:
        groups = [(worker,) for worker in workers]
        several = bool(name) and len(workers) > 1
        names = [w.name or (f"{name}-{i}" if several else name) for i, w in enumerate(workers)]
    labels = [
        own or devices or group[0].device_with_cores
        for group, own in zip(groups, names, strict=True)
    ]
    counts = Counter(labels)
    secure = ["--root-certificates", str(root_certificates)] if root_certificates else []
    commands = []
    for i, (group, own, key, port) in enumerate(zip(groups, names, keys, ports, strict=True)):
        config = {
            **({"devices": devices} if devices else group[0].to_node_config()),
            **({"name": own} if own else {}),
            "superlink": str(superlink),
            **further_config,
        }
        command = (
            *(str(program), "--superlink", str(superlink), *(secure or ["--insecure"])),
            *((KEY_FLAG, str(key)) if key else ()),
            *("--host", _LOOPBACK, "--port", str(port), "--node-config", node_config_text(config)),
            *further_flags,
        )
        number = f" #{labels[:i].count(labels[i]) + 1}" if counts[labels[i]] > 1 else ""
        # Empty means all cores, as for an accelerator.
        cores = {core for worker in group for core in worker.cores}
        pinned = sorted(cores) if all(worker.cores for worker in group) else []
        # Several devices behind one node are pinned, each by its own process, when they start.
        variables = _variables({} if devices else environment(group[0]))
        commands.append(
            NodeCommand(
                labels[i] + number, command, tuple(pinned), variables, str(superlink), key, port
            )
        )
    return commands


def _variables(pinning: Mapping[str, str]) -> dict[str, str]:
    # flower-supernode looks for flower-superexec, and that for flwr-clientapp, in PATH.
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    defaults = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **os.environ, **pinning, "PATH": os.pathsep.join(path)}


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Return ports of the loopback interface that are free: any, or those from `first` on.

    Raises
    ------
    UsageError
        If one from `first` on is taken.
    """
    wanted = [0] * count if first is None else range(first, first + count)
    ports = []
    with contextlib.ExitStack() as open_sockets:  # all open at once, so that they differ
        for port in wanted:
            probe = open_sockets.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_LOOPBACK, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", "") or "above 65535"
                raise UsageError(
                    f"--port {port} cannot be used ({reason}); name another, or leave --port out "
                    "for a free one"
                ) from None
            ports.append(int(probe.getsockname()[1]))
    return ports


def check_keys(paths: Sequence[Path], num_nodes: int) -> list[Path | None]:
    """Return each node's private key, None for all if there are none.

    Raises
    ------
    UsageError
        If there are more or fewer keys than nodes, one is used twice, or one is no private
        key on an elliptic curve.
    """
    if not paths:
        return [None] * num_nodes
    if len(paths) != num_nodes:
        raise UsageError(
            f"{len(paths)} {KEY_FLAG} for {num_nodes} SuperNode{'s' * (num_nodes > 1)}; give it "
            "once per SuperNode, each with a key of its own, in the order of --workers"
        )
    owners: dict[bytes, Path] = {}
    for path in paths:
        public = _public_key(path)
        if public in owners:
            raise UsageError(
                f"{KEY_FLAG} {path} is the key of {owners[public]}; each SuperNode needs its own: "
                f"{_MAKE_KEY}"
            )
        owners[public] = path
    return list(paths)


def _public_key(path: Path) -> bytes:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UsageError(
            f"{KEY_FLAG} {path} cannot be read ({error.strerror}); {_MAKE_KEY}"
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a password
        raise UsageError(
            f"{KEY_FLAG} {path} is no OpenSSH private key without a password; {_MAKE_KEY}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{KEY_FLAG} {path} is not on an elliptic curve; {_MAKE_KEY}")
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def node_config_text(values: Mapping[str, Value]) -> str:
    """Write a node config as ``flower-supernode --node-config`` reads it.

    >>> node_config_text({"device": "cpu:0", "steps": 3, "slowdown": 4.0})
    "device='cpu:0' steps=3 slowdown=4.0"

    Raises
    ------
    UsageError
        If a text holds quotes of both kinds: Flower has no way to write it.
    """
    return " ".join(f"{key}={_written(key, value)}" for key, value in values.items())


def _written(key: str, value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if not value.isprintable() or ("'" in value and '"' in value):
        raise UsageError(
            f"{key} = {value!r} cannot be in a node config; use no control characters, and "
            "quotes of one kind"
        )
    if "'" not in value:
        return f"'{value}'"
    escaped = value.replace("\\", "\\\\")
    return f'"{escaped}"'


def read_node_config(text: str) -> dict[str, Value]:
    """Read further keys of a node config, given as ``KEY=VALUE`` pairs; empty text: none.

    Raises
    ------
    UsageError
        If a pair cannot be read, or its key is one that the command writes itself.
    """
    rest = _PAIR.sub("", text).strip()
    lines = "\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text))
    try:
        values = tomllib.loads(lines)
    except tomllib.TOMLDecodeError:
        values = {}
    if rest or (text.strip() and not values):
        raise UsageError(
            f"--node-config {text!r} cannot be read; write KEY=VALUE pairs with texts in quotes: "
            "\"partition-id=3 site='north'\""
        )
    for key, value in values.items():
        if key in OWN_KEYS:
            raise UsageError(
                f"--node-config {key}: blsgd supernode writes this key itself; use --workers, "
                "--superlink and --name"
            )
        if not isinstance(value, bool | float | int | str):
            raise UsageError(f"--node-config {key} = {value!r} must be a number, a text or a bool")
    return values
