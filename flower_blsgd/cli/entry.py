"""Entry point of the command, which defers Ctrl-C while libraries are imported."""

import signal
from types import FrameType

_LIBRARIES = {"flower_blsgd", "flwr", "torch"}


def main() -> int:
    """Run the command; torch would abort if Ctrl-C interrupted its import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
    from .main import main as command

    return command()


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
