"""A tree of three processes, as Flower has it: a SuperNode, its executor, a ClientApp.

Run as ``python NAME top NOTES``; NAME is a copy of this file with the name of a SuperNode's
program, or another.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

CHILDREN = {"top": "executor", "executor": "app"}


def main(role: str, notes: str) -> None:
    if role == "app":
        from flower_blsgd.runtime.stream.client import die_with_supernode

        die_with_supernode()
    else:
        own_file = str(Path(notes) / "executor.py")
        subprocess.Popen([sys.executable, own_file, CHILDREN[role], notes])
    (Path(notes) / f"{role}.pid").write_text(str(os.getpid()))
    while True:
        time.sleep(100)


if __name__ == "__main__":
    main(*sys.argv[1:])
