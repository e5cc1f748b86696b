"""Tasks: made, tried, split for validation, loaded by name and prepared."""

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd import LocalSGD, Task
from flower_blsgd.cli import main as cli
from flower_blsgd.config import RunConfig
from flower_blsgd.data.libraries import import_torchvision
from flower_blsgd.errors import UsageError
from flower_blsgd.models import pretrained, vision
from flower_blsgd.protocol import EvaluateReport
from flower_blsgd.tasks import by_name, load_task, register_task
from flower_blsgd.tasks.by_name import check_weights, prepare_task, registration
from flower_blsgd.tasks.check import check_task
from flower_blsgd.tasks.task import correct, with_validation
from flower_blsgd.worker.model_io import check_model
from flower_blsgd.workload import workload_of_task

from ..in_process_grid import InProcessGrid
from ..log_capture import captured_log
from ..refusal import refusal

INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Pairs(Dataset):
    def __init__(self, count: int = 6) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert isinstance(index, int)
        return INPUTS[index], int(TARGETS[index])


class Dicts(Pairs):
    def __getitem__(self, index: int) -> Any:
        return dict(zip(("inputs", "labels"), super().__getitem__(index), strict=True))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())


def task_of(train: object = (INPUTS, TARGETS), **settings: Any) -> Task:
    test = (INPUTS[:2], TARGETS[:2])
    return Task(**{"model": network, "train": train, "test": test} | settings)


def test_correct_by_hand() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 5.0]])
    assert correct(outputs, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]


def states_differ(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return any(not torch.equal(tensor, theirs[n]) for n, tensor in one.state_dict().items())


@pytest.mark.parametrize("pretrained", [False, True])
def test_initial_model_is_a_function_of_the_seed(pretrained: bool) -> None:
    calls: list[nn.Module] = []

    def begin(model: nn.Module) -> None:
        calls.append(model)
        nn.init.normal_(model[0].weight)  # as for a last layer that is new
        nn.init.constant_(model[0].bias, 7.0)

    task = task_of(pretrained=begin if pretrained else None)
    fresh = task.fresh_model(3)
    assert calls == []
    state = torch.get_rng_state()
    first = task.initial_model(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == ([first] if pretrained else [])
    assert states_differ(first, fresh) == pretrained
    torch.rand(5)
    assert not states_differ(first, task.initial_model(3))
    assert states_differ(first, task.initial_model(4))


def test_fingerprint(tmp_path: Path) -> None:
    """Of equal data equal, whatever they lie in; of a map-style Dataset, for equal lengths."""
    expected = task_of().fingerprint()
    assert len(expected) == 16
    assert int(expected, 16) >= 0
    np.save(tmp_path / "inputs.npy", INPUTS.numpy())
    for inputs in (
        INPUTS.clone(),
        INPUTS.t().contiguous().t(),  # the same numbers, laid out otherwise
        INPUTS.numpy(),
        np.load(tmp_path / "inputs.npy", mmap_mode="c"),
    ):
        for targets in (TARGETS, TARGETS.numpy()):
            assert task_of((inputs, targets)).fingerprint() == expected
    assert task_of(TensorDataset(INPUTS, TARGETS)).fingerprint() == expected
    assert task_of(Pairs(9)).fingerprint() == task_of(Pairs(9)).fingerprint()
    assert task_of(data_fingerprint="abc").fingerprint() == "abc"
    others = [
        task_of(parts).fingerprint()
        for parts in (
            (INPUTS + 1, TARGETS),
            (INPUTS, TARGETS.flip(0)),
            (INPUTS[:5], TARGETS[:5]),
            (INPUTS.double(), TARGETS),
            (INPUTS.bfloat16(), TARGETS),  # a type that numpy lacks
            (INPUTS.reshape(6, 1, 2), TARGETS),
            Pairs(9),
            Pairs(8),
        )
    ]
    assert len({expected, *others}) == 9


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ((INPUTS, TARGETS[:5]), "its parts have the lengths [6, 5]"),
        (Pairs(0), "it is empty"),
        ((INPUTS, TARGETS, TARGETS), "its parts have the lengths [6, 6, 6]"),
        (iter([]), "has no len()"),
    ],
)
@pytest.mark.parametrize("name", ["train", "test"])
def test_task_refuses_wrong_data(name: str, part: object, found: str) -> None:
    data = {"train": (INPUTS, TARGETS), "test": (INPUTS, TARGETS)} | {name: part}
    message = refusal(lambda: Task(model=nn.Identity, **data))
    assert message.startswith(f"task: {name} must be a pair (inputs, targets) of")
    assert message.endswith(found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": nn.Linear(2, 3)}, "model is a Linear, but must be a function that returns"),
        ({"evaluation_batch_size": -1}, "evaluation_batch_size is -1"),
        ({"metric": len}, "metric_mode is '', but a custom metric needs 'max' if larger values"),
        ({"metric": len, "metric_mode": "low"}, "metric_mode is 'low', but a custom metric needs"),
        (
            {"metric": len, "metric_mode": "min", "metric_name": "loss"},
            "metric_name is 'loss', the name of the loss",
        ),
    ],
)
def test_task_refuses_wrong_settings(settings: dict[str, object], message: str) -> None:
    assert refusal(task_of, **settings).startswith(f"task: {message}")


