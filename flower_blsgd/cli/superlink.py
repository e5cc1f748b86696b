"""Check that a SuperLink can be reached, before a SuperNode is started."""

import contextlib
import re
import socket
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class SuperLinkAddress:
    """The address of a SuperLink.

    Parameters
    ----------
    host : str
        A name or an address, IPv6 without brackets.
    port : int
        In 1..65535.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "SuperLinkAddress":
        """Read ``HOST:PORT`` or ``[IPV6]:PORT``.

        Raises
        ------
        UsageError
            If it is neither.
        """
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s:/\[\]'\"]+)):(\d{1,5})", text)
        if match is None or not 0 < int(match[3]) < 65_536:
            raise UsageError(
                f"--superlink = {text!r} must be HOST:PORT without a prefix, such as "
                "192.168.1.10:8100 or [fd00::10]:8100"
            )
        return cls(match[1] or match[2], int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_root_certificates(path: Path) -> ssl.SSLContext:
    """Return an SSL context that trusts the certificates in a PEM file only, as Flower does.

    Raises
    ------
    UsageError
        If the file is not there or holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=path.read_text("ascii"))
    except (ValueError, ssl.SSLError):
        raise UsageError(
            f"--root-certificates {path} holds no PEM certificate; give the certificate of the "
            "authority that signed the SuperLink's (its --ssl-ca-certfile), not a key"
        ) from None
    except OSError as error:
        raise UsageError(
            f"--root-certificates {path} cannot be read ({error.strerror}); "
            "copy the SuperLink's ca.crt here"
        ) from None
    return context


def check_superlink(address: SuperLinkAddress, root_certificates: Path | None) -> None:
    """Connect once, with the certificates if there are any, and hang up.

    Where Flower would use a proxy nothing is checked: only the proxy reaches the SuperLink.

    Raises
    ------
    UsageError
        If the host is unknown, there is no answer, or the certificate does not verify.
    """
    trusting = read_root_certificates(root_certificates) if root_certificates else None
    scheme = "https" if trusting else "http"
    proxies = urllib.request.getproxies()
    if (scheme in proxies or "all" in proxies) and not urllib.request.proxy_bypass(address.host):
        return
    with _connected(address) as connection:
        if trusting is None:
            _check_plain(connection, address)
        else:
            _check_certificate(connection, address, trusting, root_certificates)


def _connected(address: SuperLinkAddress) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), _TIMEOUT_SECONDS)
    except (socket.gaierror, UnicodeError):
        raise UsageError(
            f"no SuperLink at {address}: the host {address.host} is not known; check its name, or "
            "give its IP address"
        ) from None
    except OSError as error:
        reason = (
            f"no answer within {_TIMEOUT_SECONDS:g} s"
            if isinstance(error, TimeoutError)
            else (error.strerror or str(error)).lower()
        )
        raise UsageError(
            f"no SuperLink at {address}: {reason}; check that flower-superlink runs there with "
            f"--port {address.port}, with --host 0.0.0.0 if it is another machine, and that no "
            "firewall is in between"
        ) from None


def _check_plain(connection: socket.socket, address: SuperLinkAddress) -> None:
    answer = b""
    with contextlib.suppress(OSError):
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        while len(answer) < 5 and (piece := connection.recv(64)):
            answer += piece
    if not answer.startswith(b"HTTP/"):
        raise UsageError(
            f"what listens on {address} does not answer as a SuperLink without TLS does; if it "
            "has certificates give --root-certificates FILE instead of --insecure, else check "
            "the port"
        )


def _check_certificate(
    connection: socket.socket,
    address: SuperLinkAddress,
    trusting: ssl.SSLContext,
    path: Path | None,
) -> None:
    try:
        trusting.wrap_socket(connection, server_hostname=address.host).close()
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the certificate of {address} does not verify with --root-certificates {path} "
            f"({error.verify_message}); give the certificate of the authority that signed it, and "
            "connect by a name that is in its subjectAltName"
        ) from None
    except (OSError, ValueError) as error:
        what = getattr(error, "reason", "") or str(error) or type(error).__name__
        raise UsageError(
            f"what listens on {address} does not speak TLS ({what}); if the SuperLink runs "
            "without certificates give --insecure instead of --root-certificates, else check the "
            "port"
        ) from None
