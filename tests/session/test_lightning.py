"""The Lightning callback, with orders from a thread instead of a launcher."""

import dataclasses
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from flower_blsgd.algorithm.sampling import permutation_stream
from flower_blsgd.data.libraries import import_torchvision
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.errors import UsageError
from flower_blsgd.integrations.lightning import BlsgdCallback
from flower_blsgd.protocol import TrainOrder, TrainReport
from flower_blsgd.session.exchange import HERE, Exchange
from flower_blsgd.worker.model_io import state_record

from ..refusal import refusal
from . import orders
from .orders import BATCH

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no lightning"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's hints
]
NUM_SAMPLES = 16


@pytest.fixture(autouse=True)
def _lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what the callback changes in its process."""
    import_torchvision()
    from lightning.pytorch.strategies import launchers
    from lightning_utilities.core.rank_zero import rank_zero_only

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name in ("_SubprocessScriptLauncher", "_MultiProcessingLauncher"):
        kind = getattr(launchers, name)
        monkeypatch.setattr(kind, "launch", kind.launch)
    for name in ("ACCELERATOR", "DEVICES"):
        monkeypatch.setenv(f"PL_TRAINER_{name}", "")
        monkeypatch.delenv(f"PL_TRAINER_{name}")


def module_of(**attributes: Any) -> Any:
    """Return a LightningModule with one weight, which each step lowers by the learning rate."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False)
            self.drawn: list[float] = []
            self.rates: list[float] = []
            self.validated: list[float] = []
            self.is_chained = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.drawn += batch.flatten().tolist()
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return self.net(torch.ones(1, 1)).sum()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated.append(self.net.weight.item())
            self.log("loss", self.net.weight.sum())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = self.trainer.estimated_stepping_batches
            linear: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / steps)
            if self.is_chained:
                linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
                linear = torch.optim.lr_scheduler.ChainedScheduler([linear])
            return [optimizer], [{"scheduler": linear, "interval": "step"}]

    module = Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def numbers(**settings: Any) -> DataLoader[Tensor]:
    """Return a loader of the numbers from 0 to 15."""
    data = torch.arange(NUM_SAMPLES).float().reshape(-1, 1)
    return DataLoader(data, **{"batch_size": BATCH, "shuffle": True, **settings})  # type: ignore[arg-type]


