"""``python -m flower_blsgd``: the command ``blsgd``."""

import sys

from .cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
