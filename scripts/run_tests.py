"""Run all tests in three processes side by side.

Many tests wait for other processes, so three keep two cores busy. Tests of Flower's own engines and
of failures run in one of them, apart from all others: those of the stream leave threads of gRPC
behind. What the first two print comes at the end. The exit status is 0 if all passed.
"""

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
ENGINES = ["tests/faults", "tests/engines", "tests/runtime/stream"]
PARTS = [
    *("tests/runtime", "tests/checkpoint", "tests/benchmarks", "tests/test_paper_configs.py"),
    *("tests/experiments/test_compare_processes.py", "tests/test_api.py"),
]


def main() -> int:
    """Run all sets; return the first exit status that is not 0."""
    beside_of = {
        "engines, failures and streams": ENGINES,
        "the local grid, checkpoints, benchmarks and the Python interface": [
            *PARTS,
            *_without(ENGINES),
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(f"{folder}/{n}", "w+") for n, _ in enumerate(beside_of)]  # noqa: SIM115
        beside = [
            subprocess.Popen([*PYTEST, *paths], stdout=log, stderr=subprocess.STDOUT)
            for paths, log in zip(beside_of.values(), logs, strict=True)
        ]
        try:
            others = subprocess.run([*PYTEST, *_without([*ENGINES, *PARTS])], check=False)
            status = others.returncode or max(process.wait() for process in beside)
        finally:
            for process, log, title in zip(beside, logs, beside_of, strict=True):
                if sys.exc_info()[0] is not None:
                    process.terminate()
                process.wait()
                log.seek(0)
                sys.stdout.write(f"\ntests of {title}:\n{log.read()}")
                log.close()
    return status


def _without(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


if __name__ == "__main__":
    sys.exit(main())
