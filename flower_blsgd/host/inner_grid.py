"""The grid behind a node: one worker process for each of its devices."""

import contextlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from ..protocol import Failure
from ..runtime.flower_internals import CRASHED, NODE_GONE
from ..runtime.local_grid import LocalGrid
from .devices import host_workers

_PACKAGE_ROOT = Path(__file__).parents[2]


class InnerGrid:
    """Passes a node's messages on to its own workers.

    Their processes start with the first message, and end with `close` or with this process. One
    that dies fails what it had to do, and starts again.

    Parameters
    ----------
    context : Context
        The node's: its config names the devices.
    client_app : str
        ``module:attribute``.
    app_dir : Path
        Where that module is.

    Raises
    ------
    UsageError
        If the devices cannot be used.
    """

    def __init__(self, context: Context, client_app: str, app_dir: Path) -> None:
        workers = host_workers(context.node_config)
        settings = context.run_config
        with package_found():
            self._grid = LocalGrid(
                workers,
                client_app,
                app_dir,
                dict(settings),
                _whole_number(settings.get("threads", 0)),
                _whole_number(settings.get("processes-per-device", 0)),
            )
        self._node_ids = list(self._grid.get_node_ids())

    @property
    def places(self) -> range:
        """All places, from 0 on."""
        return range(len(self._node_ids))

    @property
    def grid(self) -> LocalGrid:
        """The grid itself."""
        return self._grid

    def ask(
        self, contents: Mapping[int, RecordDict], kind: str
    ) -> tuple[dict[int, RecordDict], dict[int, Failure]]:
        """Send a message to each of these places, all at once, and wait for the replies.

        Parameters
        ----------
        contents : mapping of int to RecordDict
            By place.
        kind : str
            Type of the messages.

        Returns
        -------
        tuple of dict
            By place, in order: what was answered, and why others did not.
        """
        places = {self._node_ids[p]: p for p in sorted(contents) if p in self.places}
        messages = [Message(contents[place], node, kind) for node, place in places.items()]
        answers: dict[int, RecordDict] = {}
        failures = {
            place: Failure(NODE_GONE, f"this node has no device {place}")
            for place in contents
            if place not in self.places
        }
        for reply in self._grid.send_and_receive(messages):
            place = places[reply.metadata.src_node_id]
            if reply.has_error():
                reason = (reply.error.reason or "").strip()
                failures[place] = Failure(reply.error.code, reason)
            else:
                answers[place] = reply.content
        return dict(sorted(answers.items())), dict(sorted(failures.items()))

    def ask_again_if_died(
        self, contents: Mapping[int, RecordDict], kind: str
    ) -> tuple[dict[int, RecordDict], dict[int, Failure]]:
        """Do as `ask`, and once more with those whose process died: it has started again."""
        answers, failures = self.ask(contents, kind)
        died = {place: contents[place] for place, f in failures.items() if f.code == CRASHED}
        if died:
            more, still = self.ask(died, kind)
            others = {place: f for place, f in failures.items() if place not in died}
            answers, failures = dict(sorted((answers | more).items())), others | still
        return answers, failures

    def close(self) -> None:
        """End all worker processes. May be called twice."""
        self._grid.close()


def _whole_number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


@contextlib.contextmanager
def package_found() -> Iterator[None]:
    """Let the processes of a grid that is made meanwhile import this very package.

    In a SuperNode it may be the app's bundle that holds it, which no fresh interpreter finds.
    """
    before = os.environ.get("PYTHONPATH")
    if Path(sysconfig.get_path("purelib")) == _PACKAGE_ROOT:
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
