"""The adapter for the Trainer of transformers, against orders given by hand.

Real processes start the adapter in tests/examples/test_scripts.py.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flower_blsgd.algorithm.sampling import permutation_stream
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.models.pretrained import import_transformers
from flower_blsgd.protocol import EvaluateOrder, TrainOrder, TrainReport
from flower_blsgd.session.exchange import HERE, Exchange
from flower_blsgd.session.session import Session
from flower_blsgd.worker.model_io import state_record

from ..refusal import refusal
from . import orders

pytest.importorskip("transformers")
transformers = import_transformers("")  # also with a torchvision that was built for another torch

from flower_blsgd.integrations.transformers import BlsgdCallback  # noqa: E402

SIZE, STEPS = 40, 20
"""Samples of the data set, and steps that the Trainer itself would train."""


class Net(nn.Module):
    """Remembers the samples of its training steps, which are their own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(x.int().tolist())
        return {"loss": (self.weight - 1).square().sum(), "logits": x * self.weight}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(size: int = SIZE) -> list[dict[str, float]]:
    return [{"x": float(i), "labels": 0.0} for i in range(size)]


def trainer_of(**arguments: Any) -> Any:
    """Return a Trainer: two batches of two samples per step, with a linear schedule."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 0.1,
        "lr_scheduler_type": "linear",
        "optim": "sgd",
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    data = arguments.pop("train_dataset", None) or rows()
    args = transformers.TrainingArguments("out", **{**defaults, **arguments})
    return transformers.Trainer(Net(), args, train_dataset=data, eval_dataset=rows(4))


class Launcher:
    """Gives orders to the script, which runs in this thread; the rank is 0."""

    def __init__(self, worker: str = "cpu", is_main: bool = True, **options: Any) -> None:
        self.exchange = Exchange(WorkerSpec(worker, **options), 0, 3, 16, is_main=is_main)
        HERE.exchange, HERE.has_joined = self.exchange, False
        self.reports: list[TrainReport] = []

    def run(self, script: Callable[[], None], *given: Any, final: Any = None) -> None:
        def give() -> None:
            self.exchange.joined.result(60)
            for order in given:
                if isinstance(order, TrainOrder):
                    self.reports.append(self.exchange.train(order))
                elif isinstance(order, EvaluateOrder):
                    self.figures = self.exchange.evaluate(order).metrics()
            self.exchange.finish(final or arrays_of(0.75))

        thread = threading.Thread(target=give)
        thread.start()
        script()
        self.exchange.end(None)
        thread.join(60)
        assert not thread.is_alive()


def arrays_of(value: float) -> Any:
    net = Net()
    net.weight.data.fill_(value)
    return state_record(net)


def order_of(round: int, steps: int, progress: float, value: float = 0.0, batch: int = 4) -> Any:
    stream = {"stream_start": (round - 1) * 5 * batch, "stream_stride": 5 * batch}
    return orders.order_of(round, steps, arrays_of(value), batch, progress=progress, **stream)


def rates_of(trainer: Any) -> list[float]:
    """Return the list to which the learning rate of every step is appended."""
    rates: list[float] = []

    class Rates(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trainer.add_callback(Rates())
    return rates


def test_alone_it_changes_nothing() -> None:
    found = []
    for has_callback in (False, True):
        trainer = trainer_of(num_train_epochs=2, max_steps=-1, save_strategy="epoch")
        rates = rates_of(trainer)
        if has_callback:
            callback = BlsgdCallback(trainer)
            trainer.add_callback(callback)
            assert callback.session is None
        trainer.train()
        net = trainer.model
        saved = sorted(path.name for path in Path("out").glob("checkpoint-*"))
        found.append((net.weight.item(), net.seen, rates, trainer.state.global_step, saved))
    assert found[0] == found[1]
    assert found[0][3] == 20


def test_each_order_has_its_steps_samples_and_learning_rate() -> None:
    launcher, trainer = Launcher(), trainer_of(max_steps=4)  # fewer than the orders have
    rates = rates_of(trainer)
    trainer.add_callback(BlsgdCallback(trainer))
    given = [order_of(n, 5, progress) for n, progress in ((1, 0.25), (2, 0.5), (3, 0.75))]
    launcher.run(trainer.train, *given)
    assert [(r.completed_steps, r.num_examples) for r in launcher.reports] == [(5, 20)] * 3
    assert launcher.exchange.joined.result().info.batch_size == 4  # although it came before a step
    assert rates == pytest.approx([0.075] * 5 + [0.05] * 5 + [0.025] * 5)
    assert trainer.model.weight.item() == 0.75  # the final model of the run
    assert trainer.state.global_step == trainer.state.max_steps == 15
    # More than one of the Trainer's epochs, in one stream: 10 steps each.
    stream = permutation_stream(3, SIZE, 0, 60).tolist()
    assert [x for batch in trainer.model.seen for x in batch][:60] == stream


def test_averaged_gradients_are_clipped() -> None:
    """The gradient is 2 (weight - 1), and its average is said to be 4."""
    launcher, trainer = Launcher(), trainer_of(max_grad_norm=1.0)
    trainer.add_callback(BlsgdCallback(trainer))
    own = {"returns": "gradient", "local_steps": 1, "indices": np.arange(4, dtype=np.int32)}
    first, second, last = (order_of(n, 1, 0.25 * n, 4.0) for n in (1, 2, 3))
    launcher.run(
        trainer.train,
        replace(first, arrays=arrays_of(0.0), **own),
        replace(second, brings="gradient", **own),
        replace(last, brings="gradient", local_steps=0, indices=np.empty(0, np.int32)),
    )
    sent = [next(iter(report.arrays.values())).numpy().item() for report in launcher.reports]
    # Rates 0.075 and 0.05, each times a gradient that is clipped to 1.
    assert sent == pytest.approx([-2.0, 2 * (-0.075 - 1), -0.125])


def test_a_checkpoint_of_the_trainer_continues_its_schedule() -> None:
    trainer_of(max_steps=5, save_strategy="steps", save_steps=5).train()
    launcher, trainer = Launcher(), trainer_of()
    rates = rates_of(trainer)
    callback = BlsgdCallback(trainer)
    trainer.add_callback(callback)
    given = [order_of(1, 2, 0.0), order_of(2, 2, 1 / 3), order_of(3, 1, 2 / 3)]
    launcher.run(lambda: trainer.train(resume_from_checkpoint="out/checkpoint-5"), *given)
    assert rates == pytest.approx([0.075] * 2 + [0.05] * 2 + [0.025])  # of step 5, 10 and 15
    assert trainer.state.global_step == 5 + 5
    # No sample is skipped, and the workers keep their own random numbers.
    stream = permutation_stream(3, SIZE, 0, 8).tolist()
    assert [x for batch in trainer.model.seen for x in batch][:8] == stream
    assert callback.session is not None
    assert torch.initial_seed() == callback.session.seed
    # A checkpoint at the end of the schedule would train with a rate of zero.
    Launcher()
    trainer = trainer_of(max_steps=5)
    trainer.add_callback(BlsgdCallback(trainer))
    message = refusal(trainer.train, resume_from_checkpoint="out/checkpoint-5")
    assert message.startswith(
        "Trainer: the checkpoint is at step 5 of 5, the end of the learning-r"
    )


def test_the_schedule_is_the_same_whatever_the_batch_of_a_worker() -> None:
    """And a warm-up begins above zero."""
    launcher = Launcher(batch_size=20)
    trainer = trainer_of(max_steps=-1, num_train_epochs=2, warmup_steps=10)
    rates = rates_of(trainer)
    trainer.add_callback(BlsgdCallback(trainer))
    given = [order_of(n, 1, progress, batch=20) for n, progress in ((1, 0.0), (2, 0.25), (3, 0.75))]
    launcher.run(trainer.train, *given)
    assert [report.num_examples for report in launcher.reports] == [20] * 3
    assert [len(batch) for batch in trainer.model.seen[:6]] == [10] * 6
    assert rates == pytest.approx([0.01, 0.05, 0.05])  # of steps 1, 5 and 15 of 20


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_main_worker_saves_and_logs_and_only_averaged_models(
    is_main: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Launcher(is_main=is_main)
    trainer = trainer_of(save_strategy="steps", save_steps=3, logging_steps=2)
    trainer.add_callback(BlsgdCallback(trainer))
    launcher.run(trainer.train, order_of(1, 5, 0.2), order_of(2, 4, 0.4, 0.5), order_of(3, 1, 0.9))
    trainer.save_model("final")
    assert trainer.is_world_process_zero() == is_main
    assert ("'learning_rate'" in capsys.readouterr().out) == is_main
    assert Path("final").exists() == is_main
    saved = sorted(Path("out").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert [path.name[11:] for path in saved] == (["5", "9", "10"] if is_main else [])
    # The model of the order that came after the round, not that of the worker's own steps.
    values = [load_weight(path) for path in saved]
    assert values == ([0.5, 0.0, 0.75] if is_main else [])


@pytest.mark.parametrize("is_main", [True, False])
def test_best_model_of_a_checkpoint_is_that_of_the_main_worker(is_main: bool) -> None:
    """It may delete it, and the other workers would look for it in the end."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5}
    saved = {"save_strategy": "steps", "save_steps": 5}
    trainer_of(max_steps=5, **best, **saved).train()
    launcher, trainer = Launcher(is_main=is_main), trainer_of(**best, **saved)
    trainer.add_callback(BlsgdCallback(trainer))
    seen: list[str | None] = []

    class Sees(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.best_model_checkpoint)

    trainer.add_callback(Sees())
    script = functools.partial(trainer.train, resume_from_checkpoint="out/checkpoint-5")
    launcher.run(script, order_of(1, 2, 0.0))
    assert [path is None for path in seen[:1]] == [not is_main]


