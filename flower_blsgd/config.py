"""The settings of a run: the only source of their names, defaults and rules.

Flower's run config is flat, with keys in kebab-case. Every engine reads the same file. ``make
format`` writes the defaults into pyproject.toml, and the names and types into ``settings.py``
(scripts/write_defaults.py).
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from .algorithm.catalog import (
    ALGORITHMS,
    CUSTOM_PARTS,
    RELEASED_SAMPLERS,
    SAMPLERS,
    SELECTIONS,
    STEPS,
    TRAIN_ON,
    WEIGHTS,
    Choices,
)
from .algorithm.epoch_plan import EpochMode
from .algorithm.local_steps import FAST_SPEED_RATIO, Clock
from .algorithm.outer_optimizer import OUTER_OPTIMIZERS
from .algorithm.sampling import HIGH_LOSS_RATIO, TierName
from .algorithm.schedules import LearningRate, Schedule, parse_decay
from .data.libraries import split_torchvision
from .errors import UsageError, nearest
from .fields import FieldError, reader, type_name
from .protocol import MOMENTUM_POLICIES, Average
from .tasks import GIVEN_IN_PYTHON, TASK_OPTIONS

Value = bool | int | float | str

_LENGTH = ("epochs", "seconds", "rounds", "samples", "stop-at-accuracy", "patience")
_DEVICES = ("workers", "min-workers", "threads", "loader-workers", "micro-batch-size")
_COMPUTING = ("data", "channels-last", "compile", "transport", "stream-address")
_RESULTS = ("checkpoint-minutes", "keep-checkpoints", "trace", "tensorboard")
_EVALUATION = ("evaluate-every-epochs", "evaluate-on")

CHANGEABLE = _LENGTH + _DEVICES + _COMPUTING + _EVALUATION + _RESULTS
"""Settings that may change on resuming: the length of the run, and where and how it computes."""

_GONE = ("profile",)
"""Settings of 0.1.0 that no longer exist."""

_OPTIMIZER = ("learning_rate", "schedule", "decay_epochs", "warmup_epochs", "weight_decay")
_BATCHES = ("micro_batch_size", "loader_workers", "clip_norm", "precision", "channels_last")

_OF_TASKS = ("data", "model", "validation_share", "compile", "trace", *_BATCHES, *_OPTIMIZER)
"""Settings that have no effect on a training script."""


def _setting(
    default: Any,
    rule: str = "",
    check: Callable[[Any], bool] | None = None,
    names: Sequence[str] = (),
) -> Any:
    rules = {"rule": rule, "check": check, "names": names}
    return dataclasses.field(default=default, metadata=rules)


def _path() -> Any:
    return dataclasses.field(default="", metadata={"is_path": True})


def _one_of(default: str, *allowed: str) -> Any:
    return _setting(default, f"one of {', '.join(allowed)}", lambda v: v in allowed, allowed)


def _part(*known: str, custom: bool = False) -> Any:
    rule = f"empty, or one of {', '.join(known)}" + ", or module:Class" * custom
    return _setting("", rule, lambda v: not v or v in known or (custom and ":" in v))


def _at_least(minimum: int | float, default: Any) -> Any:
    return _setting(default, f"at least {minimum}", lambda v: v >= minimum)


def _steps(default: str) -> Any:
    def fits(value: int | str) -> bool:
        return value in (default, "auto") or (isinstance(value, int) and value >= 1)

    return _setting(default, "empty, " * (not default) + 'at least 1, or "auto"', fits)


def _share(default: float) -> Any:
    return _setting(default, "in [0, 1)", lambda v: 0 <= v < 1)


def _above_zero(default: float) -> Any:
    return _setting(default, "a number above 0", lambda v: v > 0)


def _is_address(text: str) -> bool:
    port = text.rpartition(":")[2]
    return not text or (
        ":" in text and bool(re.fullmatch("[0-9]{1,5}", port)) and 0 < int(port) < 65_536
    )


def _is_dropout(value: float | str) -> bool:
    return value == "auto" or (isinstance(value, float) and 0 <= value < 1)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, checked on creation.

    Field names are in snake_case, keys in files and on the command line in kebab-case.
    docs/reference/settings.md explains each setting.

    UsageError if a value has the wrong type or is out of range.
    """

    name: str = _setting(
        "", "letters, digits, '.', '-', '_'", lambda v: not re.search(r"[^\w.-]", v)
    )
    task: str = _setting("digits", "a task's name or module:function", bool)
    data: str = _path()
    model: str = _path()
    skip_bad: bool = TASK_OPTIONS["skip_bad"]
    split: str = _setting(
        TASK_OPTIONS["split"],
        'empty, "official" or "paper"',
        lambda v: v in ("", "official", "paper"),
    )
    max_samples: int = _at_least(0, TASK_OPTIONS["max_samples"])
    image_size: int = _at_least(0, TASK_OPTIONS["image_size"])
    max_tokens: int = _at_least(8, TASK_OPTIONS["max_tokens"])
    lora_rank: int = _at_least(0, TASK_OPTIONS["lora_rank"])
    pretrained: bool = TASK_OPTIONS["pretrained"]
    dropout: float | str = _setting(TASK_OPTIONS["dropout"], 'in [0, 1), or "auto"', _is_dropout)
    validation_share: float = _share(0.0)
    algorithm: str = _one_of("recommended", *ALGORITHMS)
    steps: str = _part(*STEPS, custom=True)
    sampler: str = _part(*SAMPLERS, *RELEASED_SAMPLERS, custom=True)
    weights: str = _part(*WEIGHTS, custom=True)
    train_on: str = _part(*TRAIN_ON)
    epochs: int = _at_least(1, 15)
    seconds: float = _at_least(0, 0.0)
    rounds: int = _at_least(0, 0)
    samples: int = _at_least(0, 0)
    epoch: str = _part(*get_args(EpochMode))
    batch_size: int = _at_least(2, 16)
    micro_batch_size: int = _at_least(0, 0)
    learning_rate: float = _above_zero(0.05)
    schedule: Schedule = _one_of("steps", *get_args(Schedule))
    decay_epochs: str = "60%, 80%"
    warmup_epochs: float = _at_least(0, 0.0)
    optimizer: str = _one_of("sgd", "sgd", "adamw")
    momentum: float = _share(0.9)
    nesterov: bool = False
    momentum_buffers: str = _part(*MOMENTUM_POLICIES)
    average: str = _part(*get_args(Average))
    outer_optimizer: str = _one_of("none", *OUTER_OPTIMIZERS)
    outer_learning_rate: float = _above_zero(0.7)
    outer_momentum: float = _share(0.9)
    weight_decay: float = _at_least(0, 1e-4)
    clip_norm: float = _at_least(0, 0.0)
    workers: str = "auto"
    min_workers: int = _at_least(1, 2)
    local_steps_fast: int | str = _steps("")
    local_steps_slow: int | str = _steps("auto")
    shrink_slow_batch: bool = True
    overlap: bool = False
    rebalance: bool = False
    fast_threshold: float = _share(FAST_SPEED_RATIO)
    high_loss_ratio: float = _setting(HIGH_LOSS_RATIO, "in [0, 1]", lambda v: 0 <= v <= 1)
    high_loss_to: str = _part(*get_args(TierName))
    candidate_factor: int = _at_least(1, 4)
    selection: str = _part(*SELECTIONS, custom=True)
    deadline_seconds: float = _at_least(0, 0.0)
    transport: str = _one_of("auto", "auto", "stream", "messages")
    stream_address: str = _setting("", 'empty, "HOST:PORT" or ":PORT"', _is_address)
    wire_dtype: str = _one_of("float32", "float32", "bfloat16", "float16")
    clock: Clock = _one_of("wall", *get_args(Clock))
    seed: int = _at_least(0, 0)
    threads: int = _at_least(0, 0)
    loader_workers: int | str = _setting(
        "auto", 'at least 0, or "auto"', lambda v: v == "auto" or (isinstance(v, int) and v >= 0)
    )
    precision: str = _one_of("float32", "float32", "ieee", "tf32", "bfloat16", "float16")
    channels_last: bool = False
    compile: bool = False
    evaluate_every_epochs: int = _at_least(1, 1)
    evaluate_on: str = _one_of("workers", "workers", "server")
    stop_at_accuracy: float = _setting(0.0, "in [0, 1]", lambda v: 0 <= v <= 1)
    patience: int = _at_least(0, 0)
    checkpoint_minutes: float = _above_zero(10.0)
    keep_checkpoints: int = _at_least(0, 2)
    trace: bool = False
    tensorboard: bool = False
    out: str = _path()
    resume: str = _path()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            key = field.name.replace("_", "-")
            wanted: Any = str if get_origin(field.type) is Literal else field.type
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise UsageError(f"{key} must be {_type_name(wanted)} below 2**63")
            if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
                raise UsageError(
                    f"{key} = {value!r} must be a string that can be written to a file"
                )
            try:
                converted = _of_type(value, wanted)
            except FieldError:
                raise UsageError(f"{key} = {value!r} must be {_type_name(wanted)}") from None
            if field.metadata.get("is_path"):
                converted = os.path.expanduser(converted)
                if converted.startswith("~"):
                    raise UsageError(f"{key} = {value!r}: no such home folder; or write ./{value}")
            object.__setattr__(self, field.name, converted)
            _check_range(field, key, converted)
        try:
            parse_decay(self.decay_epochs)
        except ValueError as error:
            raise UsageError(
                f"decay-epochs = {self.decay_epochs!r}: {error}; write it like "
                '"60%, 80%" or "60, 80"'
            ) from None
        if self.choices.local_steps_fast == "auto" and self.choices.epoch == "table":
            raise UsageError(
                'local-steps-fast = "auto" cannot be combined with epoch = "table", which '
                'reproduces numbers of the paper; set a number, or epoch = "samples"'
            )
        if self.choices.average == "gradients" and self.wire_dtype != "float32":
            raise UsageError(
                f'wire-dtype = "{self.wire_dtype}" sends changes of models, not gradients; use '
                '"float32", or average = "models"'
            )
        sends_state = self.choices.momentum_buffers == "average"
        is_sgd = self.optimizer == "sgd" and not self.is_script
        if self.wire_dtype == "float16" and sends_state and not is_sgd:  # squares of gradients
            raise UsageError(
                'wire-dtype = "float16" is too coarse for the state of the optimizer, which '
                'momentum-buffers = "average" sends; use "bfloat16" or "float32"'
            )
        parts = self.choices.average, self.choices.steps
        if parts == ("gradients", "one-by-throughput") and self.is_script:
            raise UsageError(
                'steps = "one-by-throughput" changes batch sizes, but scripts draw batches of one '
                'size; use "one", and batch= for each worker'
            )
        if self.nesterov and self.momentum == 0:
            raise UsageError("nesterov = true requires momentum above 0, but momentum = 0.0")

    @classmethod
    def from_run_config(cls, values: Mapping[str, Value], saved: bool = False) -> "RunConfig":
        """Read a flat run config with keys in kebab-case; missing keys have their default.

        In that of a `saved` run, settings that no longer exist are ignored. UsageError if a key is
        unknown or a value is invalid.
        """
        known = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(cls)}
        if saved:
            values = {key: value for key, value in values.items() if key not in _GONE}
        for key, value in values.items():
            if key not in known:
                raise UsageError(f"{key} = {value!r}: unknown key; {nearest(key, known)}")
        settings: dict[str, Any] = {known[key]: value for key, value in values.items()}
        if settings.get("steps") == "by-speed":  # of 0.1.0, where this was another policy
            settings["steps"] = "system-aware"
        return cls(**settings)

    def to_run_config(self) -> dict[str, Value]:
        """Return all settings with keys in kebab-case."""
        return {name.replace("_", "-"): value for name, value in dataclasses.asdict(self).items()}

    def with_absolute_paths(self) -> "RunConfig":
        """Return the settings of a run that can be continued in any folder.

        Names, such as those of the HF hub, and what does not exist stay as they are. A model is a
        folder if it has a slash.
        """
        paths: dict[str, Any] = {"data": self.data}
        if "/" in self.model:
            paths["model"] = self.model
        paths = {k: str(Path(v).absolute()) for k, v in paths.items() if v and os.path.exists(v)}
        name, folder = split_torchvision(self.data)
        if name:
            paths["data"] = f"{name}:{Path(os.path.expanduser(folder)).absolute()}"
        return replace(self, **paths)

    @property
    def choices(self) -> Choices:
        """The parts of the algorithm: those of its preset, unless the user set others."""
        preset = ALGORITHMS[self.algorithm]
        names = (field.name for field in dataclasses.fields(preset))
        chosen = {name: getattr(self, name) or getattr(preset, name) for name in names}
        if chosen["average"] == "gradients" and not self.steps:
            # A script draws batches of one size.
            chosen["steps"] = "one" if self.is_script else "one-by-throughput"
        return Choices(**chosen)

    @property
    def is_script(self) -> bool:
        """Whether the task is a training script of ``blsgd launch``."""
        return self.task.endswith(".py") or self.task.startswith("-m ")

    @property
    def objects(self) -> list[str]:
        """The settings that were given as objects in Python, which are not saved."""
        values = {name: getattr(self, name) for name in ("task", *CUSTOM_PARTS)}
        return [name for name, value in values.items() if value.split(":")[0] == GIVEN_IN_PYTHON]

    def check_script(self) -> None:
        """Raise UsageError for a setting without effect on a script; resumed runs may have one."""
        ignored = [*_OF_TASKS, *TASK_OPTIONS]
        if not self.is_script:
            ignored.append("task")
        if self.selection in ("infobatch", "importance-sampling"):  # weights of samples
            ignored.append("selection")
        if self.choices.weights != "normalized":  # which depends on these
            ignored += ["optimizer", "momentum", "nesterov"]
        for name in [] if self.resume else ignored:
            if (value := getattr(self, name)) != getattr(RunConfig, name):
                raise UsageError(
                    f"{name.replace('_', '-')} = {json.dumps(value)}: a script of blsgd launch "
                    "decides this itself; leave the setting out"
                )

    @property
    def task_options(self) -> dict[str, Any]:
        """The task options: keyword arguments of `tasks.load_task`."""
        return {name: getattr(self, name) for name in TASK_OPTIONS}

    @property
    def task_settings(self) -> dict[str, Any]:
        """All settings that the task depends on: keyword arguments of `tasks.load_task`."""
        names = ("data", "model", "validation_share", "seed", *TASK_OPTIONS)
        return {"name": self.task, **{name: getattr(self, name) for name in names}}

    @property
    def evaluation_batch_size(self) -> int:
        """Samples per evaluation batch, unless the task sets it: four training batches."""
        return 4 * min(self.batch_size, self.micro_batch_size or self.batch_size)

    @property
    def evaluation_settings(self) -> dict[str, Any]:
        """Settings of an evaluation: keyword arguments of `Task.evaluate`."""
        return {
            "batch_size": self.evaluation_batch_size,
            "precision": self.precision,
            "channels_last": self.channels_last,
        }

    @property
    def learning_rate_schedule(self) -> LearningRate:
        """The learning rate with schedule and warm-up."""
        decays = parse_decay(self.decay_epochs)
        return LearningRate(
            self.learning_rate, *decays, warmup_epochs=self.warmup_epochs, schedule=self.schedule
        )


