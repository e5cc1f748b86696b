"""Prepare a task's data before a run: ``blsgd prepare``."""

import logging
from typing import Any

from ..data.cache import UnusableError, check_content
from . import OPTIONS, TASKS, load_benchmark, load_task, refuse_set

_log = logging.getLogger(__name__)


def prepare_task(
    name: str, data: str = "", model: str = "", again: bool = False, **options: Any
) -> str:
    """Prepare the data of a task, and return a line that says what there is.

    See `Benchmark.prepare`. What was ready is read once and compared with what was written: a run
    looks at the sizes only.

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
    options = {**OPTIONS, **options}
    benchmark = load_benchmark(name) if name in TASKS else None
    prepared = None
    if benchmark is not None:
        refuse_set(name, options, benchmark.options)
        prepared = benchmark.prepare(data, model, options, again)
    if benchmark is None or prepared is None:
        task = load_task(name, data, model, **options)
        ready = f"{task.num_train:,} training and {task.num_test:,} test samples"
        kept = "" if benchmark else ", as its own code makes them"
        return f"{name}: {ready}{kept}; nothing has to be prepared"
    try:
        check_content(prepared.folder)
    except UnusableError as error:
        _log.warning("%s is damaged (%s); preparing it again", prepared.folder, error)
        prepared = benchmark.prepare(data, model, options, again=True) or prepared
    bad = sum(prepared.skipped.values())
    left_out = f", {bad:,} that cannot be read left out" if bad else ""
    return (
        f"{name}: {len(prepared.train[1]):,} training and {len(prepared.test[1]):,} test "
        f"{prepared.noun} of {len(prepared.class_names)} classes{left_out}, ready in "
        f"{prepared.folder}"
    )
