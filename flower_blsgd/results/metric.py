"""The metric by which models are compared: its name, which values are better, and how they look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WIDEST = 8
"""Most characters of a figure with all its decimal places; a longer one has an exponent."""


@dataclass(frozen=True)
class Metric:
    """Name of a figure, and whether a larger ("max") or a smaller ("min") value is better.

    `split` is the data that it is measured on, "test" or "validation". Values of an accuracy are
    shares and are shown in percent; files have them in columns of their own. `decimals` are the
    decimal places of `text`, negative from 10,000 on.
    """

    name: str = "accuracy"
    mode: str = "max"
    split: str = "test"
    decimals: int = 2

    @classmethod
    def of(cls, record: Mapping[str, Any], validation_share: float = 0) -> "Metric":
        """Return the metric that a file names; the accuracy if it names none."""
        name, mode = record.get("metric_name", "accuracy"), record.get("metric_mode", "max")
        return cls(name, mode, split_of(validation_share))

    @property
    def is_accuracy(self) -> bool:
        """Whether values are shown in percent."""
        return self.name == "accuracy"

    @property
    def scale(self) -> int:
        """Factor from values to shown ones: 100 for percentages."""
        return 100 if self.is_accuracy else 1

    @property
    def sign(self) -> int:
        """1 if a larger value is better, -1 if a smaller one is."""
        return -1 if self.mode == "min" else 1

    @property
    def unit(self) -> str:
        """``" %"`` for an accuracy."""
        return " %" if self.is_accuracy else ""

    @property
    def label(self) -> str:
        """``"accuracy (%)"``, ``"rmse (lower is better)"``, or the same after ``validation``."""
        unit = "%" if self.is_accuracy else f"{'lower' if self.sign < 0 else 'higher'} is better"
        return f"{self.split} {self.name} ({unit})".removeprefix("test ")

    def best(self, values: Sequence[float]) -> int:
        """Return the index of the first best value."""
        return values.index((min if self.sign < 0 else max)(values))

    def shown(self, value: float) -> str:
        """Return ``"98.33%"`` for an accuracy, else ``"1.234"``."""
        return f"{value:.2%}" if self.is_accuracy else f"{value:.4g}"

    def named(self, value: float | None) -> str:
        """Return ``"accuracy 98.33%"`` or ``"rmse 1.234"``; empty without a value."""
        return "" if value is None else f"{self.name} {self.shown(value)}"

    def measured(self, value: float | None) -> str:
        """Return ``"accuracy 98.33%"``, after ``validation`` if so; empty without a value."""
        return "" if value is None else f"{self.split} {self.named(value)}".removeprefix("test ")

    def text(self, scaled: float, spread: float | None = None, sign: str = "-") -> str:
        """Return ``"98.33 ± 0.28"`` for values times `scale`; `sign` "+" is for positive ones."""
        text = f"{scaled:{sign}z.{max(0, self.decimals)}f}"
        text = f"{scaled:{sign}.3g}" if len(text) > _WIDEST else text
        return text if spread is None else f"{text} ± {self.text(spread)}"

    # --- in files

    @property
    def description(self) -> dict[str, str]:
        """What files say of the metric; `of` reads it."""
        return {"metric_name": self.name, "metric_mode": self.mode}

    def columns(self, value: float | None, prefix: str = "") -> dict[str, float | None]:
        """Return the two columns of a value: an accuracy is in the first, others in the second."""
        pair = (value, None) if self.is_accuracy else (None, value)
        return dict(zip((f"{prefix}accuracy", f"{prefix}metric"), pair, strict=True))


ACCURACY = Metric()


def value_in(record: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the value in the two columns of a record; None if neither has one."""
    accuracy = record.get(f"{prefix}accuracy")
    return record.get(f"{prefix}metric") if accuracy in (None, "") else accuracy


def split_of(validation_share: float) -> str:
    """Return the data that a run with this setting is evaluated on."""
    return "validation" if validation_share else "test"
