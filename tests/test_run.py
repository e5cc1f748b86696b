"""A whole run on a grid without processes: the real apps, the real task, the results folder."""

import csv
import json
import logging
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from clients.blsgd_client import app as client_app
from flower_blsgd import Task
from flower_blsgd.api import evaluate_run
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import Accelerator, Machine, usable_cores
from flower_blsgd.devices.worker_spec import WorkerSpec, parse_workers
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.app_folder import built_in_app
from flower_blsgd.parts import check_workers, make_local_grid
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.results.recorder import RunRecorder
from flower_blsgd.run import precision_note, train_on
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.tasks import load_task, register_task
from flower_blsgd.tasks.task import correct
from flower_blsgd.workload import workload_of_task
from server.blsgd_server import app as server_app

from .grids.processes import process_ids
from .in_process_grid import Handler, InProcessGrid
from .log_capture import captured_log
from .refusal import refusal
from .small_training import points_task

CORE = usable_cores()[0]
NODES = ({"tier": "fast", "partition-id": 0}, {"tier": "slow", "partition-id": 1})


def config_of(**changes: Any) -> RunConfig:
    """Return settings of a short run: 2 epochs of 4 rounds of 320 samples."""
    settings: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 32,
        "local_steps_fast": 8,
        "local_steps_slow": 2,
        "threads": 1,
    }
    return RunConfig(**(settings | changes))


def node_of(config: RunConfig, node_config: dict[str, Any]) -> Handler:
    """Return a SuperNode: its state outlives a message, and nothing else does."""
    state = RecordDict()

    def handle(message: Message, node_id: int) -> Message:
        context = Context(
            1,
            node_id,
            {"device": f"cpu:{CORE}", **node_config},
            state,
            config.to_run_config(),
        )
        return client_app(message, context)

    return handle


def grid_of(config: RunConfig, nodes: tuple[dict[str, Any], ...] = NODES) -> InProcessGrid:
    return InProcessGrid({50 + i: node_of(config, node) for i, node in enumerate(nodes)})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(config: RunConfig, grid: InProcessGrid | None = None) -> RunRecorder:
    return train_on(grid or grid_of(config), config)


@pytest.mark.pictures
def test_run_leaves_a_complete_folder(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(name="digits", epochs=6, learning_rate=0.1)
    report = run(config)
    folder = report.folder.path
    assert folder.name == "digits-1"
    assert (folder.parent / "latest").resolve() == folder
    assert {path.name for path in folder.iterdir()} >= {
        *("config.toml", "rounds.jsonl", "epochs.csv", "summary.json", "model.safetensors"),
        *("learning_curve.png", "timeline.png"),
    }
    assert not list(folder.glob("*.part"))

    assert tomllib.loads((folder / "config.toml").read_text()) == config.to_run_config()
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    epochs = list(csv.DictReader((folder / "epochs.csv").open()))
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["epoch"] for row in epochs] == ["1", "2", "3", "4", "5", "6"]
    assert summary["rounds"] == len(rounds) == 6 * 1437 // 320
    assert summary["samples"] == len(rounds) * 320
    fast, slow = summary["workers"]
    assert (fast["tier"], fast["local_steps"]) == ("fast", 8)
    assert (slow["tier"], slow["local_steps"]) == ("slow", 2)
    assert fast["weight"] == pytest.approx(0.8)
    assert slow["weight"] == pytest.approx(0.2)
    assert summary["failures"] == []
    assert summary["accuracy"] == float(epochs[-1]["accuracy"]) > 0.9

    # The model in the folder is the one that was measured.
    task = load_task("digits")
    model = task.model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    images, labels = task.test
    with torch.inference_mode():
        right = (model.eval()(images).argmax(1) == labels).float().mean()
    assert float(right) == pytest.approx(summary["accuracy"])

    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("epoch ") for line in printed) == 6
    assert any(str(folder) in line for line in printed)
    assert printed[-3].startswith("slow devices: 20.0% of the samples, ")
    assert printed[-2].startswith("  to compare the accuracy without them: ")
    assert printed[-1].startswith(f"  slow-1 (cpu:{CORE}): best used for ")


