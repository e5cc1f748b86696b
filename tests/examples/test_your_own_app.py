"""examples/your_own_app: the printed difference is the real one, and every engine runs both."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flower_blsgd.runtime.machine import usable_cores

from . import diff_of_apps
from .commands import EXAMPLES, ROOT, accuracies, run

APPS = EXAMPLES / "your_own_app"
FIRST, LAST = usable_cores()[0], usable_cores()[-1]
LEARNED = 80.0
"""Percent; ten classes, so an untrained model has about 10."""

NODES = (
    "--node",
    f"device='cpu:{FIRST}' tier='fast' partition-id=0 num-partitions=2",
    "--node",
    f"device='cpu:{LAST}' tier='slow' partition-id=1 num-partitions=2",
)


def assert_learned(told: str, rounds: int) -> None:
    found = accuracies(told)
    assert list(found) == [f"round {number}" for number in range(rounds + 1)]
    assert found["round 0"] < 40
    assert found[f"round {rounds}"] > LEARNED


def test_readme_prints_the_real_difference() -> None:
    real = diff_of_apps.real_diff()
    assert diff_of_apps.printed_diff() == real, "run python -m tests.examples.diff_of_apps"
    readme = diff_of_apps.README.read_text()
    new, old = diff_of_apps.count(real, "+"), diff_of_apps.count(real, "-")
    assert f"{new} lines are new and {old} old ones go" in readme
    assert new <= 20


def test_diff_counts_lines() -> None:
    diff = "--- before/a\n+++ after/a\n@@\n same\n-old\n+new\n+newer\n"
    assert (diff_of_apps.count(diff, "+"), diff_of_apps.count(diff, "-")) == (2, 1)


def test_model_and_data_stay_as_they_are() -> None:
    files = [APPS / app / "own_digits" / "task.py" for app in ("before", "after")]
    assert files[0].read_text() == files[1].read_text()


def test_all_examples_are_clean() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [ruff, *check, "--no-cache", EXAMPLES], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("app", ["before", "after"])
def test_local_grid(app: str) -> None:
    workers = f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow"
    told = run("-m", "flower_blsgd", "run", APPS / app, "--workers", workers)
    assert "running own-digits from" in told
    assert_learned(told, 5)


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_simulation() -> None:
    pytest.importorskip("ray")
    app = ["--app", APPS / "after", "-c", "num-server-rounds=3"]
    assert_learned(run("scripts/flower_engine.py", "simulation", *app), 3)


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_deployment_with_the_stream() -> None:
    app = ["--app", APPS / "after", "-c", "num-server-rounds=5"]
    told = run("scripts/flower_engine.py", "deployment", *app, *NODES)
    assert_learned(told, 5)
    assert "plain messages" not in told


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_deployment_with_messages() -> None:
    settings = "num-server-rounds=1 transport='messages'"
    app = ["--app", APPS / "after", "-c", settings]
    assert_learned(run("scripts/flower_engine.py", "deployment", *app, *NODES), 1)


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_two_lines_bring_the_fedavg_app_onto_the_stream(tmp_path: Path) -> None:
    """Five rounds of plain messages would take half a minute."""
    app = tmp_path / "before"
    shutil.copytree(APPS / "before", app, ignore=shutil.ignore_patterns("__pycache__"))
    client, server = app / "own_digits" / "client_app.py", app / "own_digits" / "server_app.py"
    change(client, "app = ClientApp()\n", "app = ClientApp()\nflower_blsgd.serve_sessions(app)\n")
    change(
        server,
        "    strategy.start(grid,",
        "    with flower_blsgd.stream(grid, context) as fast:\n        strategy.start(fast,",
    )
    for file in (client, server):
        change(file, "\nfrom flwr.app", "\nimport flower_blsgd\nfrom flwr.app")
    told = run("scripts/flower_engine.py", "deployment", "--app", app, *NODES)
    assert_learned(told, 5)
    assert "plain messages" not in told


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_readme_names_commands_that_are_there() -> None:
    readme = diff_of_apps.README.read_text()
    for command in ("blsgd run after", "flwr run after", "flower-supernode", "flower-superlink"):
        assert command in readme
    assert (ROOT / "scripts" / "flower_engine.py").is_file()
