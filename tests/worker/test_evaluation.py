"""Exact means of loss and metric over a test set."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_blsgd.devices.worker_spec import Precision
from flower_blsgd.tasks.task import correct
from flower_blsgd.worker.evaluation import evaluate_sums
from flower_blsgd.worker.local_sgd import SampleLoss, cross_entropy

from ..fake_cuda.log import recorded
from ..grids.processes import is_alive, wait_until

CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets).abs()


def above_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) > 1).float()


class Halve(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / 2


def test_sums_and_means_by_hand() -> None:
    inputs = torch.tensor([[2.0], [4.0], [6.0], [1.0]])
    targets = torch.ones(4)  # errors 0, 1, 2, 1/2
    report = evaluate_sums(Halve(), (inputs, targets), absolute, above_one)
    assert (report.loss_sums, report.metric_sums) == ([3.5], [2.0])
    assert (report.loss, report.totals) == (3.5 / 4, {"accuracy": 2.0})


def test_named_values_and_a_loss_of_the_whole_batch() -> None:
    """Errors 0, 1, 2 and 1/2, in batches of two."""

    def of_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return absolute(model(batch[0]), batch[1])

    def named(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = absolute(outputs, targets)
        return {"absolute": errors, "squared": errors.square()}

    inputs = torch.tensor([[2.0], [4.0], [6.0], [1.0]])
    report = evaluate_sums(Halve(), (inputs, torch.ones(4)), of_batch, named, batch_size=2)
    assert (report.loss_sums, report.metric_names) == ([1.0, 2.5], ["absolute", "squared"])
    assert report.metric_sums == [1.0, 1.0, 2.5, 4.25]
    assert report.totals == {"absolute": 3.5, "squared": 5.25}
    assert dict(report.metrics()) == {"absolute": 0.875, "squared": 1.3125, "loss": 0.875}


def test_evaluation_is_in_eval_mode_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = (torch.randn(10, 3), torch.arange(10) % 2)
    first, second = (evaluate_sums(model, samples, cross_entropy, correct) for _ in range(2))
    assert first == second
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# --- slices


class Counted(Dataset):
    """Notes the samples that are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.tensor([2.0 * index]), torch.tensor(0.0)


def test_slice_is_read_in_batches_and_nothing_else_is() -> None:
    samples, sizes = Counted(), list[int]()

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return absolute(outputs, targets)

    report = evaluate_sums(Halve(), samples, counted, above_one, part=range(2, 5), batch_size=2)
    assert sizes == [2, 1]
    assert (report.first, report.last, report.num_examples) == (2, 5, 3)
    assert (report.loss_sums, report.metric_sums) == ([2 + 3, 4], [2, 1])
    assert samples.read == [2, 3, 4]


# --- how it computes


def test_sums_of_a_cpu_are_those_of_its_parts_in_order() -> None:
    """At most 64 samples at a time: 64 and 36 of the first batch, 50 of the second."""
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(8, 3), torch.randn(150, 8), torch.arange(150) % 3
    found = evaluate_sums(model, (inputs, targets), cross_entropy, correct, batch_size=100)

    def sum_of(function: SampleLoss, first: int, last: int) -> float:
        with torch.inference_mode():
            values = function(model(inputs[first:last]), targets[first:last])
        return float(values.double().sum())

    assert found.loss_sums == [
        sum_of(cross_entropy, 0, 64) + sum_of(cross_entropy, 64, 100),
        sum_of(cross_entropy, 100, 150),
    ]
    assert found.metric_sums == [sum_of(correct, 0, 100), sum_of(correct, 100, 150)]


class Noisy(Dataset):
    """Samples with a random transform and the process that reads them."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return index + torch.rand(1), torch.tensor(float(os.getpid()))


def test_processes_read_the_same_samples_and_end_with_the_slice() -> None:
    read_by: set[float] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        read_by.update(targets.tolist())
        return outputs.squeeze(1)

    def sums(loader_workers: int, first: int = 0) -> list[float]:
        samples = Noisy(), loss, lambda outputs, _: outputs.squeeze(1)
        settings = {"part": range(first, 9), "batch_size": 2, "loader_workers": loader_workers}
        return evaluate_sums(Halve(), *samples, **settings).loss_sums

    here = sums(0)
    assert read_by == {os.getpid()}
    assert sums(2, first=8) == here[-1:]  # one batch needs no process
    assert read_by == {os.getpid()}
    assert sums(2) == here
    processes = {int(pid) for pid in read_by} - {os.getpid()}
    assert len(processes) == 2
    assert wait_until(lambda: not any(map(is_alive, processes)))


class Observed(nn.Module):
    """A convolution that notes the dtype of its outputs and the format of its images and weight."""

    def __init__(self, seen: list[object]) -> None:
        super().__init__()
        self.seen, self.layer = seen, nn.Conv2d(3, 2, 4)

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.layer(images)
        self.seen.append(outputs.dtype)
        self.seen += [
            part.is_contiguous(memory_format=torch.channels_last)
            for part in (images, self.layer.weight)
        ]
        return outputs.flatten(1)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda:0", marks=CUDA)],
)
def test_precision_and_memory_format_are_those_of_training(device: str) -> None:
    """But a CPU computes in float32, and a metric always computes in float32."""
    seen: list[object] = []
    samples = torch.randn(4, 3, 4, 4), torch.zeros(4)

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((outputs @ outputs.mT).dtype)
        return outputs[:, 0]

    def run(**settings: object) -> None:
        parts = samples, metric, metric
        evaluate_sums(Observed(seen), *parts, device, **settings)  # type: ignore[arg-type]

    run()
    assert seen == [torch.float32, False, False, torch.float32, torch.float32]
    seen.clear()
    run(precision="bfloat16", channels_last=True)
    inside = torch.float32 if device == "cpu" else torch.bfloat16
    assert seen == [inside, True, True, torch.float32, torch.float32]


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=CUDA)])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_slice_waits_for_a_card_once(device: str, precision: Precision) -> None:
    """At the end, for the sums of five batches: 8 bytes of each loss and each metric."""
    torch.manual_seed(0)
    model, samples = nn.Linear(8, 3), (torch.randn(50, 8), torch.arange(50) % 3)
    parts = samples, cross_entropy, correct
    expected = evaluate_sums(model, *parts, batch_size=10)
    model.to(device)
    with recorded() as events:
        found = evaluate_sums(model, *parts, device, batch_size=10, precision=precision)
    assert [(e.kind, e.num_bytes) for e in events if e.blocking] == [("copy to host", 80)]
    assert all(event.pinned for event in events if event.kind == "copy to card")
    assert found.loss_sums == pytest.approx(expected.loss_sums, rel=1e-2)