def task_of(sizes: list[int], evaluation_batch_size: int = 7) -> Task:
    """Return a task of 60 points, 20 to test on, which notes how many it is tested on at once."""

    def noting(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return correct(outputs, targets)

    named = {"metric": noting, "metric_mode": "max", "metric_name": "accuracy"}
    return points_task(60, 20, 3, evaluation_batch_size=evaluation_batch_size, **named)


@pytest.mark.parametrize("where", ["workers", "server"])
@pytest.mark.parametrize(
    ("of_task", "micro_batch", "expected"),
    [(7, 0, [7, 7, 6]), (0, 0, [16, 4]), (0, 2, [8, 8, 4]), (0, 99, [16, 4])],
)
def test_run_and_its_saved_model_are_evaluated_in_batches_of_the_task_or_of_four_in_training(
    where: str, of_task: int, micro_batch: int, expected: list[int]
) -> None:
    sizes: list[int] = []
    task = task_of(sizes, of_task)
    name = register_task(task, f"batches-{where}-{of_task}-{micro_batch}")
    settings: dict[str, Any] = {"batch_size": 4, "micro_batch_size": micro_batch}
    config = config_of(
        task=name, epochs=1, local_steps_fast=2, evaluate_on=where, out="run", **settings
    )
    report = run(config, grid_of(config))
    assert sizes == [2, *expected]  # the first is the try of two samples before the run
    sizes.clear()
    evaluation = evaluate_run("run", task, device="cpu")
    assert sizes == expected
    assert evaluation.accuracy == report.summary["accuracy"]


def test_run_given_its_task_looks_none_up_and_compares_data_and_model_with_the_workers() -> None:
    """What another thread registers under the same name is what the workers here find."""
    own = task_of([])
    inputs, labels = own.test
    register_task(replace(own, test=(inputs, 1 - labels)))
    config = config_of(
        task="given-in-python", epochs=1, batch_size=5, local_steps_fast=2, evaluate_on="server"
    )
    summary = train_on(grid_of(config), config, task=own).summary
    assert summary["accuracy"] == evaluate_run("runs/latest", own, device="cpu").accuracy > 0.5
    other = replace(own, train=(own.train[0] + 1, own.train[1]))
    line = refusal(train_on, grid_of(config), config, task=other)
    assert line.startswith(
        f"worker fast-0 (cpu:{CORE}) has different training data than the server"
    )
    other = replace(own, model=lambda: nn.Linear(3, 3))
    line = refusal(train_on, grid_of(config), config, task=other)
    assert line.startswith(
        f"worker fast-0 (cpu:{CORE}) has a different model or different frozen weights than the "
        "server; create it alike"
    )


@pytest.mark.parametrize(("where", "used"), [("workers", ["cpu"]), ("server", ["cpu:0", "cpu"])])
def test_server_evaluates_on_the_cpu_for_a_worker_or_if_its_accelerator_is_full(
    monkeypatch: pytest.MonkeyPatch, where: str, used: list[str]
) -> None:
    devices: list[str] = []
    evaluate = Task.evaluate

    def with_little_memory(task: Task, model: nn.Module, device: str, *more: Any, **settings: Any):
        devices.append(device)
        if device != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(task, model, device, *more, **settings)

    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(Task, "evaluate", with_little_memory)
    monkeypatch.setattr("flower_blsgd.workload.this_machine", lambda: Machine((CORE,), ("cpu:0",)))
    config = config_of(task="given-in-python", evaluate_on=where)
    work, _ = workload_of_task(InProcessGrid({}), config, task_of([]))
    with captured_log() as log:
        whole, half = (work.evaluate_slice(work.arrays, 0, last) for last in (20, 14))
    assert devices == [*used, "cpu"]
    assert len(log.warnings) == len(emptied) == len(used) - 1
    assert (whole.last, whole.loss_sums[:2]) == (20, half.loss_sums)


def test_runs_in_two_threads_have_their_own_warnings() -> None:
    logger, barrier = logging.getLogger("flower_blsgd"), threading.Barrier(2, timeout=60)

    def train(name: str) -> str:
        config = config_of(name=name, epochs=1, local_steps_fast=40, evaluate_on="server")
        seen: list[RoundRecord] = []

        def warn(record: RoundRecord) -> None:
            if not seen:
                barrier.wait()
                logger.warning("warning of %s", name)
                barrier.wait()
            seen.append(record)

        view = ProgressView(Budget.of_run(config), Console(quiet=True), on_round_end=warn)
        folder = train_on(grid_of(config), config, view, load_task("digits")).folder.path
        return (folder / "run.log").read_text()

    with ThreadPoolExecutor() as pool:
        logs = list(pool.map(train, ("one", "two")))
    for name, log in zip(("one", "two"), logs, strict=True):
        assert [line.split()[1:] for line in log.splitlines() if "warning of" in line] == [
            ["warning", "of", name]
        ]


def test_run_draws_nothing_from_the_callers_generator() -> None:
    def of_its_own(node: Handler) -> Handler:
        def handle(message: Message, node_id: int) -> Message:
            with torch.random.fork_rng(devices=[]):  # as in a process of its own
                return node(message, node_id)

        return handle

    config = config_of(epochs=1, evaluate_on="server")
    nodes = {50 + i: of_its_own(node_of(config, node)) for i, node in enumerate(NODES)}
    before = torch.random.get_rng_state()
    run(config, InProcessGrid(nodes))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("cores", [2, 3])
def test_run_on_the_workers_that_auto_names_on_a_machine_with_one_accelerator(cores: int) -> None:
    """With two cores it trains alone; with a third one the CPU evaluates."""
    workers = parse_workers("auto", Machine(tuple(range(cores)), ("cuda:0",)))
    check_workers(RunConfig(), workers, 1437)
    here = {"device": f"cpu:{CORE}"}
    nodes = tuple({**w.to_node_config(), **here, "partition-id": i} for i, w in enumerate(workers))
    config = config_of(epochs=1, min_workers=len(nodes))
    report = run(config, grid_of(config, nodes))
    assert [worker["tier"] for worker in report.summary["workers"]] == ["fast"]
    assert report.summary["accuracy"] > 0.5


# --- budgets, clocks, and what was expected


def given(**seconds: float) -> tuple[dict[str, Any], ...]:
    return (
        {**NODES[0], "seconds-per-step": seconds["fast"]},
        {**NODES[1], "seconds-per-step": seconds["slow"]},
    )


def test_run_summary_holds_what_was_expected_beside_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """8 steps of 0.5 s and 2 of 1.5 s, and 4 or 5 rounds of 320 samples in an epoch."""
    config = config_of()
    summary = run(config, grid_of(config, given(fast=0.5, slow=1.5))).summary
    assert f"slow-1 (cpu:{CORE}): 1.5 s a step given, gamma 0.33" in capsys.readouterr().out
    expected, measured = summary["predicted"], summary["measured"]
    assert expected == {
        "clock": "wall",
        "round_seconds": 4.0,
        "epoch_seconds": pytest.approx(4.0 * 1437 / 320),
        "fast_waiting_share": 0.0,
        "slow_waiting_share": 0.25,
    }
    assert list(measured) == list(expected)
    assert measured["clock"] == "wall"
    assert measured["round_seconds"] == pytest.approx(summary["training_seconds"] / 8)
    assert measured["epoch_seconds"] == pytest.approx(summary["training_seconds"] / 2)
    assert measured["fast_waiting_share"] == summary["fast_waiting_share"]


def test_run_on_the_device_clock_ends_after_that_many_device_seconds() -> None:
    """Rounds of 8 x 0.5 s alone, and a little transfer: 11 s are over in the third."""
    config = config_of(clock="device", seconds=11.0, epochs=99)
    summary = run(config, grid_of(config, given(fast=0.5, slow=1.5))).summary
    assert summary["rounds"] == 3
    assert 12.0 <= summary["device_seconds"] < 12.0 + summary["training_seconds"]  # transfer
    assert summary["training_seconds"] < 9.0
    assert (summary["predicted"]["clock"], summary["measured"]["clock"]) == ("device", "device")
    assert summary["measured"]["round_seconds"] == pytest.approx(summary["device_seconds"] / 3)
    assert summary["slow_waiting_share"] == pytest.approx(0.25, abs=0.02)


def test_run_seconds_budget_ends_a_run_in_mid_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(seconds=1e-6, epochs=99)
    summary = run(config).summary
    assert summary["rounds"] == 1
    assert summary["epochs"] == 1  # the part of one, with its evaluation
    assert summary["accuracy"] is not None
    assert "1e-06 seconds of training, or 99 epochs" in capsys.readouterr().out


# --- workers that fail


def test_run_goes_on_without_a_worker_that_raised(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of()
    grid = grid_of(config)
    grid.fail_at(1, 2, "raises")
    with captured_log() as log:
        server_app(grid, Context(1, 1, {}, RecordDict(), config.to_run_config()))
    summary = json.loads((Path("runs") / "digits-1" / "summary.json").read_text())
    assert summary["rounds"] > 4
    assert summary["failures"] == [
        {
            "round": 2,
            "worker": f"slow-1 (cpu:{CORE})",
            "kind": "raised",
            "reason": "RuntimeError: the fan stands still",
        }
    ]
    assert summary["failures_by_worker"] == {f"slow-1 (cpu:{CORE})": {"raised": 1}}
    assert f"\nfailures: slow-1 (cpu:{CORE}) raised 1\n" in capsys.readouterr().out
    text = "\n".join(log.lines())
    assert text.count("Traceback") == 1
    assert f"slow-1 (cpu:{CORE})" in text


# --- SuperNodes name their devices themselves


def test_run_is_refused_where_a_card_lacks_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Accelerator("Tesla T4", capability=(7, 5))
    monkeypatch.setattr("flower_blsgd.worker.step.accelerator_of", lambda device: card)
    workers = [WorkerSpec("cpu"), WorkerSpec("cuda:0")]
    with pytest.raises(UsageError, match=r"cuda:0 \(Tesla T4, 7.5\) does not have it"):
        check_workers(config_of(precision="bfloat16"), workers, 1437)
    mixed = [WorkerSpec("cpu"), WorkerSpec("cuda:0", precision="float16")]
    check_workers(config_of(precision="bfloat16"), mixed, 1437)


@pytest.mark.parametrize(
    ("precision", "workers", "cards"),
    [
        ("float32", "cuda:1; cuda:0; cuda:2; cpu", "cuda:0, cuda:1"),
        ("float32", "cuda:0 precision=tf32; cuda:2; cpu", ""),
        ("bfloat16", "cuda:0 role=evaluate precision=float32; cuda:1", ""),
        ("bfloat16", "2x cuda:0 precision=float32; cuda:1", "cuda:0"),
        ("ieee", "cuda:0; cuda:1", ""),
    ],
)
def test_run_names_cards_that_could_train_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, precision: str, workers: str, cards: str
) -> None:
    capabilities = {"cuda:0": (9, 0), "cuda:1": (8, 0), "cuda:2": (7, 5)}
    monkeypatch.setattr(
        "flower_blsgd.run.accelerator_of",
        lambda device: Accelerator(device, capability=capabilities[device]),
    )
    specs = parse_workers(workers, Machine((0,), tuple(capabilities)))
    note = precision_note(precision, specs)
    assert note.startswith(f"note: {cards} can train in bfloat16") if cards else note == ""


def test_run_config_workers_are_ignored_with_one_line_where_nodes_name_their_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def would_wait(seconds: float) -> None:
        raise AssertionError("the run waits for workers that the run config names")

    monkeypatch.setattr("flower_blsgd.strategy.connector.time.sleep", would_wait)
    for workers, lines in (("8x cuda:0-7 fast", 1), (f"cpu:{CORE} slow; cpu:{CORE} fast", 0)):
        report = run(config_of(epochs=1, workers=workers))
        assert len(report.summary["workers"]) == 2
        assert capsys.readouterr().out.count("is ignored: SuperNodes name") == lines


# --- refused before the first message, with nothing written


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": "digit"}, "did you mean digits"),
        ({"batch_size": 1438}, "1437 samples; use a smaller batch"),
        ({"out": "there"}, "out = 'there' exists"),
        ({"trace": True}, "trace = true: .* on the local grid only; use blsgd run"),
        ({"algorithm": "byteps"}, r'\(byteps\): .* only the local grid has; .*train-on = "fast"'),
    ],
)
def test_refused_before_the_first_message(changes: dict[str, Any], reason: str) -> None:
    Path("there").mkdir()
    config = config_of(**changes)
    grid = grid_of(config)
    with pytest.raises(UsageError, match=reason):
        run(config, grid)
    assert grid.sent == []
    assert [path.name for path in Path.cwd().iterdir()] == ["there"]


