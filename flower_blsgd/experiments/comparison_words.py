"""A comparison's figures as text, alike in a file and in a terminal."""

from .comparison import AlgorithmFigures, Comparison, TimeToTarget
from .paired_difference import Difference

UNKNOWN = "-"


def accuracy_text(one: AlgorithmFigures) -> str:
    """Return ``"98.33 ± 0.28"``, in percent."""
    if one.accuracy is None:
        return "not measured"
    if one.accuracy_deviation is None:
        return f"{100 * one.accuracy:.2f}"
    return f"{100 * one.accuracy:.2f} ± {100 * one.accuracy_deviation:.2f}"


def difference_text(one: AlgorithmFigures, reference: str, short: bool = False) -> str:
    """Return ``"+0.28 (-0.30 to +0.86)"``, in points; if `short` ``"+0.28 ± 0.58"``."""
    if one.algorithm == reference:
        return "reference"
    if one.difference is None:
        return UNKNOWN
    mean, interval = one.difference.mean, one.difference.interval
    if interval is None:
        return _points(mean)
    if short:
        return f"{_points(mean)} ± {100 * (interval[1] - mean):.2f}"
    return f"{_points(mean)} ({_points(interval[0])} to {_points(interval[1])})"


def seconds_text(seconds: float | None) -> str:
    """Return seconds with about three figures."""
    if seconds is None:
        return UNKNOWN
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:,.{digits}f}"


def target_text(found: TimeToTarget | None, device: bool = False, short: bool = False) -> str:
    """Return ``"12.5"``, with how many of the seeds reached it where that is not all."""
    if found is None:
        return UNKNOWN
    if not found.reached:
        return "not reached"
    text = seconds_text(found.device_seconds if device else found.training_seconds)
    if found.reached == found.runs:
        return text
    if short:
        return f"{text} ({found.reached}/{found.runs})"
    return f"{text} ({found.reached} of {found.runs} seeds)"


def share_text(share: float | None) -> str:
    """Return a share in percent."""
    return UNKNOWN if share is None else f"{share:.0%}"


def target_line(comparison: Comparison) -> str:
    """Return which target it was, and why that one."""
    if comparison.target is None:
        return "no target: not every run was evaluated"
    why = "as given" if comparison.target_given else "the highest that every run reached"
    return f"target accuracy {100 * comparison.target:.4g} % ({why})"


def verdict(comparison: Comparison) -> str:
    """Return in words what the differences to the reference show."""
    said: dict[str, list[str]] = {}
    for one in comparison.algorithms:
        if one.difference is not None:
            said.setdefault(_verdict_of(one.difference), []).append(one.algorithm)
    without = [
        one.algorithm
        for one in comparison.algorithms
        if one.difference is None and one.algorithm != comparison.reference
    ]
    if without:
        said["no seed in common that was evaluated"] = without
    if not said:
        return f"Only {comparison.reference} was run: nothing to compare it with."
    parts = "; ".join(f"{words}: {', '.join(names)}" for words, names in said.items())
    return f"Against {comparison.reference} - {parts}."


def _verdict_of(difference: Difference) -> str:
    if difference.shown:
        return "better" if difference.mean > 0 else "worse"
    if difference.pairs == 1:
        return "no difference shown (one pair of runs cannot)"
    return "no difference shown"


def _points(value: float) -> str:
    return f"{100 * value + 0.0:+.2f}"
