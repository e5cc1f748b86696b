"""Run all tests in five processes side by side.

Many tests wait for other processes, so five keep two cores busy. The output of one is shown as it
comes, that of the others at the end. The exit status is 0 if all passed.
"""

import contextlib
import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
# Tests of the stream leave threads of gRPC behind, so they are apart from most others.
PARTS = {
    "Flower's own engines": ["tests/engines", "tests/test_task_runs.py"],
    "sessions, the command line and experiments": [
        *("tests/session", "tests/cli", "tests/experiments"),
    ],
    "failures, the stream and examples of scripts": [
        *("tests/faults", "tests/grids/stream", "tests/examples/test_own_loop.py"),
        *("tests/examples/test_lightning.py", "tests/examples/test_trainer_and_lora.py"),
        "tests/examples/test_accelerate.py",
    ],
    "the local grid, checkpoints, benchmarks, the docs and the Python interface": [
        *("tests/grids", "tests/checkpoint", "tests/benchmarks", "tests/paper", "tests/docs"),
        *("tests/examples/test_notebook.py", "tests/test_api.py", "--ignore=tests/grids/stream"),
    ],
}


def main() -> int:
    """Run all parts; return the first exit status that is not 0."""
    paths = {path for part in PARTS.values() for path in part if not path.startswith("--")}
    rest = [f"--ignore={path}" for path in sorted(paths)]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in PARTS]
        beside = [
            subprocess.Popen([*PYTEST, *part], stdout=log, stderr=subprocess.STDOUT)
            for part, log in zip(PARTS.values(), logs, strict=True)
        ]
        try:
            statuses = [subprocess.run([*PYTEST, *rest], check=False).returncode]
            statuses += [process.wait() for process in beside]
        finally:
            for process, log, title in zip(beside, logs, PARTS, strict=True):
                if sys.exc_info()[0] is not None:
                    process.terminate()
                process.wait()
                log.seek(0)
                sys.stdout.write(f"\ntests of {title}:\n{log.read()}")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