# trying a task


def raising(*_: object) -> Tensor:
    raise TypeError("first line\nsecond   line")


@pytest.mark.parametrize(
    "train",
    [
        (INPUTS, TARGETS),
        (INPUTS.numpy(), TARGETS),
        Pairs(),
        (INPUTS[:1], TARGETS[:1]),
    ],
    ids=["tensors", "arrays", "Dataset", "single"],
)
def test_check_lets_a_good_task_pass(train: object) -> None:
    """Without its pretrained weights; data and torch's random numbers stay as they are."""
    state = torch.get_rng_state()
    check_task(task_of(train, augment=lambda inputs, generator: inputs.add_(1), pretrained=raising))
    assert torch.equal(INPUTS, torch.arange(12.0).reshape(6, 2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": nn.functional.cross_entropy},
            "loss(outputs, targets) returned shape () for 2 samples, expected shape (2,): one "
            'value per sample; for a torch loss, set reduction="none"',
        ),
        (
            {"metric": lambda o, t: o.mean(), "metric_mode": "max"},
            "metric(outputs, targets) of test returned shape ()",
        ),
        ({"test": (INPUTS[:, :1], TARGETS)}, "model(inputs) of test raised RuntimeError: mat1"),
        ({"augment": lambda x, g: x[:1]}, "augment(inputs, generator) returned shape (1, 2), exp"),
        (
            {"augment": lambda x, g: x.add(1), "train": Dicts()},
            "augment(inputs, generator) of inputs that are a dict raised AttributeError: 'dict'",
        ),
        ({"augment": lambda x, g: x[:, :1]}, "model(augment(inputs, generator)) raised Runtime"),
        ({"model": lambda: nn.Linear(3, 3)}, "model(inputs) raised RuntimeError"),
        ({"model": lambda: "net"}, "model() returned a str, expected a torch.nn.Module"),
        ({"loss": raising}, "loss(outputs, targets) raised TypeError: first line second line"),
    ],
)
def test_check_names_the_function(settings: dict[str, object], message: str) -> None:
    found = refusal(check_task, task_of(**settings), "own:task")
    assert found.startswith(f"task = 'own:task': {message}")


class WithState(torch.optim.SGD):
    """Keeps what is given, by a key, in its first step."""

    def __init__(self, model: nn.Module, key: Any, value: object) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self._key, self._value = key, value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[self._key or parameter]["kept"] = self._value


class Wrapped(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "slow": {}}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda m: WithState(m, None, "warm"), "the state 'kept' of WithState is a str; only"),
        (lambda m: WithState(m, None, [1]), "the state 'kept' of WithState is a list; only"),
        (lambda m: WithState(m, m[0], 1), "WithState has state that is of no parameter"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "optimizer: LBFGS computes curvature from"),
        (lambda m: Wrapped(m.parameters()), "optimizer: state_dict() of Wrapped has no 'param_gr"),
    ],
)
def test_optimizers_whose_state_cannot_be_kept_are_refused(make: Any, told: str) -> None:
    assert refusal(check_task, task_of(optimizer=make)).startswith(told)


