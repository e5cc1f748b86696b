"""The mod that makes a node stand for several devices."""

from pathlib import Path

import cloudpickle
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.host.mod import several_devices
from flower_blsgd.runtime.flower_internals import become_server, give_message_id


def test_app_of_a_node_with_several_devices_travels_by_value() -> None:
    """As Flower's simulation sends it to its actors."""
    app = ClientApp(mods=[several_devices("clients.blsgd_client:app", Path("somewhere"))])

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    become_server(1)
    message = Message(RecordDict(), 5, "query")
    give_message_id(message)
    copied = cloudpickle.loads(cloudpickle.dumps(app))
    assert not copied(message, Context(1, 5, {}, RecordDict(), {})).has_error()
    with_devices = Context(1, 5, {"devices": "2x cpu:0"}, RecordDict(), {})
    assert 'use transport = "stream"' in copied(message, with_devices).error.reason
