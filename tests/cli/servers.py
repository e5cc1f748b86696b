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
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def make_certificate(folder: Path, address: str = "127.0.0.1") -> tuple[Path, ssl.SSLContext]:
    """Return a self-signed certificate for an IP address, and what a server with it needs."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "superlink")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    path, both = folder / f"ca-{id(key)}.crt", folder / f"server-{id(key)}.pem"
    path.write_bytes(certificate)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    both.write_bytes(private + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return path, context


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