def test_optimizers_of_any_state_per_parameter_pass() -> None:
    check_task(task_of(optimizer=lambda m: torch.optim.Adafactor(m.parameters())))
    check_task(task_of(optimizer=lambda m: WithState(m, None, 0.5)))


def refusing(*_: object) -> Tensor:
    raise UsageError("data = '/nowhere': no such folder; name another")


def test_pretrained_weights_that_raise_are_told_in_one_line() -> None:
    assert refusal(task_of(pretrained=raising).initial_model, 0) == (
        "task: pretrained(model) raised TypeError: first line second line"
    )
    assert refusal(check_task, task_of(loss=refusing)).startswith("data = '/nowhere': no such fol")


def with_buffer(buffer: Tensor) -> nn.Module:
    model = network()
    model.register_buffer("extra", buffer)
    return model


REFUSED = "'extra' cannot be sent and saved"


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Linear(2, 3).to(torch.float8_e4m3fn), "'weight' cannot be sent and saved (Got"),
        (lambda: with_buffer(torch.ones(2, dtype=torch.complex128)), f"{REFUSED} (Unknown dtype"),
        (lambda: with_buffer(torch.eye(2).to_sparse()), f"{REFUSED} ("),
        (lambda: with_buffer(torch.eye(2).long().to_sparse()), f"{REFUSED} ("),
        (lambda: with_buffer(torch.ones(2, device="meta")), f"{REFUSED} ("),
        (lambda: with_buffer(torch.ones(1).expand(2, 3)), "'extra' is expanded, so its elements"),
        (lambda: nn.LazyLinear(3), "'weight' has no shape yet"),
        (lambda: Extra(2, 3), "'_extra_state' comes from get_extra_state"),
        (lambda: nn.Linear(2, 3).requires_grad_(False), "no parameter has requires_grad = True"),
        (nn.Flatten, "no parameter has requires_grad = True"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    make: Callable[[], nn.Module], told: str
) -> None:
    assert refusal(check_task, task_of(model=make)).startswith(f"model: {told}")
    assert refusal(LocalSGD, make(), (INPUTS, TARGETS)).startswith(f"model: {told}")


