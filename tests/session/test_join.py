"""What the launcher makes of the answers of scripts that join, also of broken ones."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd import client_app, launch
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.errors import UsageError
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import CONFIG as SETTINGS
from flower_blsgd.protocol import EvaluateReport, ScriptInfo
from flower_blsgd.session import script
from flower_blsgd.session.exchange import Exchange
from flower_blsgd.workload import Workload

from ..fuzz.mutations import hostile, thoroughly
from ..in_process_grid import Handler, InProcessGrid, toy_arrays
from ..refusal import refusal

CONFIG = RunConfig(task="train.py", batch_size=32, epochs=1, evaluate_every_epochs=1)


def content(
    samples: int = 600, batch: int = 0, every: int = -1, name: str = "accuracy", value: float = 0.0
) -> RecordDict:
    metric = (name, "max") if every >= 0 else ("", "")
    info = ScriptInfo(samples, batch, every, *metric, "0f", ["weight"])
    return info.to_records(toy_arrays(value))


def node(make: Callable[[], RecordDict]) -> Handler:
    return lambda message, _: Message(make(), reply_to=message)


def workload(*handlers: Handler, config: RunConfig = CONFIG) -> tuple[Workload, RunConfig]:
    return launch._workload(InProcessGrid(dict(enumerate(handlers, 10))), config)


CONTEXT = Context(1, 2, {"device": "cpu:9999"}, RecordDict(), {"script": "train.py"})
OTHER = node(lambda: RecordDict({SETTINGS: ConfigRecord()}))


@pytest.mark.parametrize(
    ("told", "batch_size", "epoch", "every_epochs"),
    [
        ({}, 32, 600, 1),
        ({"batch": 8}, 8, 600, 1),
        ({"every": 1750}, 32, 600, 3),  # rounded to whole epochs
        ({"every": 1}, 32, 600, 1),
        ({"samples": 0, "every": 7000}, 32, 7000, 1),
        ({"samples": 0}, 32, launch._EPOCH_SAMPLES, 1),
        ({"samples": 3}, 32, 64, 1),  # a step of each worker
    ],
)
def test_what_the_main_script_told_its_session_decides(
    told: dict[str, int], batch_size: int, epoch: int, every_epochs: int
) -> None:
    work, config = workload(OTHER, node(lambda: content(**told)))
    assert (config.batch_size, work.num_samples) == (batch_size, epoch)
    assert config.evaluate_every_epochs == every_epochs
    assert bool(work.num_test) == (told.get("every", -1) >= 0)


def test_setting_decides_when_to_evaluate_unless_it_has_its_default() -> None:
    config = replace(CONFIG, evaluate_every_epochs=2)
    _, config = workload(OTHER, node(lambda: content(every=1750)), config=config)
    assert config.evaluate_every_epochs == 2


@pytest.mark.parametrize(
    ("settings", "told", "message"),
    [
        (
            {"stop_at_accuracy": 0.5},
            {"every": 80, "name": "loss"},
            "stop-at-accuracy = 0.5: the script's metric is loss; ",
        ),
        ({"patience": 3}, {}, "patience = 3: the script does not call session.evaluate"),
        (
            {},
            {"value": math.inf},
            "train.py failed in the main worker: its tensor 'weight' is not finite",
        ),
    ],
)
def test_main_script_with_which_the_run_cannot_train_is_refused(
    settings: dict[str, Any], told: dict[str, Any], message: str
) -> None:
    line = refusal(
        workload, OTHER, node(lambda: content(**told)), config=replace(CONFIG, **settings)
    )
    assert line.startswith(message)


def test_metric_that_the_function_does_not_return_is_refused() -> None:
    work, _ = workload(OTHER, node(lambda: content(every=80)))
    figures = EvaluateReport(0, 1, [1.0], [1.0], ["loss"])
    line = refusal(work.to_metrics, figures)
    assert line.startswith("session.evaluate: the function must return the number 'accuracy'")
    assert line.endswith("it returned loss; name one of its figures with metric=")


def test_script_that_does_not_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_JOIN_SECONDS", 0.01)
    line = refusal(workload, lambda message, _: None, OTHER)
    assert line.startswith("train.py failed in the main worker: it has not taken a step within")
    assert "no node has partition-id=0" in refusal(workload, OTHER, OTHER)


def test_another_worker_that_takes_its_time_or_cannot_begin_does_not_delay_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: Future[Exchange] = Future()
    started.set_result(Exchange(WorkerSpec("cpu"), 1, 0, 8, is_main=False))
    monkeypatch.setattr(script.HERE, "has_script", True)
    monkeypatch.setattr(script, "_started", started)
    work, _ = workload(node(content), lambda message, _: client_app.joined(message, CONTEXT))
    assert work.num_samples == 600

    monkeypatch.setattr(script, "_started", Future())
    line = refusal(script.run_script, CONTEXT)
    assert "core 9999 of cpu:9999 is not available" in line
    assert refusal(client_app.joined, None, CONTEXT) == line  # else it would wait for ever


@thoroughly(5)
@given(st.data())
def test_broken_answer_is_refused_in_one_line_or_can_be_trained_on(data: st.DataObject) -> None:
    broken = node(lambda: data.draw(hostile(lambda: content(batch=8, every=50), by_wire=True)))
    refused, found = "", None
    try:
        found = workload(broken, OTHER)
    except UsageError as error:
        refused = str(error)
    if found is None:
        assert refused.startswith("train.py failed in the main worker: ")
        assert "\n" not in refused
        return
    work, config = found
    assert work.arrays
    assert work.num_samples >= 2 * config.batch_size >= 4
    make_strategy(config, work.num_samples, 2, work.parameter_names)
