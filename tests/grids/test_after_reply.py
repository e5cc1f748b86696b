"""Work that an app does after its reply: the reply does not wait for it, the next message does."""

import threading
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_blsgd.flower.app_call import after_reply

from .processes import answer_of, ask_one, make_grid
from .stream.streams import answer, config_of, exchange, made_app, streaming
from .stream.streams import order as stream_order


def order(do: str, file: Path) -> Message:
    content = RecordDict({"order": ConfigRecord({"do": do, "file": str(file)})})
    return Message(content, 100, "train")


@pytest.mark.processes
def test_on_the_local_grid(app_dir: Path, tmp_path: Path) -> None:
    """The app waits for a file that is written when the reply is there."""
    file = tmp_path / "replied"
    with make_grid(app_dir, 1, "arrays_client:app") as grid:
        for number in (1, 2):
            answer_of(ask_one(grid, order("later", file)))
            file.touch()
            assert answer_of(ask_one(grid, order("what-was-done", file)))["done"] == number
            file.unlink()


def test_on_a_stream() -> None:
    replied, done = threading.Event(), [0]

    def wait() -> None:
        done[0] += replied.wait(60)

    def handle(message: Message, _: Context) -> RecordDict:
        if message.content["config"]["do"] == "later":
            after_reply(wait)
        return answer(done=done[0])

    with streaming(made_app(handle)) as grid:
        for number in (1, 2):
            exchange(grid, stream_order(do="later"))
            replied.set()
            (reply,) = exchange(grid, stream_order(do="look"))
            assert config_of(reply)["done"] == number
            replied.clear()