def test_only_what_can_be_neither_saved_nor_compared_is_refused() -> None:
    """Frozen weights may have any type; what is not in the state dict may be anything."""
    model = with_buffer(torch.ones(2, dtype=torch.complex64))
    model.register_buffer("table", torch.ones(1).long().expand(3))
    model.register_buffer("scratch", torch.eye(2).to_sparse(), persistent=False)
    model.base = nn.Linear(2, 2).requires_grad_(False).to(torch.float8_e4m3fn)
    check_model(model, values=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_values_that_are_not_finite_are_refused_before_a_run(dtype: torch.dtype) -> None:
    config = RunConfig(task="own", epochs=1)

    def prepare(make: Callable[[], nn.Module], **settings: Any) -> object:
        return workload_of_task(InProcessGrid({}), config, task_of(model=make, **settings))

    mask = torch.tensor([0.0, -torch.inf]).to(dtype)
    said = refusal(prepare, lambda: with_buffer(mask))
    assert said.startswith("model: 'extra' has values that are not finite")
    assert said.endswith("for a mask with -inf, use register_buffer(..., persistent=False)")
    assert "not finite" in refusal(prepare, lambda: nn.Sequential(network(), MinMaxObserver()))
    # Pretrained weights replace those of the new model.
    prepare(lambda: with_buffer(mask.clone()), pretrained=lambda model: model.extra.zero_())


def test_arrays_that_torch_cannot_read_are_refused() -> None:
    array = INPUTS.numpy()
    for wrong, told in (
        (array[::-1], "dtype = '<f4' and strides = (-8, 4)"),
        (array.astype(">f4"), "dtype = '>f4' and strides = (8, 4)"),
    ):
        expected = (
            f"data: an array with {told} cannot become a tensor; copy it with np.ascontiguous"
        )
        for use in (task_of, partial(LocalSGD, network())):
            assert refusal(use, (wrong, TARGETS)).startswith(expected)


# validation


def points(count: int) -> Task:
    data = (torch.arange(float(count)), torch.arange(count))
    return Task(model=nn.Identity, train=data, test=(torch.zeros(1), torch.zeros(1)))


@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_both_parts_together_are_the_whole(count: int, share: float, seed: int) -> None:
    held_out = int(np.floor(share * count + 0.5))
    if not 0 < held_out < count:
        return
    task = with_validation(points(count), share, seed)
    assert (task.num_train, task.num_test) == (count - held_out, held_out)
    train, test = task.train.indices, task.test.indices
    assert sorted([*train, *test]) == list(range(count))
    assert list(train) == sorted(train)
    assert list(test) == sorted(test)
    assert train.dtype == test.dtype == np.int64


def test_parts_are_a_function_of_the_seed_alone() -> None:
    first, again = (with_validation(points(100), 0.2, 7) for _ in range(2))
    other = with_validation(points(100), 0.2, 8)
    assert np.array_equal(first.test.indices, again.test.indices)
    assert not np.array_equal(first.test.indices, other.test.indices)
    prints = [(10, 0.2, 0), (10, 0.3, 0), (10, 0.2, 1), (11, 0.2, 0)]
    found = {with_validation(points(n), share, seed).fingerprint() for n, share, seed in prints}
    assert len(found | {points(10).fingerprint()}) == 5
    # As in earlier versions.
    assert list(with_validation(points(10), 0.3, 0).test.indices) == [1, 7, 8]


@pytest.mark.parametrize(
    ("share", "message"),
    [
        *((share, "must be above 0") for share in (0.0, 1.0, -0.1, 1.5, float("nan"))),
        (0.04, "of 10 .* leaves 0 for"),
        (0.96, "of 10 .* leaves 10 for"),
    ],
)
def test_impossible_shares_are_refused(share: float, message: str) -> None:
    with pytest.raises(UsageError, match=f"^validation-share = {share} {message}"):
        with_validation(points(10), share, 0)


# by name

OWN = """
import torch
from flower_blsgd import Task

def plain():
    data = (torch.zeros(1200, 2), torch.zeros(1200).long())
    return Task(model=lambda: torch.nn.Linear(2, 2), train=data, test=data)


def picky(data, model, skip_bad=False):
    task = plain()
    task.model.settings = (data, model, skip_bad)
    return task


def wrong():
    return "a text"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_task_module", raising=False)
    (tmp_path / "own_task_module.py").write_text(OWN)
    return "own_task_module"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(by_name, "_REGISTERED", {})
    task = points(10)
    assert register_task(task) == "given-in-python"
    return task


def test_registered_task(registered: Task) -> None:
    assert load_task("given-in-python") is registered
    part = load_task("given-in-python", validation_share=0.3, seed=5)
    assert part.fingerprint() == with_validation(registered, 0.3, 5).fingerprint()
    other = points(11)
    register_task(other, "digits")  # before the benchmark of that name
    assert load_task("digits") is other
    register_task(registered, "digits")
    assert load_task("digits") is registered


def test_task_of_ones_own(own: str) -> None:
    assert load_task(f"{own}:plain").num_train == 1200
    task = load_task(f"{own}:picky", "folder", "big")
    assert task.model.settings == ("folder", "big", False)  # type: ignore[attr-defined]
    task = load_task(f"{own}:picky", "a", "b", skip_bad=True)
    assert task.model.settings == ("a", "b", True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"data": "here"}, "data = 'here'"), ({"skip_bad": True}, "skip-bad = true")],
)
def test_settings_that_a_task_does_not_take(
    registered: Task, own: str, settings: dict[str, object], message: str
) -> None:
    for name in ("given-in-python", f"{own}:plain"):
        expected = f"{message}: task = '{name}' does not accept it"
        assert refusal(load_task, name, **settings).startswith(expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "did you mean digits?"),
        (
            "zzz",
            "known: ag-news, cifar10, cifar100, digits, flowers102, images, lm, text, "
            "tiny-imagenet",
        ),
        ("no_such_module_here:task", "PYTHONPATH"),
        ("{own}:no_such_task", "no_such_task"),
        ("{own}:wrong", "returned str, not a Task"),
        (".relative:plain", "relative"),
    ],
)
def test_unknown_tasks(own: str, name: str, message: str) -> None:
    name = name.replace("{own}", own)
    found = refusal(load_task, name)
    assert found.startswith(f"task = {name!r}")
    assert message in found


# published weights, looked for before any data are read


def test_weights_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def out_of_reach(model: str, name: str, weights: bool) -> Path:
        asked.append(model)
        raise UsageError(f"model = {model!r}: out of reach")

    monkeypatch.setattr(pretrained, "_downloaded", out_of_reach)
    monkeypatch.setattr(vision, "answers", lambda url: bool(asked.append(url)))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    check_weights("digits")
    monkeypatch.chdir(tmp_path)
    for model in ("encoder", "distilbert-micro"):
        (tmp_path / model).mkdir()  # a folder of the same name is not looked at
        (tmp_path / model / "config.json").touch()
        check_weights("ag-news", model)
    for model in ("wrn-10-1", "resnet8", "resnet20"):
        check_weights("cifar100", model)
    check_weights("cifar100", "vit_b_16", pretrained=False)
    assert asked == []
    assert "out of reach" in refusal(check_weights, "ag-news")
    for task, model, name in (
        ("cifar100", "resnet18", "resnet18"),
        ("tiny-imagenet", "", "vit_b_16"),
    ):
        message = refusal(check_weights, task, model)
        assert message.startswith(
            f"model = {name!r}: its weights cannot be loaded (https://download.py"
        )
        assert message.endswith(
            f"does not answer); give a file, model = {name}:FILE, or set pretrained = false"
        )
    assert len(asked) == 3


# prepared


@pytest.fixture
def images(tmp_path: Path) -> str:
    pytest.importorskip("datasets")
    from ..data.image_files import make_folders

    return str(make_folders(tmp_path / "images", train=6, test=4))


def test_content_that_has_changed_is_prepared_again(images: str, cache: Path) -> None:
    line = prepare_task("cifar10", images)
    file = max(cache.rglob("*.npy"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with captured_log() as log:
        assert prepare_task("cifar10", images) == line
    (warning,) = log.warnings
    assert warning.startswith(f"{file.parent} is damaged ({file.name}: ")
    assert file.read_bytes() == whole


def test_tasks_without_anything_to_prepare(
    own: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, which finds an own task in the current folder."""
    assert cli.main(["prepare"]) == 0
    line = "digits: 1,437 training and 360 test samples; nothing to prepare\n"
    assert capsys.readouterr().out == line
    sys.path.pop(0)
    assert cli.main(["prepare", "-s", f"task={own}:picky", "-s", "data=more"]) == 0
    assert capsys.readouterr().out == (
        f"{own}:picky: 1,200 training and 1,200 test samples, from its own code; nothing "
        "to prepare\n"
    )
    assert not cache.exists()


# metrics that are no mean


def hits(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    chosen = outputs.argmax(dim=1)
    return {
        "both": ((chosen == 1) & (targets == 1)).float(),
        "either": (chosen == 1).float() + (targets == 1).float(),
    }


def f1(sums: Mapping[str, float], num_samples: int) -> float:
    return 2 * sums["both"] / max(sums["either"], 1.0)


def test_figure_from_sums_is_that_of_the_whole_test_set() -> None:
    """Outputs are the inputs: classes 0, 1, 1, 0, 1; F1 = 2 x 1 / (3 + 2)."""
    inputs = torch.eye(2)[[0, 1, 1, 0, 1]]
    targets = torch.tensor([0, 1, 0, 1, 0])
    task = Task(
        model=lambda: nn.Linear(2, 2, bias=False),
        train=(inputs, targets),
        test=(inputs, targets),
        metric=hits,
        metric_mode="max",
        metric_name="f1",
        metric_from_sums=f1,
    )
    check_task(task)
    model = task.model()
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    whole = task.evaluate(model, "cpu", 0, 5, 2)
    halves = [task.evaluate(model, "cpu", first, last, 2) for first, last in ((0, 2), (2, 5))]
    assert task.figure(whole) == task.figure(EvaluateReport.total(halves)) == pytest.approx(0.4)
    assert dict(task.metrics(whole)) == {"f1": pytest.approx(0.4), "loss": whole.loss}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "task: metric returned both, either; set metric_name to one of them, or"),
        (
            {"metric_from_sums": lambda sums, count: sums["x"]},
            "task: metric_from_sums raised KeyError: 'x'",
        ),
    ],
)
def test_figure_that_cannot_be_computed_is_refused(settings: dict[str, Any], told: str) -> None:
    task = task_of(model=lambda: nn.Linear(2, 3), metric=hits, metric_mode="max", **settings)
    assert refusal(check_task, task).startswith(told)


