"""A tree of three processes, as Flower has it: a SuperNode, its executor, a ClientApp.

Run as ``python ancestors.py top NOTES NAME``; by the name in its command line the first is a
SuperNode, or another program.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

CHILDREN = {"top": "executor", "executor": "app"}


def main(role: str, notes: str, *_: str) -> None:
    if role == "app":
        from flower_blsgd.engines.stream.client import end_with_supernode

        end_with_supernode()
    else:
        subprocess.Popen([sys.executable, __file__, CHILDREN[role], notes])
    (Path(notes) / f"{role}.pid").write_text(str(os.getpid()))
    while True:
        time.sleep(100)


if __name__ == "__main__":
    main(*sys.argv[1:])
