"""The arms of the third study: what each of them may choose, and how its best setting is found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any, TypeVar

FAST_CORE, SLOW_CORE = 0, 1
TUNING_SEEDS = (0, 1, 2)

S = TypeVar("S")
"""What an arm chooses, of a study."""


@dataclass(frozen=True)
class Setting:
    """What an arm chooses: what `LISTS` has, and the learning rate to begin with.

    `batch` and `steps` (per round, or per outer step) are those of the fast device, but for
    gradients of images, where `batch` is the mean of both devices; 0 steps are ``local-steps-fast =
    "auto"``. `accumulate` is the batches per optimizer step of DDP, `sync_bn`
    whether its ranks have the statistics of BatchNorm in common. Without `outer_rate` there is no
    outer optimizer. `weights` and `overlap` are settings of this project, `wire` also of DDP.
    """

    rate: float
    batch: int = 16
    steps: int = 4
    weights: str = "load"
    overlap: bool = False
    sync_bn: bool = False
    accumulate: int = 1
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    wire: str = "float32"

    def __str__(self) -> str:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        shown = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items()
            if name in ("rate", "batch", "steps", "weights") or value != getattr(Setting, name)
        ]
        return " ".join(shown)


LISTS: Mapping[str, Sequence[Any]] = {
    "batch": (4, 8, 16, 32, 64),
    "steps": (2, 4, 8, 16, 32, 64, 128),
    "weights": ("load", "per-sample"),
    "overlap": (False, True),
    "sync_bn": (False, True),
    "accumulate": (1, 2, 4, 8, 16, 32),
    "outer_rate": (0.5, 0.7, 1.0, 1.4),
    "outer_momentum": (0.0, 0.3, 0.6, 0.9),
    "wire": ("float32", "bfloat16"),
}
"""The values of each choice. The rate moves by factors of 2, without an end."""


@dataclass(frozen=True)
class Arm:
    """One way to train, and what it chooses.

    The `kind` is ``"loop"`` (PyTorch on the fast device alone), ``"ddp"`` (batches in proportion to
    speed), or this project with averages of ``"models"`` or of ``"gradients"``, or as it ships,
    ``"recommended"``. `gap` is how many times slower the slow device is. Tuning begins at `start`,
    or at the setting found for the arm of this name at a gap of 2, with `changes`.
    """

    name: str
    kind: str
    gap: float
    choices: tuple[str, ...]
    start: Setting | str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def begin(self, found: Setting) -> Setting:
        """Return where tuning begins, for the setting that `start` is or names."""
        begun = replace(found, **self.changes)
        return replace(begun, steps=max(begun.steps, int(self.gap)))


def neighbors(setting: Setting, choices: Iterable[str], gap: float) -> list[Setting]:
    """Return the settings that differ in one choice by one step of its list.

    The rate moves with the batch, because arms with a choice of the batch are trained with SGD. A
    round has at least one step of the slow device.
    """
    found = []
    for choice in choices:
        if choice == "rate":
            found += [replace(setting, rate=setting.rate * factor) for factor in (0.5, 2.0)]
            continue
        values = LISTS[choice]
        at = values.index(getattr(setting, choice))
        for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
            changed = replace(setting, **{choice: value})
            if choice == "batch":
                changed = replace(changed, rate=setting.rate * value / setting.batch)
            if choice != "steps" or value >= gap:
                found.append(changed)
    return found


def search(
    start: S,
    around: Callable[[S], Sequence[S]],
    value: Callable[[S, int], float | None],
    margin: float,
) -> S | None:
    """Return the setting that none of its neighbors is ahead of; None while runs are missing.

    Seed 0 leads to one, and all seeds go on from there. `value` of a setting and a seed is None if
    it is not known yet; larger is better. A neighbor that is further behind the best at seed 0 than
    `margin` gets no other seed, and it must be ahead by a quarter of that.
    """
    best: S | None = start
    for seeds in (TUNING_SEEDS[:1], TUNING_SEEDS):
        while best and (ahead := _best(best, around(best), value, seeds, margin)) != best:
            best = ahead
    return best


def _best(
    center: S,
    near: Sequence[S],
    value: Callable[[S, int], float | None],
    seeds: Sequence[int],
    margin: float,
) -> S | None:
    """Return the neighbor that is ahead of a setting, or itself; None while runs are missing."""
    if not near:
        return center
    first = {setting: value(setting, seeds[0]) for setting in (center, *near)}
    known = {setting: one for setting, one in first.items() if one is not None}
    if len(known) < len(first):
        return None
    least = max(known.values()) - margin
    contenders = [setting for setting in known if setting == center or known[setting] >= least]
    values = {setting: [value(setting, seed) for seed in seeds] for setting in contenders}
    if any(None in own for own in values.values()):
        return None
    means = {one: fmean(v for v in own if v is not None) for one, own in values.items()}
    ahead = max(means, key=lambda setting: means[setting])
    return ahead if means[ahead] > means[center] + margin / 4 else center
