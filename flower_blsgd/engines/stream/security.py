"""Certificates, tokens, gRPC options and addresses of streams.

There is one certificate per run, and one token per stream. Both travel inside a Flower message, so
Flower's TLS and authentication protect them.
"""

import contextlib
import datetime
import socket
from collections.abc import Sequence

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ...errors import UsageError
from .encoded_arrays import CHUNK_BYTES

METHOD = "Session"
SERVICE = "flower_blsgd.Stream"
NODE_KEY = "node-id"
TOKEN_KEY = "token-bin"
HOLDING_KEY = "holding"
"""Metadata key of a call: ids of the messages that the node has."""

WELCOME_KEY = "welcome"
"""Metadata key of the answer to an accepted node."""

STREAM_ENDED = grpc.StatusCode.ABORTED
"""Status of a call whose stream is over; a broken call is unavailable or cancelled."""

SERVER_NAME = "stream.flower-blsgd"
"""Name in the certificate. It holds no address, since addresses may be translated."""

_CLOCK_SKEW = datetime.timedelta(days=1)
_VALID_FOR = datetime.timedelta(days=365)
_UNUSED_ADDRESS = "192.0.2.1"
"""A reserved address (RFC 5737), only used to select an interface. Nothing is sent to it."""

Options = Sequence[tuple[str, int | str]]

_BOTH_ENDS: Options = (
    # A host that vanished is noticed after the sum of these two.
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
    # For strangers. A node always has a call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.so_reuseport", 0),  # otherwise two runs could share a port
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
    """Return a self-signed certificate as PEM, and the credentials of a gRPC server with its key.

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


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; UsageError if the text has another form.

    Examples
    --------
    >>> split_address("10.0.0.5:9100"), split_address(":9100")
    (('10.0.0.5', 9100), ('', 9100))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535 or " " in host:
        raise UsageError(
            f'stream-address = "{address}" is not HOST:PORT; try "10.0.0.5:9100", or ":9100" for '
            "all addresses of this machine"
        )
    return host, int(port)


def listen(server: grpc.Server, address: str, credentials: grpc.ServerCredentials) -> int:
    """Let a gRPC server listen on ``HOST:PORT`` or a free port, and return the port.

    If the host is not an address of this machine, such as the outside of a router, the server
    listens on all addresses.

    UsageError if another program listens there.
    """
    host, port = split_address(address) if address else ("", 0)
    listening = "[::]" if host.startswith("[") else "0.0.0.0"
    # An error: it is not an address of this machine.
    with contextlib.suppress(OSError), socket.socket() as probe:
        found = socket.gethostbyname(host or listening)
        probe.bind((found, 0))
        # Debian gives a machine's own name the address 127.0.1.1.
        if found != "127.0.1.1" or host == found:
            listening = found
    try:
        return int(server.add_secure_port(f"{listening}:{port}", credentials))
    except RuntimeError:
        raise UsageError(
            f'stream-address = "{address}": another program listens on {listening}:{port}; choose '
            "another port, or leave it empty for a free one"
        ) from None


def own_addresses(superlink: str) -> list[str]:
    """Return the addresses of this machine that nodes may reach, the most likely first.

    `superlink` is the SuperLink as this process reaches it, ``HOST:PORT`` or a URL. If it is on
    this machine, its nodes may be on this machine or elsewhere.
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
