"""``python -m flower_blsgd`` and the command ``blsgd``."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C while it is still being imported is no traceback either."""
    try:
        from .cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
