"""The certificate of one run, and tokens."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from flower_blsgd.runtime.stream.credentials import (
    SERVER_NAME,
    new_certificate,
    new_token,
    same_token,
)


def test_certificate_names_the_stream_and_no_address() -> None:
    certificate = x509.load_pem_x509_certificate(new_certificate().public)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(SERVER_NAME)]
    assert certificate.issuer == certificate.subject


def test_certificate_is_valid_now_and_for_long_runs_also_where_clocks_differ() -> None:
    certificate = x509.load_pem_x509_certificate(new_certificate().public)
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now - datetime.timedelta(hours=12)
    assert certificate.not_valid_after_utc > now + datetime.timedelta(days=90)


def test_certificate_belongs_to_its_key_which_is_not_in_the_public_part() -> None:
    made = new_certificate()
    key = serialization.load_pem_private_key(made.private_key, None)
    certificate = x509.load_pem_x509_certificate(made.public)
    assert certificate.public_key() == key.public_key()
    assert b"PRIVATE" not in made.public
    assert made.server_credentials() is not None


def test_certificates_are_of_one_run_alone() -> None:
    one, other = (x509.load_pem_x509_certificate(new_certificate().public) for _ in range(2))
    assert one.public_key() != other.public_key()
    assert one.serial_number != other.serial_number


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {32}


def test_same_token() -> None:
    token = new_token()
    assert same_token(bytes(bytearray(token)), token)
    assert not same_token(token[:-1], token)
    assert not same_token(b"", token)
    assert not same_token(token[:-1] + bytes([token[-1] ^ 1]), token)
