"""Why a SuperNode ended, in one line that says what to do."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from flwr.app.exception import AppExitException

from ..errors import UsageError
from .keys import FLAG as KEY_FLAG
from .node_plan import NodeLaunch

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REFUSED_ARGUMENT = re.compile(r"flower-supernode: error: (.*)")
_EXIT_CODE = re.compile(r"Exit Code: 3\d\d\b")
_CONNECTED = re.compile(r"SuperNode ID: (\d+)")


class SuperNodeEndedError(AppExitException):
    """A SuperNode ended with an error; the message says which one, and how."""

    exit_code = 1


def plain(line: str) -> str:
    """Return a line of Flower's log without colours."""
    return _COLOURS.sub("", line).rstrip()


def node_id_in(line: str) -> str:
    """Return the id that a SuperNode got when it connected, if this line tells it; else ""."""
    match = _CONNECTED.search(line)
    return match[1] if match else ""


def begins_verdict(line: str) -> bool:
    """Return whether Flower says from this line on why the SuperNode ends.

    Its own codes are 300 to 399; those of a ClientApp, which prints here too, are others.
    """
    return _EXIT_CODE.search(line) is not None


def why_ended(launch: NodeLaunch, code: int, lines: Sequence[str]) -> Exception:
    """Return what to raise for a SuperNode that ended with an error.

    Parameters
    ----------
    launch : NodeLaunch
        Which one.
    code : int
        Its exit code; 128 and more: ended by a signal.
    lines : sequence of str
        What it printed when it ended, without colours.

    Returns
    -------
    UsageError
        If the user can do something about it.
    SuperNodeEndedError
        Otherwise.
    """
    who = f"SuperNode {launch.label}"
    text = "\n".join(lines)
    if "[code: 2001]" in text:
        return UsageError(
            f"{who}: the SuperLink at {launch.superlink} takes registered SuperNodes only; make a "
            "key, register it with `flwr supernode register KEY.pub NAME`, and give "
            f"{KEY_FLAG} KEY"
        )
    if "[code: 2004]" in text:
        return UsageError(
            f"{who}: the SuperLink at {launch.superlink} does not take the key {launch.key}; "
            f"register it with `flwr supernode register {_public(launch.key)} NAME`, or leave it "
            "out if that SuperLink has no --enable-supernode-auth; if it is registered, a "
            "SuperNode has it already, or was killed less than a minute ago"
        )
    if argument := _REFUSED_ARGUMENT.search(text):
        return UsageError(f"{who}: flower-supernode: {argument[1]}")
    if "address already in use" in text.lower():
        return UsageError(
            f"{who}: port {launch.port} was taken in the meantime; leave --port out for a free one"
        )
    if code > 128:
        try:
            how = f"was killed ({signal.Signals(code - 128).name})"
        except ValueError:
            how = f"ended with exit code {code}"
    else:
        how = f"ended with exit code {code}"
    last = next((line for line in reversed(lines) if line.strip()), "")
    told = f"; its last line: {last.strip()}" if last else ""
    return SuperNodeEndedError(f"{who} {how}{told}")


def _public(key: Path | None) -> str:
    return f"{key}.pub" if key else "KEY.pub"
