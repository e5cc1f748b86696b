"""The two lines that put an app on the stream; this one is the ClientApp's."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ..flower_internals import answer_beside_mods, release_records_at_once


def serve_sessions(app: ClientApp) -> ClientApp:
    """Let a ClientApp take its messages over a stream, where the ServerApp opens one.

    Its functions stay as they are: each message on the stream calls the app as Flower would,
    mods included, and ``context.state`` lives on; a lifespan is entered once, around all of
    them. The calls come from one thread, which is not
    the main one. Where the session ends while the app works, what it does is interrupted by an
    exception that is no ``Exception``.

    Parameters
    ----------
    app : ClientApp
        With ``@app.train()`` and its like; it is changed in place.

    Returns
    -------
    ClientApp
        The same app.

    Raises
    ------
    ValueError
        If the app was made with ``client_fn``.

    Examples
    --------
    ::

        app = ClientApp()
        flower_blsgd.serve_sessions(app)
    """

    def serve(message: Message, context: Context) -> Message:
        from .session import Session  # gRPC takes long to import, and not every run streams

        release_records_at_once()
        return Session(app, message, context).serve().to_reply(message)

    answer_beside_mods(app, "train.session", serve)
    return app