def test_refused_where_memory_is_short_of_the_shared_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """605,224 bytes of model: one and its momentum for each of 3 workers, and two, is 4.84 MB."""
    monkeypatch.setattr("flower_blsgd.devices.machine.free_bytes", lambda: 3_100_000)
    config = config_of(workers="2x cpu fast; 1x cpu slow")
    app = built_in_app()
    grid = LocalGrid(
        parse_workers(config.workers), app.client_app, app.path, config.to_run_config()
    )
    reason = r"sharing the model \(605\.2 kB\) with 3 workers needs 4\.8 MB, .* fewer workers"
    with grid, pytest.raises(UsageError, match=reason):
        train_on(grid, config)
    assert process_ids(grid) == {}
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("key", ["epocs", "threads"])
def test_refused_by_the_apps_themselves(key: str) -> None:
    """Flower's own engines know nothing of our command line."""
    settings = {**config_of().to_run_config(), key: "x"}
    context = Context(1, 1, {}, RecordDict(), settings)
    with pytest.raises(UsageError, match=f"{key} = 'x'"):
        server_app(grid_of(config_of()), context)


# --- the local grid of the settings

BOTH = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow slowdown=4"


def test_local_grid_has_the_workers_of_the_settings() -> None:
    with make_local_grid(RunConfig(workers=BOTH)) as grid:
        assert list(grid.workers) == parse_workers(BOTH)
        assert process_ids(grid) == {}
    others = [WorkerSpec("cpu", (CORE,))]  # given ones are used as they are
    with make_local_grid(RunConfig(workers=BOTH), workers=others) as grid:
        assert list(grid.workers) == others
    with pytest.raises(UsageError, match="device cuda:99 is not available"):
        make_local_grid(RunConfig(workers="1x cuda:99 fast"))
