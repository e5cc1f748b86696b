"""A fake flower-supernode: it writes down its arguments, and behaves as its name says.

Copied as `flower-supernode` beside a Python, without the package: standard library only.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    arguments = sys.argv[1:]
    config = arguments[arguments.index("--node-config") + 1]
    port = arguments[arguments.index("--port") + 1]
    name = (re.search(r"\bname='([^']*)'", config) or ["", ""])[1]
    below = subprocess.Popen(["sleep", "600"])  # outlives one that fails, and holds its output
    if name == "stranger":
        print("ERROR :     Exit Code: 305\n[code: 2004] Failed to activate SuperNode")
        sys.exit("it says why")
    if name == "crash":
        slow = 'trap "sleep 0.5; echo and tidies up >&2" TERM; echo ready; sleep 600 & wait'
        left = subprocess.Popen(["sh", "-c", slow], stdout=subprocess.PIPE)
        assert left.stdout
        left.stdout.readline()
        print("it says why", flush=True)
        time.sleep(0.5)
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: end(below))
    note = {
        "arguments": arguments,
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": dict(os.environ),
        "pids": [os.getpid(), below.pid],
        "name": name,
    }
    print("and goes on", flush=True)  # before the note: tests send signals when they see that
    folder = Path(os.environ["FAKE_FOLDER"])
    (folder / f"{port}.part").write_text(json.dumps(note))
    (folder / f"{port}.part").rename(folder / f"{port}.json")
    if name == "leaves":
        end(below)
    while True:
        time.sleep(0.05)


def end(below: "subprocess.Popen[bytes]") -> None:
    below.kill()
    print("SuperNode terminated gracefully.", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
