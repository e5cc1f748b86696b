"""A ClientApp is called, and there is always a reply."""

import contextlib
import errno
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)

from flower_blsgd import TrainOrder, answer_profile, serve_sessions
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.app_call import (
    OUT_OF_MEMORY,
    PROCESS_ENDS,
    REFUSED,
    Handler,
    error_of,
    handler_of,
)
from flower_blsgd.flower.internals import (
    CRASHED,
    NOT_LOADED,
    RAISED,
    become_server,
    give_message_id,
)
from flower_blsgd.hosts.several_devices import several_devices
from flower_blsgd.protocol import Failure

from ..in_process_grid import InProcessGrid, ToyWorker, toy_arrays
from ..strategy.orders import strategy_of


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
    ("error", "code", "begin", "end"),
    [
        (UsageError("device cuda:7 is not there"), REFUSED, "device", "cuda:7 is not there"),
        (ValueError("odd"), RAISED, "Traceback", "ValueError: odd"),
    ],
    ids=["a mistake of the user in its own line", "another error with its traceback"],
)
def test_an_error_is_a_reply_and_the_state_stays(
    error: Exception, code: int, begin: str, end: str
) -> None:
    handle, context = handler(error)
    reply = handle(order())
    assert reply.error.code == code
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
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
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

    assert error_of(error).code != PROCESS_ENDS  # there is no accelerator
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


def _reads_config(message: Message, context: Context, call_next: Any) -> Message:
    assert "lr" in message.content["config"]
    return call_next(message, context)


def _adds_a_metric(message: Message, context: Context, call_next: Any) -> Message:
    reply = call_next(message, context)
    reply.content["metrics"]["of-a-mod"] = 1.0
    return reply


MODS = {
    "LocalDpMod": LocalDpMod(1.0, 0.0, 1.0, 0.5),
    "message_size_mod": message_size_mod,
    "arrays_size_mod": arrays_size_mod,
    "fixedclipping_mod": fixedclipping_mod,
    "adaptiveclipping_mod": adaptiveclipping_mod,
    "reads the config": _reads_config,
    "changes the reply": _adds_a_metric,
}


@pytest.mark.parametrize("plain_messages", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_mods_see_training_and_evaluation_but_not_our_queries(
    name: str, plain_messages: bool
) -> None:
    """With plain messages Flower calls the app; `serve_sessions` has then taken off the mods."""
    seen = []

    def watching(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    app = ClientApp(mods=[watching, MODS[name], several_devices("app:app", Path())])
    app.query("profile")(answer_profile)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        order = TrainOrder.from_message(message)
        reply = ToyWorker(value=1.0).report(order).to_reply(message)
        if name == "adaptiveclipping_mod":
            reply.content["metrics"]["norm-bit"] = 1
        return reply

    if plain_messages:
        serve_sessions(app)

    def node(number: int) -> Callable[[Message, int], Message]:
        own = {"device": "cpu", "partition-id": number, "seconds-per-step": 1.0}
        context = Context(1, number, own, RecordDict(), {})
        handle = handler_of(app, context)
        return lambda message, _: app(message, context) if plain_messages else handle(message)

    strategy = strategy_of(sampler=UniformSampler())
    grid = InProcessGrid({number: node(number) for number in (0, 1)})
    config = ConfigRecord({"clipping_norm": 1.0})
    result = strategy.start(grid, toy_arrays(), num_rounds=1, train_config=config)
    assert [w.profile.seconds_per_step for w in strategy.registry.workers] == [1.0, 1.0]
    assert [worker.failures for worker in strategy.registry.workers] == [[], []]
    assert seen == ["train"] * 2
    assert ("of-a-mod" in result.train_metrics_clientapp[1]) == (name == "changes the reply")