def test_one_of_several_values_may_be_the_figure() -> None:
    check_task(task_of(metric=hits, metric_mode="max", metric_name="both"))


class Triples(Pairs):
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), 1.0)


def dicts_of(samples: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([inputs for inputs, _ in samples])}


def squares(model: nn.Module, batch: Any) -> Tensor:
    torch.rand(1)
    first, *_ = batch.values() if isinstance(batch, dict) else batch
    return model(first).square().sum(1)


@pytest.mark.parametrize(("data", "collate"), [(Dicts, None), (Triples, None), (Pairs, dicts_of)])
def test_without_a_metric_the_loss_is_that_of_batches_that_are_no_pairs(
    data: type[Pairs], collate: Any
) -> None:
    before = torch.get_rng_state()
    task = task_of(data(), test=data(5), loss=squares, collate=collate)
    assert torch.equal(torch.get_rng_state(), before)
    for one in (task, with_validation(task, 0.5, 0)):
        check_task(one)
        assert (one.metric_name, one.metric_mode) == ("loss", "min")
    report = task.evaluate(task.fresh_model(0), "cpu", 0, 5, 2)
    assert (len(report.loss_sums), report.metric_sums, report.metric_names) == (3, [], [])
    assert dict(task.metrics(report)) == {"loss": report.loss}
    assert task.figure(report) == report.loss > 0


