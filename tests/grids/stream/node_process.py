"""A node's process, for tests in which it is in a network of its own.

It reads the request for its session from standard input as JSON, serves the session, and prints
how it ended.
"""

import base64
import json
import sys
import time
from dataclasses import asdict
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.grids.flower_internals import become_server
from flower_blsgd.grids.stream.client import Session
from flower_blsgd.grids.stream.session import SessionRequest


def counting_app() -> ClientApp:
    """Return an app that takes as long as it is told, and says how often it was called."""
    calls: list[Any] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        config = message.content["config"]
        calls.append(config["x"])
        time.sleep(config["seconds"])
        answer = ConfigRecord({"x": config["x"], "calls": calls})
        return Message(RecordDict({"config": answer}), reply_to=message)

    return app


def request_as_json(request: SessionRequest) -> str:
    binary = {
        name: base64.b64encode(getattr(request, name)).decode() for name in ("certificate", "token")
    }
    return json.dumps({**asdict(request), **binary})


if __name__ == "__main__":
    become_server(run_id=1)
    given = json.load(sys.stdin)
    for name in ("certificate", "token"):
        given[name] = base64.b64decode(given[name])
    context = Context(1, 7, {}, RecordDict(), {})
    result = Session(counting_app(), SessionRequest(**given), context).serve()
    print(json.dumps(asdict(result)))
