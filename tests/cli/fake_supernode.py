"""A fake flower-supernode: it writes down its arguments, and behaves as its name says.

Copied as `flower-supernode` beside a Python, without the package: standard library only.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

REFUSED = "\x1b[91mERROR\x1b[0m :     Exit Code: 305\nFailed to connect.\n"
REFUSED += "[code: 2004] Failed to activate SuperNode\n"
# A SuperExec that is ended while it is being imported says this much.
REFUSED += "Traceback:\n" + "  some line\n" * 100 + "KeyboardInterrupt"


def main() -> None:
    arguments = sys.argv[1:]
    config = arguments[arguments.index("--node-config") + 1]
    port = arguments[arguments.index("--port") + 1]
    name = (re.search(r"\bname='([^']*)'", config) or ["", ""])[1]
    print("\x1b[92mINFO \x1b[0m :      Starting Flower SuperNode", flush=True)
    below = subprocess.Popen(["sleep", "600"])  # outlives a refused one, and holds its output
    if name.startswith("stranger"):
        print(REFUSED, flush=True)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: end(below))
    note = {
        "arguments": arguments,
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": dict(os.environ),
        "pids": [os.getpid(), below.pid],
        "name": name,
    }
    folder = Path(os.environ["FAKE_FOLDER"])
    (folder / f"{port}.part").write_text(json.dumps(note))
    (folder / f"{port}.part").rename(folder / f"{port}.json")
    print(f"\x1b[92mINFO \x1b[0m :      SuperNode ID: {port}77", flush=True)
    if name.startswith("leaves"):
        end(below)
    if name.startswith("late-crash"):
        time.sleep(0.5)
        below.kill()
        print("it broke in the middle", flush=True)
        sys.exit(3)
    print("and goes on", flush=True)
    while True:
        time.sleep(0.05)


def end(below: "subprocess.Popen[bytes]") -> None:
    below.kill()
    with contextlib.suppress(OSError):
        print("SuperNode terminated gracefully.", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
