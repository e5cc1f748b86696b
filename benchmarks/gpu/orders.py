"""Checks of orders in one process: who waits for the card, memory, and copies of the model."""

import collections
import functools
import gc
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.engines.local.shared_memory import BufferPool
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.array_records import flat_of, flat_record
from flower_blsgd.worker.model_io import load_state, state_record
from tests.worker import helpers

from ..rows import not_run, row, with_goal
from .lines import CARD, IS_DRY_RUN, ON_CARD, Lines

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW": {"optimizer": "adamw"},
    "channels last": {"channels_last": True},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "clipping": {"clip_norm": 1.0},
    "micro-batches": {"micro_batch_size": 2},
}
MODELS = {"1 M": (256, 16), "25 M": (1024, 24), "250 M": (4096, 15)}
"""Parameters -> width and number of linear layers."""

MEMORY_GOALS = {"sgd": 3.1, "adamw": 4.1}
"""Peak of an order in models: weights, gradients and the optimizer's state, and a tenth."""

_LEFT_BYTES = 8 * 2**20
"""What an order finds free on a card that is full."""


def waits(lines: Lines) -> None:
    """Count the host's waits for the card; a longer order must not have more of them."""
    for name, settings in SETTINGS.items():
        micro = "micro_batch_size" in settings
        model = helpers.independent_model() if micro else helpers.small_model()
        make = helpers.independent_order if micro else helpers.order_of
        try:
            sgd, state = LocalSGD(model, helpers.data(), device=CARD, **settings), RecordDict()
            for number in (1, 2):
                sgd.run(make(number), state)
            short, long = (_waits_of(sgd, make(3, local_steps=n), state) for n in (6, 12))
            per_step = (sum(long.values()) - sum(short.values())) / 6
            most = 1 if name == "float16" else 0
            seen = bool(short) or IS_DRY_RUN  # an order waits at its end, so a card shows some
            ok = seen and per_step <= most
            lines.expect(f"waits of an order, {name}", ok, per_step=per_step, lines=short)
        except Exception as error:  # the next setting is checked all the same
            lines.expect(f"waits of an order, {name}", False, error=repr(error)[:300])


def _waits_of(sgd: LocalSGD, order: Any, state: RecordDict) -> dict[str, int]:
    """Return the lines of an order that waited for the card, by torch's own debug mode."""
    found: collections.Counter[str] = collections.Counter()

    def count(message: Warning | str, *_: Any) -> None:
        frame = sys._getframe(1) if "synchroniz" in str(message) else None
        while frame is not None and "flower_blsgd" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            file = frame.f_code.co_filename.rpartition("flower_blsgd/")[2]
            found[f"{file}:{frame.f_lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count  # type: ignore[assignment]
        if ON_CARD:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            sgd.run(order, state)
        finally:
            if ON_CARD:
                torch.cuda.set_sync_debug_mode("default")
    return dict(found)


def memory(lines: Lines) -> None:
    """Measure the peak of an order in models, and read what a lack of memory says."""
    if not ON_CARD:
        lines.rows([not_run("peak memory of an order", "a dry run", "models")])
        return
    layer = nn.Linear(8, 8, device=CARD)
    layer(torch.ones(8, 8, device=CARD)).sum().backward()
    del layer
    before = torch.cuda.memory_allocated()  # of cuBLAS, for each thread
    for optimizer, most in MEMORY_GOALS.items():
        model = linear_model("25 M")
        model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        width = MODELS["25 M"][0]
        data = torch.randn(8, width), torch.randn(8, width)
        order = helpers.order_for(state_record(model), range(8), 4, learning_rate=1e-4)
        sgd, state = LocalSGD(model, data, _squares, CARD, optimizer=optimizer), RecordDict()
        for _ in range(2):
            sgd.run(order, state)
        gc.collect()  # the optimizer before
        torch.cuda.reset_peak_memory_stats()
        sgd.run(order, state)
        models = (torch.cuda.max_memory_allocated() - before) / model_bytes
        peak = row(f"peak memory of an order, {optimizer}", [models], "models")
        lines.rows([with_goal(peak, at_most=most)])
    torch.cuda.empty_cache()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - _LEFT_BYTES, dtype=torch.uint8, device=CARD)
    try:
        sgd.run(order, state)
        said = "no error"
    except (UsageError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    del filler
    lines.expect("out of memory next to a whole model", said.startswith("UsageError"), said=said)


def copies(lines: Lines) -> None:
    """Time the model's way to the card and back."""
    for name in ["1 M"] if IS_DRY_RUN else MODELS:
        host = state_record(linear_model(name))
        flat = flat_of(host)
        assert flat is not None
        shared = flat_record(flat.layout, new_memory=BufferPool().new_memory)
        _bytes_of(shared)[:] = _bytes_of(host)
        model = linear_model(name).to(CARD)
        ways: dict[str, Callable[[], object]] = {
            "load": functools.partial(load_state, model, shared),
            "report": functools.partial(state_record, model, like=shared),
        }
        for way, copy in ways.items():
            lines.rows([row(f"{way} {name} parameters", _milliseconds(copy), "ms")])


def linear_model(name: str) -> nn.Module:
    """Return a model of `MODELS`, whose activations take little memory."""
    width, layers = MODELS[name]
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def _bytes_of(record: ArrayRecord) -> Any:
    flat = flat_of(record)
    assert flat is not None
    return flat.bytes


def _milliseconds(work: Callable[[], object], times: int = 5, warm_up: int = 1) -> list[float]:
    taken = []
    for _ in range(warm_up + times):
        began = time.perf_counter()
        work()
        if ON_CARD:
            torch.accelerator.synchronize(CARD)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken[warm_up:]