@pytest.mark.parametrize(("strategy", "steps"), [("steps", [5, 10, 15]), ("epoch", [10])])
def test_saving_does_not_count_as_computing(
    strategy: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[None] = []

    @contextlib.contextmanager
    def paused(_: Session) -> Iterator[None]:
        pauses.append(None)
        yield
        pauses.pop()

    saved: list[tuple[int, int]] = []
    monkeypatch.setattr(Session, "paused", paused)
    launcher = Launcher()
    trainer = trainer_of(num_train_epochs=9, max_steps=-1, save_strategy=strategy, save_steps=5)
    trainer._save_checkpoint = lambda *_: saved.append((trainer.state.global_step, len(pauses)))
    trainer.add_callback(BlsgdCallback(trainer))
    launcher.run(trainer.train, *(order_of(k, 5, k / 4) for k in (1, 2, 3)))
    assert saved[: len(steps)] == [(step, 1) for step in steps]


def load_weight(folder: Path) -> float:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["weight"].item()


def test_the_run_evaluates() -> None:
    launcher, trainer = Launcher(), trainer_of(eval_strategy="steps", eval_steps=20)
    trainer.add_callback(BlsgdCallback(trainer))
    evaluation = EvaluateOrder(0, 0, 1, arrays_of(0.5))
    launcher.run(trainer.train, order_of(1, 2, 0.2), evaluation, order_of(2, 2, 0.4))
    info = launcher.exchange.joined.result().info
    assert (info.evaluate_every, info.metric_name, info.metric_mode) == (80, "loss", "min")
    assert launcher.figures == {"loss": 0.25}
    # Not once more by the Trainer.
    assert sum("eval_loss" in row for row in trainer.state.log_history) == 1


def test_a_worker_that_only_evaluates_does_not_train() -> None:
    launcher = Launcher(is_main=False, role="evaluate")
    trainer = trainer_of(eval_strategy="epoch")
    trainer.add_callback(BlsgdCallback(trainer))
    launcher.run(trainer.train, EvaluateOrder(0, 0, 1, arrays_of(0.5)))
    assert launcher.figures == {"loss": 0.25}
    assert trainer.model.seen == []
    assert trainer.model.weight.item() == 0.75


def test_the_trainer_of_the_main_worker_chooses_the_best_model() -> None:
    launcher = Launcher()
    trainer = trainer_of(
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
    )
    trainer.add_callback(transformers.EarlyStoppingCallback(1))  # has no effect
    trainer.add_callback(BlsgdCallback(trainer))
    given = (order_of(n, 3, n / 4, value) for n, value in ((1, 0.0), (2, 1.0), (3, 0.2)))
    launcher.run(trainer.train, *given)
    assert launcher.exchange.joined.result().info.evaluate_every == -1
    log = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [(row["step"], row["eval_loss"]) for row in log] == [
        (3, 0.0),
        (6, pytest.approx(0.64)),
        (9, 0.0625),
    ]
    assert trainer.model.weight.item() == 1.0
    assert json.loads(Path("out/checkpoint-9/trainer_state.json").read_text())["best_global_step"]


def test_the_trainer_uses_the_device_of_the_worker() -> None:
    trainer = trainer_of()
    trainer.args._n_gpu = 2  # as on a machine with two GPUs, where it would use DataParallel
    Launcher("meta")  # the only other device that every machine has
    BlsgdCallback(trainer)
    assert trainer.args.device.type == trainer.accelerator.device.type == "meta"
    assert trainer.args.n_gpu == 0
    assert trainer.get_train_dataloader().device.type == "meta"


class Stream(torch.utils.data.IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size = True; give batch= per worker"),
        ({"train_dataset": Stream()}, "train_dataset has no length, so the workers cannot share"),
        ({"gradient_accumulation_steps": 4}, "batch=6 must be a multiple of gradient_accum"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    trainer = trainer_of(**arguments)
    BlsgdCallback(trainer)  # not without the launcher
    Launcher(batch_size=6)
    assert message in refusal(BlsgdCallback, trainer)


def test_a_derived_class_with_its_own_sampler_is_refused() -> None:
    trainer = trainer_of()
    trainer.__class__ = type("Own", (type(trainer),), {"_get_train_sampler": lambda *_: None})
    Launcher()
    assert "Own: it has its own sampler" in refusal(BlsgdCallback, trainer)


@pytest.mark.filterwarnings("ignore")  # trl 1.16 uses deprecated names of transformers
def test_the_trainer_of_trl() -> None:
    trl = pytest.importorskip("trl")
    tokenizers, datasets = pytest.importorskip("tokenizers"), pytest.importorskip("datasets")
    texts = [f"{a} plus {b} is {a + b}" for a in range(5) for b in range(5)]
    words = ["<pad>", "<eos>", *sorted({word for text in texts for word in text.split()})]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=len(words), **shape, num_attention_heads=1, max_position_embeddings=16
    )
    launcher = Launcher()
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        trl.SFTConfig(
            "out",
            max_steps=5,
            per_device_train_batch_size=4,
            save_strategy="no",
            eval_strategy="epoch",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        eval_dataset=datasets.Dataset.from_dict({"text": texts[:5]}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.add_callback(BlsgdCallback(trainer))
    arrays = state_record(trainer.model)
    given = [replace(order_of(n, 5, n / 4), arrays=arrays) for n in (1, 2, 3)]
    evaluation = EvaluateOrder(0, 0, 1, arrays)
    launcher.run(trainer.train, *given, evaluation, final=arrays)
    assert [(r.completed_steps, r.num_examples) for r in launcher.reports] == [(5, 20)] * 3
    assert {"loss", "mean_token_accuracy"} <= launcher.figures.keys()
    assert trainer.state.global_step == 15
