"""``python -m flower_blsgd`` and the command ``blsgd``."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C while it is still being imported is no traceback either."""
    try:
        if sys.argv[1:2] == ["run"]:  # first: it imports torch for the workers meanwhile
            from .runtime.template_process import prepare_template
            from .worker import MODULES

            prepare_template(MODULES)
        from .cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
