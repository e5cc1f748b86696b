"""Let a ClientApp receive its messages over a stream."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...flower.app_call import OWN_QUERIES
from ...flower.internals import answer_without_mods, skip_mods
from .request import STREAM_MESSAGE


def serve_sessions(app: ClientApp) -> ClientApp:
    """Let a ClientApp receive its messages over a stream if the ServerApp opens one.

    The functions of the app need no change. Each message on the stream calls the app as Flower
    would, with its mods, and ``context.state`` persists between messages. A lifespan is entered
    once for the whole stream. The calls come from one thread, which is not the main thread. If the
    stream ends during a call, the call is interrupted by a `BaseException` that is not an
    `Exception`.

    Parameters
    ----------
    app : ClientApp
        An app with ``@app.train()`` and similar functions. It is changed in place.

    Returns
    -------
    ClientApp
        The same app.

    Raises
    ------
    ValueError
        If the app was created with ``client_fn``.

    Examples
    --------
    ::

        app = ClientApp()
        flower_blsgd.serve_sessions(app)
    """

    def serve(message: Message, context: Context) -> Message:
        from .client import serve_stream  # imports gRPC, which only streams need

        return serve_stream(app, message, context)

    answer_without_mods(app, STREAM_MESSAGE, serve)
    skip_mods(app, OWN_QUERIES)
    return app
