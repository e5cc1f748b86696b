"""Names of the built-in tasks, and the options that a task may accept."""

from collections.abc import Mapping
from typing import Any

TASKS: Mapping[str, str] = {
    "digits": "digits",
    "images": "images",
    "text": "texts",
    "lm": "lm",
    "cifar10": "images",
    "cifar100": "images",
    "flowers102": "images",
    "tiny-imagenet": "images",
    "ag-news": "texts",
}
"""The built-in tasks, and the module of this package whose `BENCHMARKS` contains each."""

GIVEN_IN_PYTHON = "given-in-python"
"""Name of a task that was given as an object."""

TASK_OPTIONS: Mapping[str, Any] = {
    "skip_bad": False,
    "split": "",
    "max_samples": 0,
    "image_size": 0,
    "max_tokens": 128,
    "lora_rank": 0,
    "pretrained": True,
    "dropout": "auto",
}
"""Settings that a task may accept in addition to data and model, with their defaults.

A custom task accepts one if its function has a parameter of that name. Setting one that the task
does not accept is an error.
"""
