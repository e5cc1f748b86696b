"""What the user sees of what several SuperNodes say."""

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.supernode import together
from flower_blsgd.supernode.endings import SuperNodeEndedError
from flower_blsgd.supernode.node_plan import NodeLaunch
from flower_blsgd.supernode.node_process import Ended
from flower_blsgd.supernode.together import _Voice

LAUNCH = NodeLaunch("hare", (), (), {}, "lab:8100", None, 9001)
CONNECTED = "SuperNode hare is connected to lab:8100 (node 77)"


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def voice(shown: list[str]) -> _Voice:
    return _Voice(LAUNCH, shown.append, alone=False)


def test_connecting_is_one_line_and_the_rest_is_shown_as_it_comes(
    voice: _Voice, shown: list[str]
) -> None:
    for line in ("INFO: Starting", "INFO: Uvicorn", "\x1b[92mINFO \x1b[0m: SuperNode ID: 77"):
        voice.hear(line)
    assert shown == [CONNECTED]
    voice.hear("\x1b[92mINFO \x1b[0m: [RUN 1]")
    voice.hear("")
    assert shown == [CONNECTED, "[hare] \x1b[92mINFO \x1b[0m: [RUN 1]", "[hare] "]


def test_one_node_alone_needs_no_name_before_its_lines(shown: list[str]) -> None:
    voice = _Voice(LAUNCH, shown.append, alone=True)
    voice.hear("SuperNode ID: 77")
    voice.hear("a line")
    assert shown == [CONNECTED, "a line"]


def test_connecting_that_takes_long_is_shown(
    voice: _Voice, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    voice.lose_patience()  # it has not said a word yet
    voice.hear("INFO: Starting")
    voice.lose_patience()
    assert shown == []
    now = together.time.monotonic()
    monkeypatch.setattr(together.time, "monotonic", lambda: now + together._QUIET_SECONDS + 1)
    voice.lose_patience()
    voice.hear("WARNING: retrying")
    assert shown == ["[hare] INFO: Starting", "[hare] WARNING: retrying"]


def test_reason_is_kept_whatever_is_said_after_it(voice: _Voice, shown: list[str]) -> None:
    voice.hear("INFO: Starting")
    voice.hear("\x1b[91mERROR \x1b[0m:   Exit Code: 305")
    voice.hear("Failed to initialize the connection to the SuperLink.")
    voice.hear("[code: 2001] All SuperNodes must be registered via the CLI.")
    for _ in range(500):
        voice.hear("  a traceback of what is ended with it")
    reason = voice.end(Ended(0, 1))
    assert isinstance(reason, UsageError)
    assert "takes registered SuperNodes only" in str(reason)
    assert shown == []


def test_reason_that_nobody_knows_is_shown_whole(voice: _Voice, shown: list[str]) -> None:
    lines = [
        "SuperNode ID: 77",
        "at work",
        "ERROR: Exit Code: 399",
        "out of paper",
        "shutting down",
    ]
    for line in lines:
        voice.hear(line)
    assert shown == [CONNECTED, "[hare] at work"]
    assert isinstance(voice.end(Ended(0, 1)), SuperNodeEndedError)
    assert shown == [CONNECTED, *(f"[hare] {line}" for line in lines[1:])]
