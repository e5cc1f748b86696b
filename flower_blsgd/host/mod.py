"""The one line that lets a ClientApp stand for several devices of its machine."""

import threading
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from ..errors import UsageError
from ..protocol import TRAIN_SUM
from ..runtime.flower_internals import RAISED
from ..runtime.stream.session_end import at_session_end, in_session
from .answers import NobodyAnsweredError, answer
from .devices import DEVICES
from .inner_grid import InnerGrid


def several_devices(client_app: str, app_dir: Path) -> Mod:
    """Return a mod for a ClientApp whose node may have ``devices='4x cuda:0; 2x cpu'``.

    Such a node starts a worker process for each device, with this same app. They live as long as
    the node's session: without a session each message would start them all, and is answered with
    an error of one line. Every other node is left as it is.

    Parameters
    ----------
    client_app : str
        The app that it is for, as ``module:attribute``.
    app_dir : Path
        Where that module is.

    Examples
    --------
    ::

        app = ClientApp(mods=[several_devices(f"{__name__}:app", Path(__file__).parents[1])])
    """
    host = _Host(client_app, app_dir)

    def answer_or_pass_on(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        if DEVICES not in context.node_config:
            return call_next(message, context)
        try:
            return host.answer(message, context)
        except UsageError as error:  # in one line, without a traceback
            return Message(Error(RAISED, str(error)), reply_to=message)
        except NobodyAnsweredError as error:
            return Message(Error(error.code or RAISED, str(error)), reply_to=message)

    return answer_or_pass_on


class _Host:
    """Keeps the grid behind this process's node while its session lasts."""

    def __init__(self, client_app: str, app_dir: Path) -> None:
        self._client_app, self._app_dir = client_app, app_dir
        self._grid: InnerGrid | None = None
        self._lock = threading.Lock()  # a session may end while a message is handled

    def __reduce__(self) -> tuple[type["_Host"], tuple[str, Path]]:
        # Flower's simulation sends the app to its actors by value, and a lock cannot travel.
        return _Host, (self._client_app, self._app_dir)

    def answer(self, message: Message, context: Context) -> Message:
        devices = context.node_config[DEVICES]
        if not in_session():
            raise UsageError(
                f"devices = {devices!r} in the node config: its workers live as long as a session "
                'does, and this run has none; use transport = "stream", or start one SuperNode '
                "for each device"
            )
        if message.metadata.message_type == TRAIN_SUM:
            raise UsageError(
                f"devices = {devices!r} in the node config: slow workers add up models on the "
                "local grid only; use blsgd run"
            )
        return answer(message, context, self._inner_grid(context))

    def _inner_grid(self, context: Context) -> InnerGrid:
        with self._lock:
            if self._grid is None:
                self._grid = InnerGrid(context, self._client_app, self._app_dir)
                at_session_end(self._close)
            return self._grid

    def _close(self) -> None:
        with self._lock:
            grid, self._grid = self._grid, None
        if grid is not None:
            grid.close()
