"""Make a task's data ready before a run, and say so in a line: ``blsgd prepare``."""

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..data.entry import Prepared, UnusableError
from ..data.seal import check_content
from . import OPTIONS, TASKS, load_task, refuse_set

_log = logging.getLogger(__name__)


def prepare_task(
    name: str, data: str = "", model: str = "", again: bool = False, **options: Any
) -> str:
    """Prepare the data of a task, and return a line that says what there is.

    A task whose data can be prepared has a function ``prepare`` beside it in its module, with
    the same parameters and ``again``, which returns `Prepared`. It needs no weights. What was
    ready is read once and compared with what was written: a run looks at the sizes only.

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
    found = _preparation(name, {**OPTIONS, **options})
    if found is None:
        task = load_task(name, data, model, **options)
        ready = f"{task.num_train:,} training and {task.num_test:,} test samples"
        kept = "" if name in TASKS else ", as its own code makes them"
        return f"{name}: {ready}{kept}; nothing has to be prepared"
    prepare, known = found
    prepared = prepare(data, model, again=again, **known)
    try:
        check_content(prepared.folder)
    except UnusableError as error:
        _log.warning("%s is damaged (%s); preparing it again", prepared.folder, error)
        prepared = prepare(data, model, again=True, **known)
    return _told(name, prepared)


def _preparation(
    name: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Prepared], Mapping[str, Any]] | None:
    """Return how a task prepares its data, with the options that change them."""
    if name not in TASKS:
        return None
    module_name, _, function_name = TASKS[name].partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, "prepare"):
        return None
    of_task = inspect.signature(getattr(module, function_name)).parameters
    refuse_set(name, {key: value for key, value in options.items() if key not in of_task})
    of_data = inspect.signature(module.prepare).parameters
    return module.prepare, {key: value for key, value in options.items() if key in of_data}


def _told(name: str, found: Prepared) -> str:
    bad = sum(found.skipped.values())
    left_out = f", {bad:,} that cannot be read left out" if bad else ""
    return (
        f"{name}: {len(found.train[1]):,} training and {len(found.test[1]):,} test {found.noun} "
        f"of {len(found.class_names)} classes{left_out}, ready in {found.folder}"
    )
