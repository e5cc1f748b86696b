"""Samples that processes read ahead: in order, with own random numbers, and with errors by name."""

import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_blsgd import LocalSGD
from flower_blsgd.worker.batches import BatchSource
from flower_blsgd.worker.loader import loader_workers

from ..grids.processes import is_alive, wait_until
from .helpers import SECOND_CARD, close, data, independent_model, independent_order, same

CPU = torch.device("cpu")


class Numbers(Dataset):
    """Random transforms of every kind, and one sample that cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise OSError("truncated")
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return {"index": index, "noise": noise, "process": os.getpid()}


class Images(Dataset):
    def __len__(self) -> int:
        return len(data()[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data()
        return inputs[index], targets[index]


def read(source: BatchSource, *indices: int, seed: int = 0) -> list[dict[str, Any]]:
    return list(source.batches(torch.tensor(indices), 2, seed))


def values(batches: list[dict[str, Any]], key: str) -> list[Any]:
    return [value for batch in batches for value in batch[key].tolist()]


def randomness() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_processes_read_what_the_thread_reads() -> None:
    here, ahead = (BatchSource(Numbers(), CPU, loader_workers=count) for count in (0, 2))
    order = 5, 1, 2, 9, 9, 3
    random.seed(0)
    before = randomness()
    own, read_ahead = read(here, *order, seed=7), read(ahead, *order, seed=7)
    assert values(own, "index") == values(read_ahead, "index") == list(order)
    assert values(own, "noise") == values(read_ahead, "noise")
    assert values(own, "noise") != values(read(here, *order, seed=8), "noise")
    assert set(values(own, "process")) == {os.getpid()}
    processes = set(values(read_ahead, "process"))
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert randomness() == before
    # The processes stay, also if an order ends early.
    interrupted = ahead.batches(torch.arange(12), 2)
    next(interrupted)
    interrupted.close()
    assert set(values(read(ahead, *order), "process")) == processes


def test_processes_begin_to_read_before_the_first_batch_is_asked_for(tmp_path: Path) -> None:
    class Touching(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            (tmp_path / str(index)).touch()
            return super().__getitem__(index)

    source = BatchSource(Touching(), CPU, loader_workers=1)
    batches = source.batches(torch.arange(4), 2)
    assert wait_until((tmp_path / "3").exists)
    assert [batch["index"].tolist() for batch in batches] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("count", [0, 1])
def test_sample_that_cannot_be_read_is_named_and_costs_only_its_order(count: int) -> None:
    source = BatchSource(Numbers(), CPU, loader_workers=count)
    with pytest.raises(ValueError, match=r"^sample 13 cannot be read: OSError: truncated$"):
        read(source, 1, 2, 13, 4)
    assert values(read(source, 14, 15), "index") == [14, 15]


def test_process_that_is_killed_costs_only_its_order() -> None:
    source = BatchSource(Numbers(), CPU, loader_workers=1)
    [killed] = set(values(read(source, 1, 2), "process"))
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        read(source, *[3, 4] * 20)
    assert values(read(source, 5, 6), "index") == [5, 6]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them there")
def test_processes_end_with_a_worker_that_is_killed() -> None:
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)

    def read_and_die() -> None:
        source = BatchSource(Numbers(), CPU, loader_workers=1)
        sends.send(values(read(source, 1, 2), "process")[0])
        os.kill(os.getpid(), signal.SIGKILL)

    worker = context.Process(target=read_and_die)
    worker.start()
    reader = receives.recv()
    worker.join()
    assert wait_until(lambda: not is_alive(reader))


@pytest.mark.parametrize("device", ["cpu", SECOND_CARD])
def test_worker_trains_the_same_with_processes(device: str) -> None:
    """Dropout of the model draws from another stream than the transforms."""
    whole, here, ahead = (
        LocalSGD(independent_model(dropout=True), samples, device=device, loader_workers=count)
        for samples, count in ((data(), 0), (Images(), 0), (Images(), 2))
    )
    for server_round in (1, 2):
        order = independent_order(server_round)
        reports = [sgd.run(order) for sgd in (whole, here, ahead)]
        assert same(*reports[1:])
        assert close(*reports[:2])


def test_processes_read_while_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sgd = LocalSGD(independent_model(), Images())
    batches, load = sgd._source.batches, sgd._sent.load
    monkeypatch.setattr(
        sgd._source, "batches", lambda *given: (done.append("batches"), batches(*given))[1]
    )
    monkeypatch.setattr(sgd._sent, "load", lambda *given: (done.append("load"), load(*given))[1])
    sgd.run(independent_order())
    assert done == ["batches", "load"]


@pytest.mark.parametrize(
    ("setting", "cores", "expected"),
    [("auto", 1, 0), ("auto", 2, 2), ("auto", 32, 4), (0, 8, 0), (3, 1, 3)],
)
def test_number_of_processes(setting: int | str, cores: int, expected: int) -> None:
    assert loader_workers(setting, cores) == expected


# --- batches of other structures


class Named(Dataset):
    """Samples as a Hugging Face Dataset has them, of different lengths."""

    def __len__(self) -> int:
        return 40

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"tokens": [index % 7] * (1 + index % 3), "label": index % 4} for index in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitems__ reads a whole batch")


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = [[*s["tokens"], *[7] * (longest - len(s["tokens"]))] for s in samples]
    return {"tokens": torch.tensor(tokens), "label": torch.tensor([s["label"] for s in samples])}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 4, padding_idx=7)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.words(tokens).mean(dim=1)
        return outputs


def loss_of_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]), batch["label"], reduction="none")


@pytest.mark.parametrize("micro", [0, 3])
def test_loss_gets_the_model_and_a_batch_of_any_structure(micro: int) -> None:
    from flower_blsgd.worker.model_io import state_record

    sgd = LocalSGD(Embedded(), Named(), loss_of_batch, collate=padded, micro_batch_size=micro)
    order = independent_order(batch_size=6)
    order = type(order)(**{**vars(order), "arrays": state_record(Embedded())})
    report = sgd.run(order)
    model = Embedded()
    batch = padded(Named().__getitems__(order.indices[:6].tolist()))
    assert report.losses[:6] == pytest.approx(loss_of_batch(model, batch).tolist(), rel=1e-5)
    assert len(report.losses) == len(order.indices)
