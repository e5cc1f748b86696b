"""A ClientApp is called, and there is always a reply."""

import contextlib
import errno
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.errors import UsageError
from flower_blsgd.grids.app_call import (
    OUT_OF_MEMORY,
    PROCESS_ENDS,
    Handler,
    error_of,
    handler_of,
)
from flower_blsgd.grids.flower_internals import (
    CRASHED,
    NOT_LOADED,
    RAISED,
    become_server,
    give_message_id,
)
from flower_blsgd.protocol import Failure


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


ASSERTION = torch.AcceleratorError(
    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to know more.\n"
)


@pytest.mark.parametrize("error", [ASSERTION, UsageError("it raised"), torch.OutOfMemoryError()])
@pytest.mark.parametrize("is_lost", [True, False])
def test_process_ends_if_its_accelerator_fails_at_every_call(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    """Whatever was raised. Of four devices, this process uses the last two.

    Each is the current one meanwhile: CUDA would initialize the current one afterwards.
    """
    asked: list[int] = []
    current = [0]

    @contextlib.contextmanager
    def device_index(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def synchronize(index: int) -> None:
        assert current[-1] == index
        asked.append(index)
        if is_lost and index == 3:
            raise ASSERTION

    assert error_of(error).code in (RAISED, OUT_OF_MEMORY)  # there is no accelerator
    fakes: dict[str, Callable[..., Any]]
    fakes = {"is_available": lambda: True, "device_count": lambda: 4, "synchronize": synchronize}
    fakes |= {"memory_reserved": lambda index: 512 * (index > 1), "device_index": device_index}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    assert (error_of(error).code == PROCESS_ENDS) == is_lost
    assert asked == [2, 3]


OF_A_LOADER = ValueError(
    f"Caught it in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    f'  File "a.py", line 1, in f\n    f()\nAcceleratorError: {ASSERTION}\n'
)
NOTED = ValueError("one line\n")
NOTED.add_note("a note")


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ASSERTION, "AcceleratorError: CUDA error: device-side assert triggered"),
        (OF_A_LOADER, "AcceleratorError: CUDA error: device-side assert triggered"),
        (
            RuntimeError("Error(s) in loading:\n\tMissing: x.\n\ty."),
            "RuntimeError: Error(s) in loading: Missing: x.",
        ),
        (RuntimeError("\n  the cause\n  more"), "RuntimeError: the cause"),
        (ValueError("Caught it.\nTraceback (most recent call last):\nKeyError: 5"), "KeyError: 5"),
        (NOTED, "ValueError: one line"),
        (UsageError("what is wrong\nmore"), "what is wrong"),
    ],
    ids=["hints of CUDA", "of a loader", "heading", "empty line", "traceback", "note", "usage"],
)
def test_summary_of_an_error_is_its_cause(error: Exception, summary: str) -> None:
    failure = Failure.of(error_of(error))
    assert failure.brief.endswith(summary)
    assert failure.brief in (summary, f"torch.{summary}")
    assert "\n" in failure.reason  # complete in the log
    loading = "".join(traceback.format_exception(error))  # as of an app that cannot be loaded
    assert Failure.of(Error(NOT_LOADED, loading)).brief.endswith(summary)
    assert summary.endswith(Failure.of(ValueError(str(error))).brief)


def test_summary_of_a_process_that_died_is_how() -> None:
    last = 'its last lines were:\nTraceback (most recent call last):\n  File "a"\nValueError: a'
    assert Failure.of(Error(CRASHED, f"{last}\ndied (exit code 1)")).brief == "died (exit code 1)"


def test_cause_of_an_error_as_flower_reports_it() -> None:
    """From ``flwr/supernode/runtime/run_clientapp.py`` and ``flwr/.../fleet/vce/vce_api.py``."""
    for message in (
        str(ASSERTION),
        f"\nException ClientAppException occurred. Message: {ASSERTION}",
    ):
        reason = f"{type(ASSERTION)}:<'{message}'>"
        assert Failure.of(Error(RAISED, reason)).brief.endswith("device-side assert triggered")
    one_line = "<class 'ZeroDivisionError'>:<'division by zero'>"
    assert Failure.of(Error(RAISED, one_line)).brief == one_line
