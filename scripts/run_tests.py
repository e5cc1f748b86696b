"""Run all tests, in processes side by side.

Those that start Flower's own engines mostly wait, and those of the stream leave the threads of gRPC
behind; both run beside the others. What they print comes at the end. The exit status is 0 if all
passed.
"""

import subprocess
import sys
import tempfile
from typing import IO

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
STREAM = "tests/runtime/stream"
BESIDE = {"with Flower's engines": ["-m", "engines"], "of the stream": [STREAM]}
OTHERS = ["-m", "not engines", f"--ignore={STREAM}"]


def main() -> int:
    """Run all sets; return the first exit status that is not 0."""
    running: dict[str, tuple[subprocess.Popen[str], IO[str]]] = {}
    try:
        for name, arguments in BESIDE.items():
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed at the end
            process = subprocess.Popen(
                [*PYTEST, *arguments], stdout=log, stderr=subprocess.STDOUT, text=True
            )
            running[name] = process, log
        status = subprocess.run([*PYTEST, *OTHERS], check=False).returncode
        for name, (process, log) in running.items():
            status = status or process.wait()
            process.wait()
            log.seek(0)
            sys.stdout.write(f"\ntests {name}:\n{log.read()}")
    finally:
        for process, log in running.values():
            process.terminate()
            process.wait()
            log.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