def check_ranges(**values: Any) -> None:
    """Raise UsageError if an argument is out of the range of the setting of the same name."""
    for field in dataclasses.fields(RunConfig):
        if field.name in values:
            _check_range(field, field.name, values[field.name])


def python_names(message: str, *names: str) -> str:
    """Return a message, which names settings as files do, with these names as in Python.

    >>> python_names("nesterov = true: set batch-size; blsgd run -s batch-size=2")
    'nesterov = True: set batch_size; blsgd run -s batch-size=2'
    """
    known = (*names, *(field.name for field in dataclasses.fields(RunConfig)))
    keys = "|".join(re.escape(name.replace("_", "-")) for name in known if "_" in name)
    message = re.sub(
        rf"(?<![\w./-])(?<!-s )({keys})(?![\w-])", lambda m: m[0].replace("-", "_"), message
    )
    return re.sub(r"(?<= = )(true|false)\b", lambda m: m[0].capitalize(), message)


def _check_range(field: "dataclasses.Field[Any]", key: str, value: Value) -> None:
    rule, check = field.metadata.get("rule", ""), field.metadata.get("check")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key} = {value!r} must be {rule or 'a finite number'}")
    if check is None or check(value):
        return
    if isinstance(value, str) and (names := field.metadata["names"]):
        raise UsageError(f"{key} = {value!r} is not known; {nearest(value, names)}")
    raise UsageError(f"{key} = {value!r} must be {rule}")


