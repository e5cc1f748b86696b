"""`load` and `evaluate_run`: the model of a run, and its accuracy on the whole test set."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

from flower_blsgd import Task, evaluate_run, load
from flower_blsgd.cli.main import main
from flower_blsgd.config import RunConfig
from flower_blsgd.models.resnets import resnet8
from flower_blsgd.results.folder import read_config
from flower_blsgd.tasks import load_task
from flower_blsgd.tasks.digits import small_cnn
from flower_blsgd.tasks.images import BENCHMARKS

from .cli.conftest import contents
from .refusal import refusal
from .test_run import config_of, run

SAVED = """
from pathlib import Path

import torch
from flower_blsgd import Task

CALLS = []


def task(data, model):
    CALLS.append((data, model))
    classes = int((Path(data) / "classes.txt").read_text())
    torch.rand(1)  # draws from everybody's generator
    inputs = torch.eye(4)
    return Task(
        model=lambda: torch.nn.Linear(4, classes, bias=model != "plain"),
        train=(inputs, torch.zeros(4).long()),
        test=(inputs, torch.tensor([0, 1, 1, 1])),
    )
"""


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_blsgd.devices.machine._accelerators", lambda: ())


def saved(folder: Path, network: nn.Module, /, **settings: Any) -> Path:
    """Write what `load` needs of a run."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(RunConfig(**settings).to_run_config()))
    save_file(network.state_dict(), folder / "model.safetensors")
    return folder


def same(model: nn.Module, other: nn.Module) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize(
    ("task", "name", "classes"),
    [
        ("digits", "cnn-batchnorm", 10),
        ("cifar100", "wrn-10-1", 100),  # wider than its last layer: 64
        ("images", "shufflenet_v2_x0_5", 200),
    ],
)
def test_load_needs_no_data_and_knows_the_number_of_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, name: str, classes: int
) -> None:
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "no-cache"))
    model = (
        small_cnn(batch_norm=bool(name))
        if task == "digits"
        else BENCHMARKS[task].maker(name)(classes, False)
    )
    folder = saved(tmp_path / "run", model, task=task, model=name, data="/gone/for/good")
    loaded = load(folder)
    assert same(loaded, model)
    assert not loaded.training
    assert not (tmp_path / "no-cache").exists()
    if task != "digits":
        assert loaded(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape == (1, classes)


def test_load_leaves_the_random_numbers_alone(tmp_path: Path, own: Callable[..., Path]) -> None:
    digits = saved(tmp_path / "digits", small_cnn())
    for arguments in ((digits,), (own(3),), (digits, load_task("digits"))):
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        load(*arguments)
        assert torch.equal(torch.random.get_rng_state(), before)


def test_load_task_of_an_object(tmp_path: Path, cpu_only: None) -> None:
    data = (torch.eye(4), torch.tensor([0, 1, 1, 1]))
    task = Task(model=lambda: nn.Linear(4, 2), train=data, test=data)
    model = nn.Linear(4, 2)
    folder = saved(tmp_path / "run", model, task="given-in-python")
    assert same(load(folder, task), model)
    for function in (load, evaluate_run):
        assert "task was given as an object" in refusal(function, folder)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 1.0]))  # says 1 to everything
    save_file(model.state_dict(), folder / "model.safetensors")
    result = evaluate_run(folder, task)
    assert (result.accuracy, result.num_examples, result.device) == (0.75, 4, "cpu")
    # -log softmax([0, 1]): 1.3133 for class 0 and 0.3133 for class 1
    assert result.loss == pytest.approx((1.313262 + 3 * 0.313262) / 4, abs=1e-6)


def test_run_of_0_1_0_whose_steps_were_by_speed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", small_cnn())
    file = folder / "config.toml"
    file.write_text(file.read_text().replace('steps = ""', 'steps = "by-speed"'))
    assert 'steps = "by-speed"' in file.read_text()
    assert read_config(folder) == RunConfig(steps="system-aware")


def test_evaluation_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes are spawned (macOS), it would run the caller's script again."""

    def start(*_: object) -> None:
        raise AssertionError("read_ahead was called")

    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 65  # two batches

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(4), index % 2

    monkeypatch.setattr("flower_blsgd.worker.batches.read_ahead", start)
    task = Task(model=lambda: nn.Linear(4, 2), train=Numbers(), test=Numbers())
    settings = {"task": "given-in-python", "loader_workers": 2}
    folder = saved(tmp_path / "run", task.model(), **settings)
    assert evaluate_run(folder, task, device="cpu").num_examples == 65


