"""Where nodes may reach this machine."""

import socket

_FAR_AWAY = "192.0.2.1"
"""An address that nobody has (RFC 5737). Nothing is sent to it; it only picks the interface."""


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
    found = [_own_address_towards(host), _own_address_towards(_FAR_AWAY), "127.0.0.1"]
    return list(dict.fromkeys(filter(None, found)))


def _own_address_towards(host: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
