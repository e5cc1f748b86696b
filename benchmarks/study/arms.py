"""The contenders of the study, and the settings that may be added to one.

An arm is named ``BASE`` or ``BASE+ADD-ON+...``. Settings are those of the run config.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError


@dataclass(frozen=True)
class Arm:
    """A contender.

    Parameters
    ----------
    kind : {"bare", "ddp", "ours"}
        What trains: a loop by hand, DistributedDataParallel, or this project.
    settings : mapping
        Of the run config, for ours.
    batch : int (default: 32)
        Samples per step of the fast device.
    both : bool (default: True)
        Whether the slow device takes part.
    proportional : bool (default: False)
        Of DDP: whether the slow device's batch follows its speed.
    scores : bool (default: False)
        Whether the slow device scored instead of training: a role that was removed.
    """

    kind: Literal["bare", "ddp", "ours"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 32
    both: bool = True
    proportional: bool = False
    scores: bool = False


_TO_SLOW = {"algorithm": "biased-local-sgd", "high-loss-to": "slow"}

BASES: Mapping[str, Arm] = {
    **{f"bare-{batch}": Arm("bare", batch=batch, both=False) for batch in (8, 16, 48, 64)},
    "bare": Arm("bare", both=False),
    "ddp-equal": Arm("ddp"),
    "ddp-proportional": Arm("ddp", proportional=True),
    "ddp-proportional-128": Arm("ddp", batch=128, proportional=True),
    "fast-only": Arm("ours", {"algorithm": "fast-only-local-sgd", "min-workers": 1}, both=False),
    "dlb": Arm("ours", {"algorithm": "dlb"}),
    "weighted": Arm("ours", {"algorithm": "weighted-local-sgd"}),
    "biased": Arm("ours", {"algorithm": "biased-local-sgd"}),
    "biased-to-slow": Arm("ours", _TO_SLOW),
}

FAST_ALONE = ("bare", "bare-48", "bare-64")
TWO_DEVICES = ("weighted", "biased", "biased-to-slow")
TUNED = (*FAST_ALONE, "ddp-equal", "ddp-proportional", "dlb", *TWO_DEVICES)
"""The bases that have a grid of rates of their own; `fast-only` has that of `bare`."""


@dataclass(frozen=True)
class AddOn:
    """Settings that may be added to an arm of this project.

    Parameters
    ----------
    group : str
        Of those of a group at most one is in an arm.
    settings : mapping
        Of the run config.
    on_one : bool (default: False)
        Whether the fast device alone can use it.
    biased : bool (default: False)
        Whether it means nothing without a share of samples by loss.
    """

    group: str
    settings: Mapping[str, Any]
    on_one: bool = False
    biased: bool = False


ADD_ONS: Mapping[str, AddOn] = {
    "random-subset": AddOn("selection", {"selection": "random-subset"}, on_one=True),
    "infobatch": AddOn("selection", {"selection": "infobatch"}, on_one=True),
    "kakurenbo": AddOn("selection", {"selection": "kakurenbo"}, on_one=True),
    "fraction": AddOn("selection", {"fast-fraction": 0.7}, on_one=True),
    "lambda-1": AddOn("lambda", {"high-loss-ratio": 1.0}, biased=True),
    "lambda-linear": AddOn("lambda", {"high-loss-schedule": "linear"}, biased=True),
    "lambda-cosine": AddOn("lambda", {"high-loss-schedule": "cosine"}, biased=True),
    "lambda-until": AddOn("lambda", {"high-loss-schedule": "until-85%"}, biased=True),
    "trim": AddOn("trim", {"trim-top": 0.02}, biased=True),
    "max-age": AddOn("age", {"max-loss-age": 3.0}, biased=True),
    "permuted": AddOn("control", {"permute-losses": True}, biased=True),
    "ema": AddOn("average", {"ema-half-life": 0.01}, on_one=True),
    "post-local": AddOn("steps", {"step-schedule": "post-local"}),
    "qsr": AddOn("steps", {"step-schedule": "qsr"}),
    "steps-auto": AddOn("steps", {"local-steps-fast": "auto"}),
    "steps-2": AddOn("steps", {"local-steps-fast": 2}),
    "steps-4": AddOn("steps", {"local-steps-fast": 4}),
    "steps-8": AddOn("steps", {"local-steps-fast": 8}),
    "steps-16": AddOn("steps", {"local-steps-fast": 16}),
    "rate-sqrt": AddOn("rate", {"rate-scaling": "sqrt"}),
    "rate-linear": AddOn("rate", {"rate-scaling": "linear"}),
    "momentum-average": AddOn("momentum", {"momentum-buffers": "average"}),
    "outer-0.1": AddOn(
        "momentum", {"outer-optimizer": "sgd", "outer-learning-rate": 1.0, "outer-momentum": 0.1}
    ),
    "outer-0.2": AddOn(
        "momentum", {"outer-optimizer": "sgd", "outer-learning-rate": 1.0, "outer-momentum": 0.2}
    ),
    "score": AddOn("score", {}),
}


def arm(name: str) -> Arm:
    """Return the arm of a name; KeyError if a part of it is not known."""
    base, *added = name.split("+")
    made = BASES[base]
    for one in added:
        settings = {**made.settings, **ADD_ONS[one].settings}
        made = dataclasses.replace(made, settings=settings)
        if one == "score":
            made = dataclasses.replace(made, both=True, scores=True)
    return made


def on_fast_alone(name: str) -> str:
    """Return the arm of the fast device alone with those add-ons of an arm that it can use."""
    added = name.split("+")[1:]
    return "+".join(["fast-only", *(one for one in added if ADD_ONS[one].on_one)])


def why_not(name: str) -> str:
    """Return why the installed version does not have an arm, in words; empty if it does."""
    chosen = arm(name)
    if chosen.kind != "ours":
        return ""
    try:
        RunConfig.from_run_config({**chosen.settings})
    except UsageError as error:
        return str(error)
    return "workers do not score any more" if chosen.scores else ""
