"""Inputs that are whole numbers: texts, padded with -1, that a model cuts to the longest one."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, Task, TrainOrder, TrainReport
from flower_blsgd.tasks.check import check_task
from flower_blsgd.worker.evaluation import evaluate
from flower_blsgd.worker.model_state import state_record
from flower_blsgd.worker.replica_sgd import CannotBatchError, ReplicaSGD
from flower_blsgd.worker.samples import HostSamples

from .stand_in import StandInCapture, record_on_cpu
from .test_cuda_graph import close, order_of, same
from .test_micro_batches import to_rounding

WORDS, LONGEST, NUM_SAMPLES = 11, 9, 40


class MeanOfWords(nn.Module):
    """Classes from the mean of each text's words."""

    def __init__(self, cuts: bool = True) -> None:
        super().__init__()
        self.words, self.classes = nn.Embedding(WORDS, 6), nn.Linear(6, 4)
        self.lengths: list[int] = []
        self._cuts = cuts

    def forward(self, tokens: Tensor) -> Tensor:
        there = tokens >= 0
        if self._cuts:
            longest = int(there.sum(dim=1).max())  # reads a number: the host waits for it
            tokens, there = tokens[:, :longest], there[:, :longest]
        self.lengths.append(tokens.shape[1])
        words = self.words(tokens.clamp(min=0)) * there.unsqueeze(2)
        outputs: Tensor = self.classes(words.sum(dim=1) / there.sum(dim=1, keepdim=True))
        return outputs


def model_of(cuts: bool = True) -> MeanOfWords:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MeanOfWords(cuts)


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return int32 tokens of shape (40, 9), of texts of 1 to 5 words, and int64 labels."""
    draw = np.random.default_rng(2)
    tokens = np.full((NUM_SAMPLES, LONGEST), -1, np.int32)
    for row in tokens:
        length = draw.integers(1, 6)
        row[:length] = draw.integers(0, WORDS, length)
    return tokens, np.arange(NUM_SAMPLES) % 4


def text_order(server_round: int = 1, **changes: Any) -> TrainOrder:
    return order_of(server_round, arrays=state_record(model_of()), **changes)


def run(order: TrainOrder | None = None, cuts: bool = True, **settings: Any) -> TrainReport:
    return LocalSGD(model_of(cuts), texts(), **settings).run(order or text_order())


def test_batches_are_cut_and_computed() -> None:
    model = model_of()
    report = LocalSGD(model, texts()).run(text_order())
    assert np.isfinite(report.losses).all()
    assert 0 < max(model.lengths) <= 5
    assert close(report, run(cuts=False))


@pytest.mark.parametrize(
    "settings",
    [
        {"channels_last": True},
        {"optimizer": "adamw"},
        {"micro_batch_size": 3},
        {"micro_batch_size": 1},
    ],
)
def test_settings_that_have_to_do_with_images_do_no_harm(settings: dict[str, Any]) -> None:
    whole = {name: value for name, value in settings.items() if name == "optimizer"}
    assert to_rounding(run(**settings), run(**whole))


def test_tokens_stay_whole_numbers_under_autocast() -> None:
    order = text_order(local_steps=1)
    exact, rounded = run(order), run(order, precision="bfloat16")
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)


def test_model_that_does_not_cut_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = StandInCapture()
    record_on_cpu(monkeypatch, capture)
    assert same(run(cuts=False), run(cuts=False, cuda_graph=False))
    assert capture.replays == [3]


def test_model_that_cuts_is_computed_eagerly_where_it_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On CUDA it waits for the device while that is forbidden."""

    class Refuses(StandInCapture):
        def check(self, body: Any) -> None:
            raise RuntimeError("called a synchronizing CUDA operation")

    record_on_cpu(monkeypatch, Refuses())
    assert same(run(), run(cuda_graph=False))
    assert [r.levelno for r in caplog.records if "cannot be recorded" in r.getMessage()] == [
        logging.WARNING
    ]


def test_workers_that_compute_together_refuse_a_model_that_cuts() -> None:
    """So they compute side by side, see `test_replica.py`."""
    with pytest.raises(CannotBatchError, match="vmap"):
        ReplicaSGD(model_of(), texts()).run([(text_order(), RecordDict())] * 2)


def test_workers_that_compute_together_read_tokens() -> None:
    sgd = ReplicaSGD(model_of(cuts=False), texts())
    (report,) = sgd.run([(text_order(), RecordDict())])
    assert close(report, run())


def test_evaluation_reads_them_in_batches_of_any_size() -> None:
    def task_of(model: nn.Module, samples: Any, size: int) -> tuple[float, float]:
        task = Task(model=model_of, train=texts(), test=texts())
        return evaluate(model, samples, task.loss, task.metric, batch_size=size)

    expected = task_of(model_of(cuts=False), texts(), 1024)
    on_host = HostSamples([torch.from_numpy(part) for part in texts()])
    for size in (1, 7, 40):
        assert task_of(model_of(), texts(), size) == pytest.approx(expected, rel=1e-6)
        assert task_of(model_of(), on_host, size) == pytest.approx(expected, rel=1e-6)


def test_task_of_texts_is_tried() -> None:
    check_task(Task(model=model_of, train=texts(), test=texts()), micro_batch_size=2)
