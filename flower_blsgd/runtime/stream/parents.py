"""Die with the SuperNode, so that no device is held twice.

Flower asks a ClientApp's process to end when its SuperNode is gone, with a signal that waits for
the code under way. A new SuperNode may be there by then.
"""

import os
import threading
import time
from pathlib import Path

_LOOK_SECONDS = 0.2
_SUPERNODE = b"flower-supernode"


def die_with_supernode() -> None:
    """End this process at once when its parent, or the SuperNode above that, is gone."""
    parent = os.getppid()
    above = _parent_of(parent)
    supernode = above if above and _SUPERNODE in _command_of(above) else 0

    def watch() -> None:
        while os.getppid() == parent and (not supernode or _parent_of(parent) == supernode):
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="supernode-watch", daemon=True).start()


def _parent_of(process_id: int) -> int:
    """Return the parent's process id; 0 if it is not known."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _command_of(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""
