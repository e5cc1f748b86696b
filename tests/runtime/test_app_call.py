"""A ClientApp is called, and there is always a reply."""

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.app_call import Handler, handler_of
from flower_blsgd.runtime.flower_internals import RAISED, become_server, give_message_id


def handler(error: BaseException | None) -> tuple[Handler, Context]:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        context.state["count"] = MetricRecord({"count": 1})
        if error is not None:
            raise error
        return Message(RecordDict(), reply_to=message)

    context = Context(1, 5, {}, RecordDict({"before": ConfigRecord({"kept": True})}), {})
    return handler_of(app, context), context


def order() -> Message:
    become_server(1)
    message = Message(RecordDict(), 5, "train")
    give_message_id(message)
    return message


def test_reply_and_state_of_a_call() -> None:
    handle, context = handler(None)
    assert not handle(order()).has_error()
    assert set(context.state) == {"before", "count"}


def test_mistake_of_the_user_is_told_in_its_own_line() -> None:
    handle, context = handler(UsageError("device cuda:7 is not there; this machine has cpu"))
    reply = handle(order())
    assert (reply.error.code, reply.error.reason) == (
        RAISED,
        "device cuda:7 is not there; this machine has cpu",
    )
    assert set(context.state) == {"before"}


def test_other_errors_come_with_their_traceback() -> None:
    handle, context = handler(ValueError("odd"))
    reason = handle(order()).error.reason
    assert reason is not None
    assert reason.startswith("Traceback")
    assert reason.rstrip().endswith("ValueError: odd")
    assert set(context.state) == {"before"}
