"""Length of a run: its limits, and what is used of them."""

from dataclasses import dataclass
from typing import Any

from ..config import RunConfig

NO_LIMIT = 1_000_000
"""A number of epochs that no run reaches."""


@dataclass(frozen=True)
class Budget:
    """Limits of a run; the first one that is reached ends it. 0 is no limit.

    `samples` counts those that all workers trained on, and `seconds` the training time without
    evaluation. The used part of a budget is a budget, too, whose number of epochs may be
    fractional.
    """

    epochs: float = 0
    seconds: float = 0.0
    rounds: int = 0
    samples: int = 0

    @classmethod
    def of(cls, **limits: Any) -> "Budget":
        """Return the budget with these limits; None is no limit.

        ValueError if none is given, or one is not above 0.
        """
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise ValueError(f"no budget: give {'=, '.join(limits)}= or several of them")
        for name, limit in given.items():
            if not limit > 0:
                raise ValueError(f"{name} = {limit} must be above 0")
        return cls(**given)

    @classmethod
    def of_run(cls, config: RunConfig) -> "Budget":
        """Return the budget of a run with these settings."""
        return cls(config.epochs, config.seconds, config.rounds, config.samples)

    def share(self, used: "Budget") -> float:
        """Return the used share of the limit that is nearest; 1 or more at the end."""
        return max((u / limit for _, u, limit in self._limits(used)), default=0.0)

    def used_up(self, used: "Budget", epoch_ended: bool) -> str:
        """Return which limit is reached, such as ``"3 of 3 epochs done"``; empty if none is.

        A limit of epochs is reached at the end of an epoch.
        """
        name = self.limit_reached(used, epoch_ended)
        if not name:
            return ""
        number = f"{used.seconds:.1f}" if name == "seconds" else f"{getattr(used, name):,.0f}"
        return f"{number} of {self._words(name)} done"

    def limit_reached(self, used: "Budget", epoch_ended: bool) -> str:
        """Return the name of the limit that is reached; empty if none is."""
        reached = (name for name, u, limit in self._limits(used) if u >= limit)
        return next((name for name in reached if name != "epochs" or epoch_ended), "")

    def _limits(self, used: "Budget") -> list[tuple[str, float, float]]:
        limits = vars(self).items()
        return [(name, getattr(used, name), limit) for name, limit in limits if limit]

    def __str__(self) -> str:
        names = [name for name, limit in vars(self).items() if limit]
        if len(names) > 1 and self.epochs >= NO_LIMIT:
            names.remove("epochs")
        return ", or ".join(map(self._words, names[::-1]))

    def _words(self, name: str) -> str:
        limit = getattr(self, name)
        if name == "seconds":
            return f"{limit:g} seconds of training"
        return f"{limit:,} {name.removesuffix('s') if limit == 1 else name}"
