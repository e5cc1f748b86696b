"""The keys that SuperNodes show to the SuperLink."""

from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from ..errors import UsageError

FLAG = "--auth-supernode-private-key"
_MAKE_ONE = 'make one with ssh-keygen -t ecdsa -b 384 -N "" -f FILE'


def keys_of_nodes(paths: Sequence[Path], num_nodes: int) -> list[Path | None]:
    """Return each node's private key, None for all if there are none.

    Raises
    ------
    UsageError
        If there are more or fewer keys than nodes, one is used twice, or one is no private
        key on an elliptic curve.
    """
    if not paths:
        return [None] * num_nodes
    if len(paths) != num_nodes:
        raise UsageError(
            f"{len(paths)} {FLAG} for {num_nodes} SuperNode{'s' * (num_nodes > 1)}; give it once "
            "per SuperNode, each with a key of its own, in the order of --workers"
        )
    owners: dict[bytes, Path] = {}
    for path in paths:
        public = _public_key(path)
        if public in owners:
            raise UsageError(
                f"{FLAG} {path} is the key of {owners[public]}; each SuperNode needs its own: "
                f"{_MAKE_ONE}"
            )
        owners[public] = path
    return list(paths)


def _public_key(path: Path) -> bytes:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UsageError(f"{FLAG} {path} cannot be read ({error.strerror}); {_MAKE_ONE}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a password
        raise UsageError(
            f"{FLAG} {path} is no OpenSSH private key without a password; {_MAKE_ONE}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{FLAG} {path} is not on an elliptic curve; {_MAKE_ONE}")
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
