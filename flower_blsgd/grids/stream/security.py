"""Who may speak on a stream and how: certificates, tokens, gRPC's options, addresses.

The certificate is made for one run, and a token for each session. Both travel inside a Flower
message, so whatever protects Flower's messages protects them.
"""

import contextlib
import datetime
import secrets
import socket
from collections.abc import Sequence

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ...errors import UsageError
from .codec import CHUNK_BYTES

METHOD = "Session"
SERVICE = "flower_blsgd.Stream"
NODE_KEY = "node-id"
TOKEN_KEY = "token-bin"
HOLDING_KEY = "holding"
"""In a call's metadata: the ids of messages that the node has and need not get again."""

WELCOME_KEY = "welcome"
"""In the metadata of the answer to a node that may stay."""

SESSION_ENDED = grpc.StatusCode.ABORTED
"""How a call ends when its session is over; one that breaks is unavailable, or cancelled."""

SERVER_NAME = "stream.flower-blsgd"
"""What the certificate is for. Addresses may be translated on the way, so none is in it."""

_CLOCK_SKEW = datetime.timedelta(days=1)
_VALID_FOR = datetime.timedelta(days=365)
_UNUSED_ADDRESS = "192.0.2.1"
"""An address of nobody (RFC 5737). Nothing is sent to it; it only selects the interface."""

Options = Sequence[tuple[str, int | str]]

_BOTH_ENDS: Options = (
    # A host that vanished is noticed after the sum of these two, in any case.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", CHUNK_BYTES),
)
SERVER_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.so_reuseport", 0),  # else two runs would share a port, and each get half
)
CLIENT_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def new_certificate() -> tuple[bytes, grpc.ServerCredentials]:
    """Return a self-signed certificate as PEM, and what a gRPC server with its key needs.

    The key never leaves this process.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private_key = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate, grpc.ssl_server_credentials([(private_key, certificate)])


def new_token() -> bytes:
    """Return a secret of 32 random bytes."""
    return secrets.token_bytes(32)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises
    ------
    UsageError
        If it is none.

    Examples
    --------
    >>> split_address("10.0.0.5:9100"), split_address(":9100")
    (('10.0.0.5', 9100), ('', 9100))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535 or " " in host:
        raise UsageError(
            f'stream-address = "{address}" is no HOST:PORT; try "10.0.0.5:9100", or ":9100" for '
            "every address of this machine"
        )
    return host, int(port)


def listen(server: grpc.Server, address: str, credentials: grpc.ServerCredentials) -> int:
    """Let a gRPC server listen on ``HOST:PORT``, or on any free port; return the port.

    A host that is not this machine's, such as the outside of a router, is listened for on all
    of this machine's addresses.

    UsageError if another program listens there.
    """
    host, port = split_address(address) if address else ("", 0)
    listening = "[::]" if host.startswith("[") else "0.0.0.0"
    with contextlib.suppress(OSError), socket.socket() as probe:  # else it is somebody else's
        found = socket.gethostbyname(host or listening)
        probe.bind((found, 0))
        listening = found
    try:
        return int(server.add_secure_port(f"{listening}:{port}", credentials))
    except RuntimeError:
        raise UsageError(
            f'stream-address = "{address}": cannot listen on {listening}:{port}, another '
            "program does; name another port, or none for a free one"
        ) from None


def own_addresses(superlink: str) -> list[str]:
    """Return this machine's addresses that nodes may reach, the likeliest first.

    Parameters
    ----------
    superlink : str
        The SuperLink as this process reaches it, ``HOST:PORT`` or a URL. Where it is on this
        machine, its nodes may be here or elsewhere.
    """
    host = superlink.partition("://")[2] or superlink
    host = host.partition("/")[0].rpartition(":")[0].strip("[]") or host
    found = [_own_address_towards(host), _own_address_towards(_UNUSED_ADDRESS), "127.0.0.1"]
    return list(dict.fromkeys(filter(None, found)))


def _own_address_towards(host: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
