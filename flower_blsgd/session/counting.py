"""Decision on what counts as a step of a script."""

import sys
from collections.abc import Callable
from threading import Timer
from typing import Literal

from ..errors import UsageError

_REMINDER_SECONDS = 60.0


class StepCounting:
    """Decision whether calls of `Session.step` are counted, or steps of the optimizer.

    The first call of `step` decides it, or the second step of the optimizer without a call before.
    `is_done` returns whether the run is over.
    """

    def __init__(self, rank: int, is_done: Callable[[], bool]) -> None:
        self.counted: Literal["", "calls", "steps"] = ""
        """Empty while it is unknown."""
        self._rank = rank
        self._is_done = is_done
        self._unknown_steps = 0
        """Steps of the optimizer while it is unknown."""
        self._in_step = self._ignores = False
        self._reminder = Timer(_REMINDER_SECONDS, self._remind)
        self._reminder.daemon = True

    def start_reminder(self) -> None:
        """Say after a minute that no step has been counted, if that is so."""
        self._reminder.start()

    def cancel_reminder(self) -> None:
        """Cancel the reminder."""
        self._reminder.cancel()

    def note_call(self) -> None:
        """Note a call of `Session.step`."""
        if self.counted == "steps":
            raise UsageError(
                "session.step: the optimizer took two steps without it, so its steps are counted; "
                "call session.step after every step of the optimizer, or never"
            )
        self.counted = "calls"

    def begin_step(self, is_training: bool) -> bool:
        """Note that a step of the optimizer begins.

        `is_training` is False before the first order and after the run. Returns whether the step
        before this one must be counted now.
        """
        self._in_step = True
        if self.counted or not self._unknown_steps or not is_training:
            return False
        self.counted = "steps"
        return True

    def end_step(self, has_gradients: Callable[[], bool]) -> bool:
        """Note the end of a step of the optimizer; return whether it is counted.

        Before the first order, the first two steps are those of the script's own model. A step
        without gradients, or within the step of a derived class, does not count.
        """
        if not self._in_step:
            return False
        ignored, self._in_step, self._ignores = self._ignores, False, False
        if ignored:
            return False
        if not self.counted and has_gradients():
            self._unknown_steps += 1
            if self._unknown_steps > 1:
                self.counted = "steps"
        return self.counted == "steps"

    def ignore_step(self) -> None:
        """Do not count the step of the optimizer that has begun, or that comes next."""
        self._ignores = True

    def forget_steps(self) -> None:
        """Forget the steps of the script's own model, at the first order."""
        self._unknown_steps = 0

    def _remind(self) -> None:
        if not self.counted and not self._unknown_steps and not self._is_done():
            sys.stderr.write(
                f"worker {self._rank}: no step was counted in {_REMINDER_SECONDS:.0f} s since "
                "flower_blsgd.join; if it trains, give join the optimizer that takes the steps, or "
                "call session.step after each\n"
            )
