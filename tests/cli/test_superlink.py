"""SuperLinks that cannot be used are refused: real sockets on the loopback interface."""

import socket
from pathlib import Path

import pytest

from flower_blsgd.cli.superlink import SuperLinkAddress, check_superlink
from flower_blsgd.errors import UsageError

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
        *("", "host", ":8100", "host:0", "host:65536", "http://host:8100", "fd00::10:8100"),
        *("host:8100/path", "it's:1"),
    ],
)
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT") as refused:
        SuperLinkAddress.parse(text)
    assert repr(text) in str(refused.value)


# --- without TLS


def test_superlink_without_tls() -> None:
    with listening() as port:
        check_superlink(at(port), None)
    with deaf_port() as port:
        line = refusal(at(port))
        assert f"no SuperLink at 127.0.0.1:{port}" in line
        assert f"--port {port}" in line
    with listening(answer=b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "check the port" in refusal(at(port))
    assert "the host no-such-host.invalid is not known" in refusal(at(1, "no-such-host.invalid"))


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops what it does not let through."""
    monkeypatch.setattr("flower_blsgd.cli.superlink._TIMEOUT_SECONDS", 0.2)
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
    assert "no answer within 0.2 s" in line
    assert "firewall" in line


def test_through_a_proxy_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with deaf_port() as port:
        check_superlink(at(port, "superlink.example"), None)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert "no SuperLink" in refusal(at(port))


# --- with TLS


def test_right_certificate_is_taken_and_a_wrong_one_refused(
    authority: Authority, ca: Path, tmp_path: Path
) -> None:
    other = Authority().write(tmp_path / "other.crt")  # with the same name, as a second try has
    with listening(authority.server(tmp_path, "127.0.0.1", "localhost")) as port:
        check_superlink(at(port), ca)
        check_superlink(at(port, "localhost"), ca)
        line = refusal(at(port), other)
        assert "does not verify" in line
        assert str(other) in line
        line = refusal(at(port))
        assert f"127.0.0.1:{port}" in line
        assert "give --root-certificates FILE instead of --insecure" in line
    with listening(authority.server(tmp_path, "10.0.0.1", "elsewhere.example")) as port:
        assert "connect by a name that is in its subjectAltName" in refusal(at(port), ca)
        assert "does not verify" in refusal(at(port, "localhost"), ca)
    with listening(authority.server(tmp_path, "127.0.0.1", days=-1)) as port:
        assert "expired" in refusal(at(port), ca)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_certificates_where_there_is_no_tls(ca: Path, answer: bytes) -> None:
    with listening(answer=answer) as port:
        line = refusal(at(port), ca)
    assert "does not speak TLS" in line
    assert "give --insecure" in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("Zertifikat für alle".encode(), "holds no PEM certificate"),
        (
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "holds no PEM certificate",
        ),
    ],
)
def test_certificate_file_that_is_none(
    tmp_path: Path, content: bytes | None, expected: str
) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    with listening() as port:
        line = refusal(at(port), path)
    assert expected in line
    assert str(path) in line
