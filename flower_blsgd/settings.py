"""Keyword arguments of `train`; generated from config.py by ``make format``."""

from os import PathLike
from typing import Literal, TypedDict

from .algorithm.averaging import Weighting
from .algorithm.local_steps import StepPolicy
from .algorithm.sampling import Sampler
from .algorithm.selection import Selection


class Settings(TypedDict, total=False):
    """Settings of a run, by their names in Python; docs/reference/settings.md explains each."""

    name: str
    data: str | PathLike[str]
    model: str | PathLike[str]
    skip_bad: bool
    split: str
    max_samples: int
    image_size: int
    max_tokens: int
    lora_rank: int
    pretrained: bool
    dropout: float | str
    validation_share: float
    algorithm: str
    steps: str | StepPolicy
    sampler: str | Sampler
    weights: str | Weighting
    train_on: str
    epochs: int
    seconds: float
    rounds: int
    samples: int
    epoch: str
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    schedule: Literal["steps", "cosine", "linear"]
    decay_epochs: str
    warmup_epochs: float
    optimizer: str
    momentum: float
    nesterov: bool
    momentum_buffers: str
    average: str
    outer_optimizer: str
    outer_learning_rate: float
    outer_momentum: float
    weight_decay: float
    clip_norm: float
    min_workers: int
    local_steps_fast: int | str
    local_steps_slow: int | str
    shrink_slow_batch: bool
    overlap: bool
    rebalance: bool
    fast_threshold: float
    high_loss_ratio: float
    high_loss_to: str
    candidate_factor: int
    selection: str | Selection
    deadline_seconds: float
    transport: str
    stream_address: str
    wire_dtype: str
    clock: Literal["wall", "device"]
    seed: int
    threads: int
    loader_workers: int | str
    precision: str
    channels_last: bool
    compile: bool
    evaluate_every_epochs: int
    evaluate_on: str
    stop_at_accuracy: float
    patience: int
    checkpoint_minutes: float
    keep_checkpoints: int
    trace: bool
    tensorboard: bool
    out: str | PathLike[str]
