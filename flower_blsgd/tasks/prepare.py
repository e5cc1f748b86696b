"""Make a task's data ready before a run, and say so in a line: ``blsgd prepare``."""

from typing import Any

from ..data.cache import prepared
from . import TASKS, load_model, load_task

_IMAGE_TASKS = ("cifar10",)


def prepare_task(
    name: str, data: str = "", model: str = "", again: bool = False, **options: Any
) -> str:
    """Prepare the data of a task, and return a line that says what there is.

    Parameters
    ----------
    name : str
        The task's name.
    data : str (default: "")
        Where its data is.
    model : str (default: "")
        Which model; refused if the task does not know it.
    again : bool (default: False)
        Also if it is ready.
    **options
        As of `load_task`.

    Raises
    ------
    UsageError
        If the data cannot be had, or there is no such task or model.
    """
    if name not in _IMAGE_TASKS:
        task = load_task(name, data, model, **options)
        ready = f"{task.num_train:,} training and {task.num_test:,} test samples"
        kept = "" if name in TASKS else ", as its own code makes them"
        return f"{name}: {ready}{kept}; nothing has to be prepared"
    if model:
        load_model(name, model)  # an unknown one is refused before anything is decoded
    images = prepared(name, data, options.get("skip_bad", False), again)
    bad = sum(images.skipped.values())
    left_out = f", {bad:,} that cannot be decoded left out" if bad else ""
    return (
        f"{name}: {len(images.train[1]):,} training and {len(images.test[1]):,} test images of "
        f"{len(images.class_names)} classes{left_out}, ready in {images.folder}"
    )
