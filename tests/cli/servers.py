"""Servers on the loopback interface that answer as a SuperLink does, and certificates for them."""

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = _name(name)
        self.certificate = (
            _certificate(self.name, self.name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def write(self, path: Path) -> Path:
        path.write_bytes(self.certificate.public_bytes(Encoding.PEM))
        return path

    def server(self, folder: Path, *names: str, days: int = 1) -> ssl.SSLContext:
        """Return what a server with a certificate for these names needs."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _certificate(_name("superlink"), self.name, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName([_called(n) for n in names]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        path = folder / f"server-{id(key)}.pem"
        path.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            + certificate.public_bytes(Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _called(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def write_key(path: Path, curve: ec.EllipticCurve | None = None) -> Path:
    """Write a private key as ssh-keygen does, and its public key beside it."""
    key = ec.generate_private_key(curve or ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )
    return path


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None = None, answer: bytes = ANSWER) -> Iterator[int]:
    """Yield the port of a server that answers every connection so, and hangs up."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)
    closing = threading.Event()

    def serve() -> None:
        while not closing.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.settimeout(2)
                with connection:
                    if context is not None:
                        connection = context.wrap_socket(connection, server_side=True)
                    with connection:
                        connection.recv(4096)
                        connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        closing.set()
        thread.join()
        server.close()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port that is taken, but on which nobody listens: connections are refused."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
