"""Failures of workers: each has a kind, which is known where the failure happens."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flwr.app import Error

from ..errors import printable
from ..flower.app_call import OUT_OF_MEMORY, REFUSED
from ..flower.internals import CRASHED, LATE, NODE_GONE, RAISED, has_no_handler

FailureKind = Literal[
    "raised",  # the ClientApp raised an exception, or could not be loaded
    "out of memory",
    "no handler",  # the ClientApp has no function for the message
    "died",
    "died between orders",
    "gone",
    "late",
    "not finite",
    "unusable reply",
    "second reply",
    "reply of another round",
]

_CODES: dict[FailureKind, int] = {
    "out of memory": OUT_OF_MEMORY,
    "died": CRASHED,
    "gone": NODE_GONE,
    "late": LATE[0],
}
_KINDS: dict[int, FailureKind] = {code: kind for kind, code in _CODES.items()}
_KINDS |= dict.fromkeys(LATE, "late")

_TRACEBACK = re.compile(r"Traceback( \(.*\))?:?$")


class ProtocolError(ValueError):
    """A message that violates this protocol."""

    kind: ClassVar[FailureKind] = "unusable reply"


class NotFiniteError(ProtocolError):
    """A reply with a model or a loss that is not finite."""

    kind = "not finite"


@dataclass(frozen=True)
class Failure:
    """Reason why a worker did not carry out its order, or did not answer a query.

    `reason` is the text of the error, which may be a traceback. `refused` marks the `UsageError` of
    a ClientApp, which another order would raise again.
    """

    kind: FailureKind
    reason: str
    refused: bool = field(default=False, metadata={"optional": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))

    @classmethod
    def of(cls, error: Error | Exception) -> "Failure":
        """Return the failure of an error reply, or of an exception that a reply caused here."""
        if isinstance(error, Error):
            kind = "no handler" if has_no_handler(error) else _KINDS.get(error.code, "raised")
            return cls(kind, error.reason or "", error.code == REFUSED)
        kind = error.kind if isinstance(error, ProtocolError) else ProtocolError.kind
        return cls(kind, str(error) or type(error).__name__)

    def to_error(self, prefix: str) -> Error:
        """Return the error of a reply with this failure's kind and summary."""
        code = REFUSED if self.refused else _CODES.get(self.kind, RAISED)
        return Error(code, prefix + self.brief)

    @property
    def in_app(self) -> bool:
        """Whether the ClientApp itself failed, so that the reason is a traceback."""
        return self.kind in ("raised", "out of memory", "no handler")

    @property
    def brief(self) -> str:
        """One line: how a process died, or the last exception with the first line of its message.

        torch ends some messages with hints, not with the cause.
        """
        lines = (self.reason.strip() or self.kind).splitlines()
        if self.kind in ("died", "died between orders"):
            return lines[-1]
        begins = [i for i, line in enumerate(lines[:-1], 1) if _TRACEBACK.search(line)]
        lines = lines[begins[-1] :] if begins else lines
        # Frames are indented, and Flower puts "<class ...>:<'" before a message.
        found = (
            i for i, line in enumerate(lines) if not line[:1].isspace() and not line.endswith(":<'")
        )
        first = next(found, len(lines) - 1)
        rest = lines[first + 1 :] if lines[first].rstrip().endswith(":") else []  # a heading
        return " ".join(line.strip() for line in (lines[first], *rest[:1]))
