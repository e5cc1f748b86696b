"""The one Flower message that opens a session, and its answer."""

from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict

from .frames import FrameError

SESSION = "train.session"
_RECORD = "session"
_VERSION = 1


@dataclass(frozen=True)
class Invitation:
    """What a node needs to connect.

    Parameters
    ----------
    addresses : tuple of str
        ``HOST:PORT``, any of which may be the one that the node can reach.
    certificate : bytes
        The server's, as PEM.
    token : bytes
        This node's.
    wire_dtype : str
        How float32 models travel.
    """

    addresses: tuple[str, ...]
    certificate: bytes
    token: bytes
    wire_dtype: str = "float32"

    def to_records(self) -> RecordDict:
        """Return the content of the message."""
        record = ConfigRecord(
            {
                "version": _VERSION,
                "addresses": list(self.addresses),
                "certificate": self.certificate,
                "token": self.token,
                "wire-dtype": self.wire_dtype,
            }
        )
        return RecordDict({_RECORD: record})

    @classmethod
    def from_message(cls, message: Message) -> "Invitation":
        """Read the message.

        Raises
        ------
        FrameError
            If it is none, or one of another version of this library.
        """
        record = message.content.config_records.get(_RECORD, ConfigRecord())
        if record.get("version") != _VERSION:
            raise FrameError(
                f"the server opens sessions of version {record.get('version')!r} and this node "
                f"knows {_VERSION}; install the same flower-blsgd on both"
            )
        try:
            return cls(
                tuple(str(address) for address in record["addresses"]),  # type: ignore[union-attr]
                bytes(record["certificate"]),  # type: ignore[arg-type]
                bytes(record["token"]),  # type: ignore[arg-type]
                str(record["wire-dtype"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the invitation to a session cannot be read: {error}") from None


@dataclass(frozen=True)
class Farewell:
    """How a session ended, from the node's side.

    Parameters
    ----------
    connected : bool
        Whether there ever was a connection.
    reason : str
        Why it ended, or why there was none; empty if the server ended it.
    """

    connected: bool
    reason: str = ""

    def to_reply(self, message: Message) -> Message:
        """Return the answer to the invitation."""
        record = ConfigRecord({"connected": self.connected, "reason": self.reason})
        return Message(RecordDict({_RECORD: record}), reply_to=message)

    @classmethod
    def from_reply(cls, reply: Message) -> "Farewell":
        """Read the answer; one that cannot be read counts as never connected."""
        record = reply.content.config_records.get(_RECORD, ConfigRecord())
        return cls(record.get("connected") is True, str(record.get("reason", "no answer")))
