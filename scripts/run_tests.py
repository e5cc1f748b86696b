"""Run all tests in two processes side by side.

Tests of Flower's own engines, of failures and of kills mostly wait, and those of the stream leave
threads of gRPC behind; they run in one process beside all others, which takes about as long. What
it prints comes at the end. The exit status is 0 if all passed.
"""

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
BESIDE = [
    *("tests/faults", "tests/engines", "tests/runtime/stream", "tests/runtime/test_kills.py"),
    "tests/experiments/test_compare_processes.py",
]
OTHERS = [f"--ignore={path}" for path in BESIDE]


def main() -> int:
    """Run both sets; return the first exit status that is not 0."""
    with tempfile.TemporaryFile("w+") as log:
        beside = subprocess.Popen([*PYTEST, *BESIDE], stdout=log, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run([*PYTEST, *OTHERS], check=False)
            status = others.returncode or beside.wait()
        finally:
            if sys.exc_info()[0] is not None:
                beside.terminate()
            beside.wait()
            log.seek(0)
            sys.stdout.write(f"\ntests of failures, engines and streams:\n{log.read()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