def trainer_of(*callbacks: Any, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(callbacks=[BlsgdCallback(), *callbacks], **{**quiet, **settings})


def becomes_worker(rank: int = 0, **worker: Any) -> Exchange:
    spec = WorkerSpec(**{"device": "cpu", **worker})
    exchange = Exchange(spec, rank, seed=3, batch_size=BATCH, is_main=rank == 0)
    HERE.exchange, HERE.has_joined = exchange, False
    return exchange


def arrays(weight: float) -> Any:
    module = module_of()
    with torch.no_grad():
        module.net.weight.fill_(weight)
    return state_record(module)


def order_of(round: int, steps: int, progress: float = 0.0, **changes: Any) -> TrainOrder:
    own = {"indices": np.zeros(0, np.int32), "stream_start": -1, "progress": progress}
    return orders.order_of(round, steps, arrays(0.0), **(own | changes))


def fit(
    module: Any,
    trainer: Any,
    given: list[TrainOrder],
    *loaders: DataLoader[Tensor] | None,
    checkpoint: str | None = None,
) -> list[TrainReport]:
    """Fit while a thread gives the orders, then the final model, whose weight is 42."""
    exchange, reports = HERE.exchange, []
    assert exchange is not None

    def serve() -> None:
        reports.extend(exchange.train(order) for order in given)
        exchange.finish(arrays(42.0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        trainer.fit(module, *(loaders or [numbers()]), ckpt_path=checkpoint)
    except BaseException as error:
        exchange.end(error)
        raise
    finally:
        exchange.end(None)
        thread.join(10)
    return reports


def weight_of(report: TrainReport) -> float:
    return float(next(iter(report.arrays.values())).numpy().item())


def test_steps_are_those_of_the_optimizer_and_the_run_ends_the_fit() -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    becomes_worker()
    module, stops = module_of(), EarlyStopping("loss", patience=0)
    trainer = trainer_of(stops, max_steps=1, accumulate_grad_batches=3, max_time="00:00:00:00")
    # An epoch of 4 batches has a step of 3 batches and one of the last batch.
    reports = fit(
        module, trainer, [order_of(1, 4), order_of(2, 2)], numbers(), numbers(shuffle=False)
    )
    assert [report.completed_steps for report in reports] == [1, 2]  # a validation ends the first
    assert [report.num_examples for report in reports] == [4, 16]
    assert module.net.weight.item() == module.validated[-1] == 42.0


def test_averaged_gradients_are_clipped() -> None:
    """The gradient is 1 in both steps, and its average is said to be 4."""
    becomes_worker()
    module, trainer = module_of(), trainer_of(gradient_clip_val=0.5)
    first = order_of(1, 1, returns="gradient")
    gradient = dataclasses.replace(first, arrays=arrays(4.0), brings="gradient")
    given = [first, dataclasses.replace(gradient, round=2)]
    given.append(dataclasses.replace(gradient, round=3, local_steps=0, returns="model"))
    reports = fit(module, trainer, given)
    assert [weight_of(report) for report in reports] == pytest.approx([1.0, 1.0, -1.0])
    assert [report.num_examples for report in reports] == [BATCH, BATCH, 1]


def test_schedule_follows_the_progress_of_the_run() -> None:
    becomes_worker()
    module = module_of()
    trainer = trainer_of(max_epochs=5)  # 20 steps alone
    fit(module, trainer, [order_of(n + 1, 3, n / 4) for n in range(4)])
    expected = [1.0] * 4 + [0.75] * 3 + [0.5] * 3 + [0.25] * 3
    assert module.rates == pytest.approx(expected)  # the first step does not count
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)


@pytest.mark.parametrize("is_chained", [False, True])
def test_schedule_continues_where_a_checkpoint_ended(is_chained: bool) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saves = ModelCheckpoint(".", "{step}", every_n_train_steps=5, save_top_k=-1)
    saving = trainer_of(saves, max_epochs=5)
    saving.fit(module_of(is_chained=is_chained), numbers())
    saving.save_checkpoint("last.ckpt")
    becomes_worker()
    module, trainer = module_of(is_chained=is_chained), trainer_of(max_epochs=5)  # 20 steps alone
    fit(module, trainer, [order_of(n + 1, 2, n / 3) for n in range(3)], checkpoint="step=5.ckpt")
    expected = [0.75] * 3 + [0.5] * 2 + [0.25] * 2
    assert module.rates == pytest.approx(expected)  # of step 5, 10 and 15
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0)
    for end in ("step=20", "last"):  # within the last epoch, and after it
        becomes_worker()
        module, trainer = module_of(is_chained=is_chained), trainer_of(max_epochs=5)
        ended = refusal(trainer.fit, module, numbers(), ckpt_path=f"{end}.ckpt")
        assert ended.startswith("Trainer.fit: its checkpoint is at the end of max_epochs or max_st")


def test_averaged_model_is_validated_and_only_the_main_worker_saves() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    for rank in (0, 1):
        becomes_worker(rank)
        module = module_of()
        saves = ModelCheckpoint(f"of-{rank}", monitor="loss", save_top_k=-1, every_n_epochs=1)
        trainer = trainer_of(saves, val_check_interval=2, num_sanity_val_steps=0)
        given = [order_of(1, 3), order_of(2, 3), order_of(3, 3)]
        if rank == 0:
            reports = fit(module, trainer, given, numbers(), numbers(shuffle=False))
            assert trainer.is_global_zero
            # Steps 2 and 4 are validated, with the model of the next order: rounds end there.
            assert module.validated[:2] == [0.0, 0.0]
            assert [report.completed_steps for report in reports][:2] == [1, 2]
        else:
            with pytest.raises(SystemExit):
                fit(module, trainer, given, numbers(), numbers(shuffle=False))
            assert module.validated == []
            assert not trainer.is_global_zero
            trainer.save_checkpoint("by-hand.ckpt")
    assert [path.name for path in Path().iterdir()] == ["of-0"]
    assert list(Path("of-0").iterdir())


def test_averaged_model_is_validated_with_overlap() -> None:
    """Step 2 ends round 1. Step 4 is the first one of round 3, which ends for the validation."""
    becomes_worker()
    module, ahead = module_of(), {"next_indices": np.zeros(4, np.int32)}
    trainer = trainer_of(val_check_interval=2, num_sanity_val_steps=0)
    given = [order_of(1, 1, **ahead), order_of(2, 1, overlap=True, **ahead)]
    given.append(order_of(3, 3, overlap=True))
    reports = fit(module, trainer, given, numbers(), numbers(shuffle=False))
    assert module.validated[:8:4] == [0.0, 42.0]  # of four batches each
    assert [report.completed_steps for report in reports] == [1, 1, 1]


def test_each_worker_draws_differently_also_with_the_same_generator() -> None:
    drawn = []
    for rank in (0, 1):
        becomes_worker(rank)
        module, loader = module_of(), numbers(generator=torch.Generator().manual_seed(5))
        try:
            fit(module, trainer_of(), [order_of(1, 3)], loader)
        except SystemExit:
            assert rank == 1
        drawn.append(module.drawn[:NUM_SAMPLES])
    assert sorted(drawn[0]) == sorted(drawn[1]) == list(range(NUM_SAMPLES))
    assert drawn[0] != drawn[1]


def test_data_that_are_a_stream_bring_a_warning() -> None:
    class Numbers(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.arange(float(NUM_SAMPLES)).reshape(-1, 1))

    becomes_worker()
    loader: Any = DataLoader(Numbers(), batch_size=BATCH)
    with pytest.warns(UserWarning, match="each worker must read another part, such as every BL"):
        fit(module_of(), trainer_of(max_steps=4), [order_of(1, 2)], loader)


def test_session_sampler_can_be_used() -> None:
    becomes_worker()
    module, callback = module_of(), None

    def train_dataloader() -> DataLoader[Tensor]:
        assert callback is not None
        return numbers(
            shuffle=False,
            batch_size=callback.session.batch_size,
            sampler=callback.session.sampler(range(NUM_SAMPLES)),
        )

    module.train_dataloader = train_dataloader
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
    trainer = trainer_of()
    callback = trainer.callbacks[0]
    order = order_of(1, 2, stream_start=0, stream_stride=2 * BATCH)
    (report,) = fit(module, trainer, [order], None)
    stream = permutation_stream(3, NUM_SAMPLES, 0, 2 * BATCH)
    assert module.drawn[: 2 * BATCH] == stream.tolist()
    assert report.num_examples == 2 * BATCH
    assert module.net.weight.item() == 42.0


def test_alone_nothing_changes() -> None:
    trained = []
    for with_callback in (False, True):
        torch.manual_seed(1)
        module, trainer = module_of(), trainer_of(max_epochs=2)
        if not with_callback:
            trainer.callbacks = trainer.callbacks[1:]
        trainer.fit(module, numbers(), numbers(shuffle=False))
        trained.append((module.drawn, module.rates, module.net.weight.item(), trainer.max_epochs))
    assert trained[0] == trained[1]


def plateau(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = {"scheduler": schedule, "monitor": "loss"}
    return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            lambda module: setattr(module, "automatic_optimization", False),
            {},
            "Module has automatic_optimization = False; BlsgdCallback needs automatic",
        ),
        (
            lambda module: setattr(module, "configure_optimizers", lambda: plateau(module)),
            {},
            "ReduceLROnPlateau follows the validation of one worker",
        ),
        *(
            (
                lambda module: None,
                {"strategy": strategy, "devices": 2},
                "Trainer uses DDPStrategy, but blsgd launch starts one process per device; remove",
            )
            for strategy in ("ddp", "ddp_spawn")
        ),
    ],
)
def test_what_is_refused(change: Any, settings: dict[str, Any], message: str) -> None:
    becomes_worker()
    module = module_of()
    change(module)
    assert refusal(trainer_of(**settings).fit, module, numbers()).startswith(message)


def test_other_refusals() -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    becomes_worker()
    message = refusal(trainer_of().fit, module_of(), numbers(shuffle=False))
    assert message.startswith("the training DataLoader does not shuffle")
    message = refusal(trainer_of(LearningRateFinder()).fit, module_of(), numbers())
    assert message.startswith("callback LearningRateFinder does not work under blsgd launch")
    becomes_worker(device="cuda:0")
    message = refusal(trainer_of(accelerator="cpu", devices=1).fit, module_of(), numbers())
    assert message.startswith("Trainer uses cpu, but this worker is cuda:0; remove accelerator=")
    becomes_worker(role="evaluate")
    message = refusal(trainer_of().fit, module_of(), numbers())
    assert message.startswith("worker 0 has role=evaluate, but with BlsgdCallback the main worker")
    with pytest.raises(UsageError, match=r"before Trainer\.fit had created the optimizer"):
        _ = BlsgdCallback().session
    becomes_worker()
    trainer = trainer_of()
    fit(module_of(), trainer, [order_of(1, 1)])
    assert refusal(trainer.fit, module_of(), numbers()).startswith("Trainer.fit was called twice")
