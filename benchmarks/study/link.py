"""A slow link between two network namespaces of this machine; needs root and ``/dev/net/tun``.

Each end is a namespace with a TUN device. What one end sends is read here, held back, and written
to the other end: an IP link with a delay and a rate, for any program.

``python -m benchmarks.study.link FD ADDRESS``: holds one end's namespace, within ``unshare --net``.
"""

import contextlib
import fcntl
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

DELAY_SECONDS, BITS_PER_SECOND = 0.020, 200e6
INTERFACE = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ROOT = Path(__file__).parents[2]
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_PACKETS, _JOIN_SECONDS = 1000, 5.0


def why_not() -> str:
    """Return why there can be no slow link here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        return "a slow link needs Linux, root and /dev/net/tun"
    lacking = [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name)]
    return f"a slow link needs the programs {', '.join(lacking)}" if lacking else ""


class Link:
    """Two namespaces and what lies between them, while the context is open."""

    def __enter__(self) -> "Link":
        self._holders, self._fds, self._over = [], [], threading.Event()
        self._threads: list[threading.Thread] = []
        for address in ADDRESSES:
            here, there = socket.socketpair()
            command = ("unshare", "--net", sys.executable, "-m", "benchmarks.study.link")
            holder = subprocess.Popen(
                [*command, str(there.fileno()), address],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                pass_fds=[there.fileno()],
            )
            there.close()
            self._holders.append(holder)
            with here:
                self._fds.append(socket.recv_fds(here, 1, 1)[1][0])
        for source, sink in (self._fds, self._fds[::-1]):
            on_the_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_PACKETS)
            for work, fd in ((_hold_back, source), (_deliver, sink)):
                arguments = fd, on_the_way, self._over
                self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
        # Reading ends with the devices, and those with their namespaces. Nobody may write to a
        # descriptor that is closed: its number may be that of the next process's pipe.
        self._over.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            for fd in self._fds:
                os.close(fd)

    def inside(self, end: int) -> list[str]:
        """Return what a command begins with to run at one end, 0 or 1."""
        return ["nsenter", f"--net=/proc/{self._holders[end].pid}/ns/net"]


def _hold_back(
    fd: int, on_the_way: "queue.Queue[tuple[float, bytes]]", over: threading.Event
) -> None:
    free_at = time.monotonic()
    with contextlib.suppress(OSError):
        while data := os.read(fd, 1 << 16):
            free_at = max(free_at, time.monotonic()) + 8 * len(data) / BITS_PER_SECOND
            if over.is_set():
                break
            on_the_way.put((free_at + DELAY_SECONDS, data))


def _deliver(
    fd: int, on_the_way: "queue.Queue[tuple[float, bytes]]", over: threading.Event
) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError, queue.Empty):
            due, data = on_the_way.get(timeout=0.1)
            time.sleep(max(0.0, due - time.monotonic()))
            if not over.is_set():
                os.write(fd, data)


def _hold(fd: int, address: str) -> None:
    """Make the device of this namespace, hand it over, and wait until the other side is gone."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    name = struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, name)
    for words in (
        f"addr add {address}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up mtu 9000 txqueuelen {_MOST_PACKETS}",
        "link set lo up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(fileno=fd) as channel:
        socket.send_fds(channel, [b"1"], [device])
    sys.stdin.read()


if __name__ == "__main__":
    _hold(int(sys.argv[1]), sys.argv[2])
