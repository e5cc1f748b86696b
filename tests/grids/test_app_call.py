"""A ClientApp is called, and there is always a reply."""

import errno

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.errors import UsageError
from flower_blsgd.grids.app_call import OUT_OF_MEMORY, Handler, error_of, handler_of
from flower_blsgd.grids.flower_internals import RAISED, become_server, give_message_id


def handler(error: BaseException | None) -> tuple[Handler, Context]:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        context.state["count"] = MetricRecord({"count": 1})
        context.state["before"]["list"].append(5)
        if error is not None:
            raise error
        return Message(RecordDict(), reply_to=message)

    context = Context(1, 5, {}, RecordDict({"before": ConfigRecord({"list": [0]})}), {})
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


@pytest.mark.parametrize(
    ("error", "begin", "end"),
    [
        (UsageError("device cuda:7 is not there"), "device", "cuda:7 is not there"),
        (ValueError("odd"), "Traceback", "ValueError: odd"),
    ],
    ids=["a mistake of the user in its own line", "another error with its traceback"],
)
def test_an_error_is_a_reply_and_the_state_stays(error: Exception, begin: str, end: str) -> None:
    handle, context = handler(error)
    reply = handle(order())
    assert reply.error.code == RAISED
    assert reply.error.reason is not None
    assert reply.error.reason.startswith(begin)
    assert reply.error.reason.endswith(end)
    assert context.state == RecordDict({"before": ConfigRecord({"list": [0]})})


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "cannot map"),
        torch.OutOfMemoryError("tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        pytest.param(None, id="torch's allocator for CPUs"),
    ],
    ids=repr,
)
def test_out_of_memory_is_known_by_the_exception(error: Exception | None) -> None:
    if error is None:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(1 << 60)
        error = raised.value
    assert error_of(error).code == OUT_OF_MEMORY
    assert error_of(ValueError("out of memory")).code == RAISED
    assert error_of(RuntimeError("CUDA error: device-side assert triggered")).code == RAISED