def _of_type(value: Any, kind: Any) -> Any:
    """Return the value as a type; FieldError if it has another one.

    A number is also read from a string of the command line, where the setting may be a string.
    """
    if str not in get_args(kind):
        return reader(kind)(value)
    number = get_args(kind)[0]
    with contextlib.suppress(ValueError):
        is_text = isinstance(value, str) and (number is float or re.fullmatch("[0-9]{1,18}", value))
        return reader(number)(number(value) if is_text else value)
    return reader(str)(value)


def _type_name(kind: Any) -> str:
    return f'{type_name(get_args(kind)[0])} or "auto"' if str in get_args(kind) else type_name(kind)


def task_of_script(script: str, *arguments: str) -> tuple[str, str]:
    """Return the task and the name of a run of a training script, or of ``"-m", MODULE``.

    UsageError if Python cannot run it.
    """
    if script == "-m":
        module = "".join(arguments[:1])
        folders = [str(Path.cwd()), *sys.path]
        if not module or PathFinder.find_spec(module.partition(".")[0], folders) is None:
            raise UsageError(f"-m {module}: Python finds no such module from this folder")
        return f"-m {module}", module.rpartition(".")[2]
    if not Path(script).is_file():
        raise UsageError(f"script {script!r} is not a file")
    if script.endswith(".ipynb"):
        convert = shlex.join(["jupyter", "nbconvert", "--to", "script", script])
        raise UsageError(f"script {script!r} is a notebook; convert it first: {convert}")
    if not script.endswith(".py"):
        raise UsageError(f"script {script!r} must have a name that ends in .py")
    return Path(script).name, re.sub(r"[^\w.-]", "-", Path(script).stem)