def test_the_default_metric_of_pairs_stays_the_accuracy() -> None:
    for train in (Pairs(), (INPUTS, TARGETS)):
        task = task_of(train, test=train, loss=squares)
        check_task(task)
        assert (task.metric_name, task.metric_mode) == ("accuracy", "max")
    task = task_of(metric_name="loss")
    assert (task.metric_name, task.metric_mode) == ("loss", "min")
    assert "task: reading train raised" in refusal(
        check_task, task_of(Bad(), test=Bad(), loss=squares)
    )


class Bad(Pairs):
    def __getitem__(self, index: int) -> Any:
        raise ZeroDivisionError("it cannot be read")


def test_models_of_two_threads_are_functions_of_their_seeds() -> None:
    begun, raced, done = (threading.Event() for _ in range(3))

    def make() -> nn.Module:
        begun.set()
        raced.wait(0.2)  # in which another thread may seed the generator, if it is not held off
        return nn.Linear(2, 3)

    def make_meanwhile() -> nn.Module:
        raced.set()
        done.wait(60)
        return nn.Linear(2, 3)

    def race() -> None:
        begun.wait(60)
        task_of(model=make_meanwhile).initial_model(1)

    task, before = task_of(model=make), torch.get_rng_state()
    racing = threading.Thread(target=race)
    racing.start()
    model = task.initial_model(0)
    done.set()
    racing.join()
    assert torch.equal(torch.get_rng_state(), before)
    assert not states_differ(model, task.initial_model(0))


@pytest.mark.parametrize("repaired", [False, True])
def test_workers_repair_torchvision_before_they_unpickle_a_task(
    monkeypatch: pytest.MonkeyPatch, repaired: bool
) -> None:
    """Arguments of a partial are unpickled in their order."""
    monkeypatch.setattr(by_name, "is_repaired", lambda: repaired)
    task = task_of()
    register = registration(task)
    first, last = register.args
    assert last is task
    assert first.__reduce__() == (import_torchvision, ()) if repaired else first is None
    assert load_task(register()) is task
