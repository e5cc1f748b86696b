"""The command ``blsgd``, which defers Ctrl-C while libraries are imported."""

import errno
import signal
import sys
from types import FrameType

from .files import lost_output, outlast_readers

_LIBRARIES = {"flower_blsgd", "flwr", "torch"}


def main() -> int:
    """Run the command, also when nobody reads its output any more.

    Output that is lost for another reason, such as a full disk, is an error at the end.
    """
    outlast_readers()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
    from .cli.main import main as command

    code = command()
    if sys.stdout is not None:
        sys.stdout.flush()
    if lost_output and (lost := lost_output[0]).errno not in (errno.EPIPE, errno.EIO):
        print(f"blsgd: the output cannot be written: {lost.strerror}", file=sys.stderr)
        return code or 1
    return code


def _interrupt(_: int, frame: FrameType | None) -> None:
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_name, str(frame.f_globals.get("__name__"))))
        frame = frame.f_back
    importing = {name.partition(".")[0] for code, name in stack if code == "<module>"}
    # The import system runs callbacks, in which an exception is lost.
    if importing & _LIBRARIES or stack[0][1] == "importlib._bootstrap":
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # try again
    else:
        raise KeyboardInterrupt


if __name__ == "__main__":
    # Under its own name: a run replaces the handlers of signals that are ours.
    from flower_blsgd.__main__ import main as command

    sys.exit(command())