# --- a task of one's own ----------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that leaves a run of a task in the current folder, with its data."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "own_saved_task.py").write_text(SAVED)
    monkeypatch.chdir(here)
    monkeypatch.delitem(sys.modules, "own_saved_task", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])

    def make(classes: int, model: str = "", data: str = "mine") -> Path:
        (here / data).mkdir()
        (here / data / "classes.txt").write_text(str(classes))
        network = nn.Linear(4, classes, bias=model != "plain")
        with torch.no_grad():
            network.weight.zero_()
            network.weight[1] = 1.0  # says 1 to everything
            if network.bias is not None:
                network.bias.zero_()
        settings = {"task": "own_saved_task:task", "data": data, "model": model}
        return saved(tmp_path / "runs" / data, network, **settings)

    return make


def test_own_task_is_made_with_its_data_and_model_also_where_the_data_moved(
    own: Callable[..., Path],
) -> None:
    folder = own(3, model="plain")
    model = load(folder)
    assert model.weight.tolist() == [[0.0] * 4, [1.0] * 4, [0.0] * 4]
    assert model.bias is None
    assert not model.training
    result = evaluate_run(folder)
    assert (result.accuracy, result.num_examples) == (0.75, 4)
    shutil.move("mine", "moved")
    assert load(folder, data="moved").weight.shape == (3, 4)
    assert evaluate_run(folder, data="moved").accuracy == 0.75
    calls = [("mine", "plain")] * 2 + [("moved", "plain")] * 2  # made once each time
    assert calls == sys.modules["own_saved_task"].CALLS
    data = (torch.eye(4), torch.zeros(4).long())
    task = Task(model=lambda: nn.Linear(4, 3), train=data, test=data)
    for function in (load, evaluate_run):
        line = refusal(function, folder, task, data="moved")
        assert line.startswith("data = 'moved': the given task has its own data")


# --- evaluate ---------------------------------------------------------------------------------


def test_evaluate_is_of_the_test_set_also_after_a_validation_share(
    tmp_path: Path,
) -> None:
    """287 of 1,437 samples were held out: 0.2 x 1437 = 287.4."""
    folder = tmp_path / "run"
    summary = run(config_of(validation_share=0.2, epochs=1, out=str(folder))).summary
    held_out = load_task("digits", validation_share=0.2, seed=0)
    assert held_out.num_test == 287
    right = summary["accuracy"] * 287
    assert right == pytest.approx(round(right))
    before = contents(folder)
    result = evaluate_run(folder)
    assert result.num_examples == 360
    images, labels = load_task("digits").test
    with torch.inference_mode():
        hits = int((load(folder)(images).argmax(1) == labels).sum())
    assert result.accuracy == pytest.approx(hits / 360)
    assert contents(folder) == before


# --- saved runs that are refused ---------------------------------------------------------------


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _other_model(folder: Path) -> None:
    save_file(resnet8().state_dict(), folder / "model.safetensors")


def _other_setting(folder: Path) -> None:
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text + "epochz = 3\n")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no settings": (lambda run: (run / "config.toml").unlink(), "has no config.toml"),
    "no model": (lambda run: (run / "model.safetensors").unlink(), "contains no model"),
    "cut off": (_truncate, "model.safetensors cannot be read"),
    "another model": (_other_model, "the saved model does not fit its task"),
    "of another version": (_other_setting, "epochz = 3: unknown key; did you mean epoch or epochs"),
}


@pytest.fixture
def not_evaluated(cpu_only: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs ``blsgd evaluate`` and returns the line that refuses it."""

    def evaluate(*arguments: object) -> str:
        assert main(["evaluate", *map(str, arguments)]) == 2
        line = capsys.readouterr().err
        assert line.startswith("blsgd: ")
        assert line.count("\n") == 1
        return line

    return evaluate


@pytest.mark.parametrize("what", BROKEN)
def test_broken_run_is_refused_in_one_line(
    tmp_path: Path, not_evaluated: Callable[..., str], what: str
) -> None:
    folder = saved(tmp_path / "run", small_cnn())
    break_it, expected = BROKEN[what]
    break_it(folder)
    line = not_evaluated(folder)
    assert expected in line
    assert str(folder) in line
    assert refusal(load, folder) in line


def test_device_or_data_not_there_and_a_task_that_is_gone_are_refused(
    tmp_path: Path, not_evaluated: Callable[..., str]
) -> None:
    folder = saved(tmp_path / "run", small_cnn())
    for device in ("cuda:0", "gpu", "cpu:0", ":"):
        expected = f"device = {device!r} not found; this machine has cpu"
        assert expected in not_evaluated(folder, "--device", device)
    assert "data = '/nowhere'" in not_evaluated(folder, "--data", "/nowhere")
    gone = saved(tmp_path / "gone", nn.Linear(4, 2), task="no_module_of_this_name:task")
    assert "no_module_of_this_name" in not_evaluated(gone)
