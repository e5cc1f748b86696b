"""The limit of open files goes up as far as it may, and never down."""

import resource
import subprocess
import sys

PROGRAM = """
import resource
from flower_blsgd.runtime.open_files import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
allow_open_files({count})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(count: int) -> list[str]:
    program = [sys.executable, "-c", PROGRAM.format(count=count)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()


def test_as_many_as_asked_for() -> None:
    assert limits_after(150) == ["150", "200"]


def test_no_more_than_the_system_allows() -> None:
    assert limits_after(1000) == ["200", "200"]


def test_never_less_than_before() -> None:
    assert limits_after(50) == ["100", "200"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    from flower_blsgd.runtime.open_files import allow_open_files

    allow_open_files(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
