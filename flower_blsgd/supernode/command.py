"""The command ``blsgd supernode``."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from ..command_line import add_workers, terminated_like_interrupted
from ..errors import UsageError
from ..runtime.devices import parse_workers, sharing_note
from .keys import FLAG as KEY_FLAG
from .keys import keys_of_nodes
from .node_config import read_node_config
from .node_plan import OUR_KEYS, NodeLaunch, free_ports, launches, plan_nodes
from .superlink import SuperLinkAddress, check_superlink
from .together import run_nodes

_FLAGS_WE_GIVE = (
    *("--superlink", "--host", "--port", "--node-config"),
    *("--insecure", "--root-certificates", KEY_FLAG),
)


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
    command.add_argument("--name", default="", help="how logs call it, and it is known again")
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
    found = _plan(options)
    with terminated_like_interrupted():
        run_nodes(found, _tell)


def _plan(options: argparse.Namespace) -> list[NodeLaunch]:
    """Check everything that can be checked before something is started.

    Raises
    ------
    UsageError
        If something is wrong.
    """
    address = SuperLinkAddress.parse(options.superlink)
    root_certificates = _root_certificates(options)
    _check_further(options.further)
    if options.keys and root_certificates is None:
        raise UsageError(
            f"{KEY_FLAG} needs TLS, but --insecure is given; give --root-certificates FILE and "
            "start the SuperLink with certificates"
        )
    further_config = read_node_config(options.node_config, OUR_KEYS)
    specification = options.workers or "auto"
    workers = parse_workers(specification)
    nodes = plan_nodes(workers, specification, options.one_node_per_device, options.name)
    if note := sharing_note(workers):
        _tell(note)
    keys = keys_of_nodes([_absolute(key) for key in options.keys], len(nodes))
    ports = free_ports(len(nodes), options.port)
    found = launches(
        nodes, address, root_certificates, keys, ports, further_config, options.further
    )
    check_superlink(address, root_certificates)
    return found


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


def _check_further(flags: list[str]) -> None:
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"{flags[0]} is no flag of blsgd supernode; what is for flower-supernode comes "
            "behind --"
        )
    for flag in flags:
        if flag.partition("=")[0] in _FLAGS_WE_GIVE:
            raise UsageError(f"{flag.partition('=')[0]} comes before --, not behind it")


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _tell(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads; the nodes work on
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
