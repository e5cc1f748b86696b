"""Workers as users describe them: the table of options, and the grammar of the setting ``workers``.

Configs, the command line and SuperNodes share the grammar. A specification is a list of groups,
separated by ``;``. A group is ``[N x] DEVICE[:ids]``, followed by options in any order::

    8x cuda:0 fast; 2x cpu:0-15 slow steps=1; 1x cpu:16-19 slowdown=4

DEVICE is a torch device type. The ids of ``cpu`` are cores, which the N workers of a group split
evenly. The ids of an accelerator are device indices. The options are the fields of `WorkerOptions`;
the tier is written as ``fast`` or ``slow``.
"""

import functools
import itertools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ..errors import UsageError, nearest
from .interpreter import differences, interpreter
from .machine import Machine, format_ids, this_machine, torch_device

_LOG = logging.getLogger(__name__)

Tier = Literal["", "fast", "slow"]
Role = Literal["train", "evaluate"]
Precision = Literal["float32", "ieee", "tf32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

NodeConfig = Mapping[str, bool | float | int | str]

_LARGEST_ID = 9999
_DIGITS = "[0-9]{1,9}"
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?")


# --- the table of options ---------------------------------------------------------------------


def _row(
    default: float | str,
    key: str,
    meaning: str,
    least: float = 0,
    choices: Sequence[str] = (),
    optional: bool | str = True,
) -> Any:
    """Declare a row of the table; see `Option`. `optional` is for profiles, see `fields`."""
    row = functools.partial(Option, key, default, meaning, least, tuple(choices))
    return field(default=default, metadata={"key": key, "row": row, "optional": optional})


@dataclass(frozen=True)
class Option:
    """One worker option: a row of the table.

    `key` is its name in the setting ``workers``, in a node config and in a profile on the wire;
    `field` is the name of the attribute of `WorkerOptions`. `default` is the value of an option
    that is not given; all values have its type. `meaning` is the description in the docs. `least`
    is the smallest allowed number; 0 allows all numbers above 0. Empty `choices` allow all texts.
    """

    key: str
    default: float | str
    meaning: str
    least: float
    choices: tuple[str, ...]
    field: str

    @property
    def values(self) -> str:
        """The allowed values, such as ``"N (N >= 1)"``."""
        if isinstance(self.default, str):
            return "|".join(self.choices) or "TEXT"
        number = "N" if isinstance(self.default, int) else "X"
        limit = f">= {self.least}" if self.least else "> 0"
        return f"{number} ({number} {limit})"

    def accepts(self, value: Any) -> bool:
        """Return whether a value of the right type is allowed, or stands for "not given"."""
        if value == self.default:
            return True
        if isinstance(self.default, str):
            return value in self.choices if self.choices else bool(value)
        return bool(0 < value < math.inf and value >= self.least)

    def read(self, text: str) -> float | str | None:
        """Return the value that a text stands for; None if it is not allowed."""
        value: float | str = text
        if isinstance(self.default, int):
            value = int(text) if re.fullmatch(_DIGITS, text) else 0
        elif isinstance(self.default, float):
            value = float(text) if _NUMBER.fullmatch(text) else 0.0
        return value if value and self.accepts(value) else None


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of a worker: one field per row of the table.

    The grammar, the node config, the profile that a node reports, ``blsgd devices`` and the docs
    follow from these fields. A default stands for "not given".
    """

    tier: Tier = _row(
        "", "tier", "tier of the worker; derived from its speed by default",
        choices=("fast", "slow"),
    )  # fmt: skip
    steps: int = _row(0, "steps", "local steps per round", 1)
    batch_size: int = _row(0, "batch", "samples per step, instead of the setting `batch-size`", 2)
    precision: str = _row(
        "", "precision", "precision, instead of the setting `precision`", choices=PRECISIONS
    )
    role: Role = _row(
        "train", "role", "`evaluate`: evaluate the model while the others train",
        choices=get_args(Role),
    )  # fmt: skip
    slowdown: float = _row(1.0, "slowdown", "emulate a device that is slower by this factor", 1)
    seconds_per_step: float = _row(
        0.0, "seconds-per-step", "seconds per step with its batch size; measured by default"
    )
    seconds_per_step_alone: float = _row(
        0.0, "seconds-per-step-alone", "seconds per step while no other worker computes"
    )
    name: str = _row(
        "", "name", "name in logs and results; identifies the worker when it reconnects"
    )

    python: str = _row(
        "",
        "python",
        "interpreter of the worker's process, for example of an environment with another torch",
        optional="unwritten",
    )

    def given_options(self) -> dict[str, bool | float | int | str]:
        """Return the options that are given, by key."""
        values = {option.key: getattr(self, option.field) for option in OPTIONS.values()}
        return {key: value for key, value in values.items() if value != OPTIONS[key].default}


OPTIONS: Mapping[str, Option] = {
    f.metadata["key"]: f.metadata["row"](f.name) for f in fields(WorkerOptions)
}
"""The rows of the table, by key."""

_SYNTAX = ", ".join(
    " or ".join(option.choices) if key == "tier" else f"{key}={option.values}"
    for key, option in OPTIONS.items()
)


@dataclass(frozen=True)
class WorkerSpec(WorkerOptions):
    """A worker as the user describes it: a device and the options of `WorkerOptions`.

    Parameters
    ----------
    device : str
        A torch device without cores, as all processes of the run name it: ``"cpu"``, ``"cuda:0"``,
        ``"mps"``.
    cores : tuple of int (default: ())
        CPU cores that a ``cpu`` worker is pinned to, ascending.
    """

    device: str
    cores: tuple[int, ...] = ()

    @property
    def device_with_cores(self) -> str:
        """The device in the form of the grammar, such as ``"cpu:0-3"`` or ``"cuda:1"``."""
        return f"{self.device}:{format_ids(self.cores)}" if self.cores else self.device

    @property
    def text(self) -> str:
        """Specification of the worker, such as ``"cpu:0-3 fast slowdown=4"``."""
        options = self.given_options()
        tier = [str(options.pop("tier"))] if self.tier else []
        texts = [f"{key}={_shortest(value)}" for key, value in options.items()]
        return " ".join([self.device_with_cores, *tier, *texts])

    @property
    def torch_device(self) -> str:
        """The device in this process, which is ``"cuda:0"`` if it sees only one card."""
        return torch_device(self.device)

    def to_node_config(
        self, workers: Sequence["WorkerSpec"] = ()
    ) -> dict[str, bool | float | int | str]:
        """Return the config of a node that runs this worker, one of the `workers` of a machine."""
        config = {"device": self.device_with_cores, **self.given_options()}
        same = (other for other in workers if other.python == self.python)
        on_device = sum(other.device == self.device != "cpu" for other in same)
        return config | ({WORKERS_ON_DEVICE: on_device} if on_device > 1 else {})


def _shortest(value: float | str) -> float | str:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_workers_of_script(workers: Sequence[WorkerSpec]) -> None:
    """Raise UsageError for an option of workers that a training script decides itself."""
    for worker in workers:
        if worker.precision:
            raise UsageError(f"workers: precision={worker.precision}: a script decides this itself")


OWN_PYTHON = "BLSGD_PYTHON"
"""Environment variable of a worker's process: the ``python=`` with which it was started."""


def check_python(worker: WorkerSpec) -> None:
    """Raise UsageError if a worker's process has not been started by its ``python=``."""
    if worker.python not in ("", os.environ.get(OWN_PYTHON)):
        raise UsageError(
            f"python={worker.python}: only blsgd and nodes with several devices start a worker of "
            "another interpreter; start this SuperNode in that environment"
        )


# --- node configs -----------------------------------------------------------------------------

DEVICES = "devices"
"""Key of a node config that names several devices behind one node."""

WORKERS_ON_DEVICE = "workers-on-device"
"""Key of a node config: number of workers that share the memory of an accelerator; 1 by default."""

_NODE_KEYS = {"device", DEVICES, WORKERS_ON_DEVICE, "partition-id", "num-partitions"}
_NODE_KEYS |= {"superlink", "script"}


def worker_from_node_config(node_config: NodeConfig, machine: Machine | None = None) -> WorkerSpec:
    """Read the worker of a SuperNode from ``--node-config "device='cpu:0' tier='fast'"``.

    UsageError if a value cannot be read or the device is missing.
    """
    workers = parse_workers(str(node_config["device"]), machine)
    if len(workers) != 1:
        raise UsageError(f"device = {node_config['device']!r} must name one worker")
    given = {}
    for key in OPTIONS.keys() & node_config.keys():
        option = OPTIONS[key]
        value = node_config[key]
        if value == "":
            continue
        given[option.field] = option.read(str(value))
        if given[option.field] is None:
            raise UsageError(
                f"{key} = {value!r} in the node config: expected {option.values}, or leave it out"
            )
    return replace(workers[0], **given)  # type: ignore[arg-type]


def keys_of_the_app(node_config: NodeConfig) -> dict[str, bool | float | int | str]:
    """Return what this library does not know in a node config: a custom ClientApp may have keys."""
    return {k: v for k, v in node_config.items() if k not in _NODE_KEYS and k not in OPTIONS}


def warn_of_unknown_keys(node_config: NodeConfig) -> None:
    """Log each key of a node config that this library does not know."""
    for key in keys_of_the_app(node_config):
        hint = nearest(key, [*_NODE_KEYS, *OPTIONS])
        _LOG.warning("node config: flower-blsgd does not know the key %s; %s", key, hint)


# --- the grammar ------------------------------------------------------------------------------


def parse_workers(
    text: str, machine: Machine | None = None, anywhere: bool = False
) -> list[WorkerSpec]:
    """Read a worker specification and check it against a machine.

    Parameters
    ----------
    text : str
        The specification, or ``"auto"``.
    machine : Machine, optional
        The machine with the devices; this machine by default.
    anywhere : bool (default: False)
        Accept devices that the machine does not have, to plan for another machine.

    Returns
    -------
    list of WorkerSpec
        One per worker, in the order of the specification.

    Raises
    ------
    UsageError
        If the text cannot be read (the message gives the position), or a device is missing.
    """
    machine = machine or this_machine()
    if text.strip() == "auto":
        return auto_workers(machine)
    text = re.sub(r"\s", " ", text)  # a config may write it over several lines
    parts = [part for part in re.finditer("[^;]+", text) if part[0].strip()]
    groups = [_parse_group(text, part[0], part.start()) for part in parts]
    if not groups:
        raise UsageError(
            f'workers = "{text}" names no worker; try "1x cpu:0 fast; 1x cpu:1 slow" or "auto"'
        )
    workers = _expand(groups, machine)
    for worker in workers if not anywhere else ():
        _check_device(worker, machine)
    for name, count in Counter(worker.name for worker in workers).items():
        if name and count > 1:
            raise UsageError(f'workers: name={name} appears twice in "{text}"; names must differ')
    return workers


def workers_text(workers: Sequence[WorkerSpec]) -> str:
    """Return the specification of workers that `parse_workers` read."""
    return "; ".join(worker.text for worker in workers)


def auto_workers(machine: Machine) -> list[WorkerSpec]:
    """Return the workers of ``"auto"``.

    Each accelerator trains if torch can compute on it. One CPU worker evaluates on the cores that
    remain after one core per accelerator and one for the server, if any core remains. Without
    accelerators, the cores are split into a fast and a slow worker; a single core runs both.
    """
    cores = machine.cores
    usable = machine.usable_accelerators
    if not usable:
        half = (len(cores) + 1) // 2
        return [
            WorkerSpec("cpu", cores[:half], tier="fast"),
            WorkerSpec("cpu", cores[half:] or cores, tier="slow"),
        ]
    workers = [WorkerSpec(device) for device in usable]
    left = cores[len(workers) + 1 :]
    return [*workers, *([WorkerSpec("cpu", left, role="evaluate")] if left else [])]


def cores_note(workers: Sequence[WorkerSpec], machine: Machine | None = None) -> str:
    """Return notes on CPU cores that workers share or that are too few, and on unused cards.

    Each is a line; empty without any.
    """
    machine = machine or this_machine()
    num_cores = len(machine.cores)
    owners = Counter(core for worker in workers for core in worker.cores)
    others = [core for core in machine.cores if core not in owners]
    fed = sum(worker.device != "cpu" for worker in workers)
    # Accelerators are not queried for other CPU workers.
    may_be_auto = fed or list(workers) == auto_workers(Machine(machine.cores, ()))
    is_auto = may_be_auto and list(workers) == auto_workers(machine)
    notes = [machine.problem(device) for device in machine.accelerators] if is_auto else []
    need = "each accelerator worker needs one, and so does the server"
    if shared := [core for core, count in sorted(owners.items()) if count > 1]:
        notes.append(f"workers share CPU core {format_ids(shared)} and slow one another down")
    elif owners and 0 < fed >= len(others):
        notes.append(f"the CPU workers leave {len(others)} of {num_cores} cores: {need}")
    elif is_auto and not owners:
        notes.append(f"{num_cores} CPU cores are too few for a worker that evaluates: {need}")
    notes += [differences(p) for p in dict.fromkeys(w.python for w in workers) if p]
    return "\n".join(f"note: {note}" for note in notes if note)


def split_evenly(ids: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Split ids into consecutive parts whose lengths differ by at most 1; too few ids are shared.

    >>> split_evenly([0, 1, 2], 2), split_evenly([0, 1], 4)
    ([(0,), (1, 2)], [(0,), (0,), (1,), (1,)])
    """
    begins = [part * len(ids) // parts for part in range(parts + 1)]
    return [tuple(ids[a : max(b, a + 1)]) for a, b in itertools.pairwise(begins)]


@dataclass(frozen=True)
class _Group:
    count: int
    ids: tuple[int, ...]
    worker: WorkerSpec


def _parse_group(text: str, part: str, position: int) -> _Group:
    def refuse(token: str, start: int, expected: str) -> UsageError:
        at = position + start + 1
        return UsageError(
            f'workers: cannot read "{token}" at character {at} of "{text}"; expected {expected}'
        )

    # The count may be separate from its "x": "8x cpu" and "8 x cpu". "8xcpu" has no count.
    head = re.match(r"\s*(?:(\S+?)\s*x\s+)?(?=\S)", part)
    assert head is not None
    count = 1
    if head[1] is not None:
        if not re.fullmatch(_DIGITS, head[1]) or not 1 <= int(head[1]) <= _LARGEST_ID:
            raise refuse(head[1], head.start(1), "a number of workers, such as 2x")
        count = int(head[1])
    words = [(m[0], m.start()) for m in re.compile(r"\S+").finditer(part, head.end())]
    device, start = words[0]
    kind, colon, id_text = device.partition(":")
    if not re.fullmatch(r"[a-z]+", kind):
        raise refuse(device, start, "a device, such as cpu, cpu:0-3 or cuda:0")
    ids = _parse_ids(id_text)
    if ids is None or (colon and not ids):
        raise refuse(id_text, start + len(kind) + 1, "numbers, such as 0, 0-3 or 0,2,4")
    given: dict[str, Any] = {}
    for word, start in words[1:]:
        is_tier = word in OPTIONS["tier"].choices
        key, _, value = f"tier={word}".partition("=") if is_tier else word.partition("=")
        option = OPTIONS.get(key)
        read = option.read(value) if option else None
        if option is None or read is None:
            raise refuse(word, start, _SYNTAX)
        if option.field in given:
            raise refuse(word, start, "each option once")
        given[option.field] = read
    if "python" in given:  # a link to an interpreter names its environment
        given["python"] = os.path.abspath(os.path.expanduser(given["python"]))
    return _Group(count, ids, WorkerSpec(kind, **given))


def _parse_ids(text: str) -> tuple[int, ...] | None:
    ids: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(f"({_DIGITS})(?:-({_DIGITS}))?", part)
        if match is None:
            return None
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first or last > _LARGEST_ID:
            return None
        ids.update(range(first, last + 1))
    return tuple(sorted(ids))


def _expand(groups: Sequence[_Group], machine: Machine) -> list[WorkerSpec]:
    # CPU workers without cores share the cores that no group names, in specification order. If
    # enough remain, one core is left for each accelerator's process and one for the server.
    claimed = {core for g in groups if g.worker.device == "cpu" for core in g.ids}
    free = [core for core in machine.cores if core not in claimed] or machine.cores
    unplaced = sum(g.count for g in groups if g.worker.device == "cpu" and not g.ids)
    fed = sum(g.count for g in groups if g.worker.device != "cpu")
    left = free[fed + 1 :] if fed else free
    shares = iter(split_evenly(left if len(left) >= unplaced else free, max(1, unplaced)))
    workers = []
    for group in groups:
        if group.worker.device == "cpu":
            own = split_evenly(group.ids, group.count) if group.ids else shares
            cores = itertools.islice(own, group.count)
            members = [replace(group.worker, cores=part) for part in cores]
        else:
            members = [replace(group.worker, device=card) for card in _cards(group)]
        if group.worker.name and group.count > 1:
            members = [replace(w, name=f"{w.name}-{i}") for i, w in enumerate(members)]
        workers += members
    return workers


def _cards(group: _Group) -> list[str]:
    kind = group.worker.device
    names = [f"{kind}:{number}" for number in group.ids] if group.ids else [kind]
    if len(names) > group.count:
        raise UsageError(
            f"workers: {group.count} worker cannot use {len(names)} devices; "
            f"write {len(names)}x {kind}:{format_ids(group.ids)}"
        )
    return [names[part * len(names) // group.count] for part in range(group.count)]


def _check_device(worker: WorkerSpec, machine: Machine) -> None:
    if missing := [core for core in worker.cores if core not in machine.cores]:
        raise UsageError(
            f"workers: core {missing[0]} of cpu:{missing[0]} is not available; "
            f"this process may use cores {format_ids(machine.cores)}"
        )
    if worker.python:
        if refusal := interpreter(worker.python).refusal(worker.device):
            raise UsageError(f"workers: python={worker.python}: {refusal}")
        return
    if worker.device != "cpu" and not machine.has_accelerator(worker.device):
        have = ", ".join(["cpu", *machine.accelerators])
        raise UsageError(
            f"workers: device {worker.device} is not available; this machine has {have}"
        )
    if worker.device != "cpu" and (problem := machine.problem(worker.device)):
        raise UsageError(f"workers: {problem}")
