"""What is told of a SuperLink that cannot be used: real sockets on the loopback interface."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.supernode.superlink import SuperLinkAddress, check_superlink

from .servers import Authority, deaf_port, listening


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https", "all", "no"):
        for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def ca(authority: Authority, tmp_path: Path) -> Path:
    return authority.write(tmp_path / "ca.crt")


def at(port: int, host: str = "127.0.0.1") -> SuperLinkAddress:
    return SuperLinkAddress(host, port)


def refusal(address: SuperLinkAddress, root_certificates: Path | None = None) -> str:
    with pytest.raises(UsageError) as refused:
        check_superlink(address, root_certificates)
    line = str(refused.value)
    assert "\n" not in line
    return line


# --- the address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8100", "127.0.0.1", 8100),
        ("my-host.example:1", "my-host.example", 1),
        ("[fd00::10]:65535", "fd00::10", 65535),
    ],
)
def test_address_is_read_and_written(text: str, host: str, port: int) -> None:
    address = SuperLinkAddress.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":8100", "host:0", "host:65536", "host:http", "http://host:8100"),
        *("fd00::10:8100", "host:8100/path", "a b:1", "it's:1"),
    ],
)
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT") as refused:
        SuperLinkAddress.parse(text)
    assert repr(text) in str(refused.value)


# --- without TLS


def test_superlink_without_tls_is_taken() -> None:
    with listening() as port:
        check_superlink(at(port), None)


def test_nobody_listens() -> None:
    with deaf_port() as port:
        line = refusal(at(port))
    assert f"no SuperLink at 127.0.0.1:{port}" in line
    assert f"--port {port}" in line


def test_unknown_host() -> None:
    assert "the host no-such-host.invalid is not known" in refusal(at(1, "no-such-host.invalid"))


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops what it does not let through."""
    monkeypatch.setattr("flower_blsgd.supernode.superlink._TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = []
        for _ in range(4):  # a queue that is full takes no more
            queued = socket.socket()
            queued.setblocking(False)
            queued.connect_ex(address)
            waiting.append(queued)
        line = refusal(at(address[1]))
        for queued in waiting:
            queued.close()
    assert "no answer from 127.0.0.1 within 0.2 s" in line
    assert "firewall" in line


def test_insecure_where_there_is_tls(authority: Authority, tmp_path: Path) -> None:
    with listening(authority.server(tmp_path, "127.0.0.1")) as port:
        line = refusal(at(port))
    assert f"127.0.0.1:{port}" in line
    assert "give --root-certificates FILE instead of --insecure" in line


def test_something_else_listens() -> None:
    with listening(answer=b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "check the port" in refusal(at(port))


def test_through_a_proxy_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with deaf_port() as port:
        check_superlink(at(port, "superlink.example"), None)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert "no SuperLink" in refusal(at(port))


# --- with TLS


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_superlink_with_the_right_certificate_is_taken(
    authority: Authority, ca: Path, tmp_path: Path, host: str
) -> None:
    with listening(authority.server(tmp_path, "127.0.0.1", "localhost")) as port:
        check_superlink(at(port, host), ca)


def test_certificate_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    other = Authority().write(tmp_path / "other.crt")  # with the same name, as a second try has
    with listening(authority.server(tmp_path, "127.0.0.1")) as port:
        line = refusal(at(port), other)
    assert "does not verify" in line
    assert str(other) in line


def test_certificate_for_another_host(authority: Authority, ca: Path, tmp_path: Path) -> None:
    with listening(authority.server(tmp_path, "10.0.0.1", "elsewhere.example")) as port:
        line = refusal(at(port), ca)
        assert "is for another host" in line
        assert "127.0.0.1 in its subjectAltName" in line
        assert "is for another host" in refusal(at(port, "localhost"), ca)


def test_certificate_that_is_over(authority: Authority, ca: Path, tmp_path: Path) -> None:
    with listening(authority.server(tmp_path, "127.0.0.1", days=-1)) as port:
        assert "expired" in refusal(at(port), ca)


@pytest.fixture(params=["plain", "mute"])
def no_tls(request: pytest.FixtureRequest) -> Iterator[int]:
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n" if request.param == "plain" else b""
    with listening(answer=answer) as port:
        yield port


def test_certificates_where_there_is_no_tls(ca: Path, no_tls: int) -> None:
    line = refusal(at(no_tls), ca)
    assert "does not speak TLS" in line
    assert "give --insecure" in line


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"", "holds no PEM certificate"),
        (b"ca.crt\n", "holds no PEM certificate"),
        ("Zertifikat für alle".encode(), "holds no PEM certificate"),
        (
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "holds no PEM certificate",
        ),
    ],
)
def test_certificate_file_that_is_none(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    with listening() as port:
        line = refusal(at(port), path)
    assert told in line
    assert str(path) in line
