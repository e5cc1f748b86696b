"""What all tests share."""

import os
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Before torch is loaded, and for all that tests start: the threads of OpenMP wait for one another
# by spinning. Where several processes share the cores, as here, that takes most of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# gRPC's own handlers of a fork can crash or block the child if a server and its client are in one
# process, as in tests of the stream. In a run they never are, and gRPC skips these handlers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# The processes that tests start compile our modules once, and not each for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import HealthCheck, settings

from flower_blsgd.flower.internals import become_server
from flower_blsgd.results.recorder import RunRecorder

from .command import Command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# `make test` draws the same examples every time, `make fuzz` new ones, and more of them. No test
# sets these itself, but for the numbers in tests/fuzz; a busy machine is no failure.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    derandomize=False,
    database=None,
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_WAITING_MARKERS = "engines", "processes"

# A shell starts what it puts into the background (`make test &`) with Ctrl-C ignored, and every
# process started from there inherits that: the tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Progress:
    """Shows when each file begins, where several run at once: some wait for processes for long."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter = config.pluginmanager.get_plugin("terminalreporter")
        self._start, self._begun = time.monotonic(), set[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file not in self._begun:
            self._begun.add(file)
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{time.monotonic() - self._start:4.0f} s  {file}")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count what passes, and show nothing."""
        is_passed_test = report.passed and report.when == "call"
        return ("passed", "", "PASSED") if is_passed_test else None


@pytest.hookimpl(trylast=True)  # after the reporter
def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, also in all that tests start
    if getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Progress(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that wait for processes first: `make test` runs files side by side, in this order.

    The longest ones must not begin last. Tests with the same markers keep their order.
    """
    items.sort(key=lambda item: [item.get_closest_marker(n) is None for n in _WAITING_MARKERS])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a CUDA device where there is none."""
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device; tests/fake_cuda runs it on an emulated one")


@pytest.fixture(autouse=True)
def _may_make_messages() -> None:
    """Flower lets only its own processes make messages, unless this is called."""
    become_server(run_id=1)


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw nothing, which takes a second, except for tests marked so."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr(RunRecorder, "_draw", lambda self: None)


@pytest.fixture
def blsgd(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs ``blsgd`` in this process and returns its output."""
    return Command(capsys)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: steps this small only wait for others, and bits repeat."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list["Figure"]:
    """Return a list to which every figure is appended instead of being saved, which is slow."""
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))
    return saved
