"""Who may speak on a stream: a certificate made for one run, and a token for each node.

They travel inside a Flower message, so whatever protects Flower's messages protects them.
"""

import datetime
import hmac
import secrets
from dataclasses import dataclass

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SERVER_NAME = "stream.flower-blsgd"
"""What the certificate is for. Addresses may change on the way, so none is in it."""

_TOKEN_BYTES = 32
_CLOCK_SKEW = datetime.timedelta(days=1)
_VALID_FOR = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, both as PEM.

    Parameters
    ----------
    public : bytes
        For the clients.
    private_key : bytes
        Never leaves the process that made it.
    """

    public: bytes
    private_key: bytes

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a gRPC server needs."""
        return grpc.ssl_server_credentials([(self.private_key, self.public)])


def new_certificate() -> Certificate:
    """Return a certificate of this run alone."""
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
    )
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def new_token() -> bytes:
    """Return a secret that nobody can guess."""
    return secrets.token_bytes(_TOKEN_BYTES)


def same_token(given: bytes, expected: bytes) -> bool:
    """Whether a token is the expected one, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)
