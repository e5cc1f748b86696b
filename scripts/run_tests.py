"""Run all tests; those that start Flower's own engines, which mostly wait, beside the others.

What the engines' tests print comes at the end. The exit status is that of pytest: 0 if all passed.
"""

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]


def main() -> int:
    """Run both sets; return the first exit status that is not 0."""
    with tempfile.TemporaryFile("w+") as log:
        engines = subprocess.Popen(
            [*PYTEST, "-m", "engines", "-p", "no:cacheprovider"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            others = subprocess.run([*PYTEST, "-m", "not engines"], check=False).returncode
            status = engines.wait()
        except BaseException:
            engines.terminate()
            engines.wait()
            raise
        log.seek(0)
        sys.stdout.write(f"\nwith Flower's engines:\n{log.read()}")
    return others or status


if __name__ == "__main__":
    sys.exit(main())
