"""What all tests share."""

import signal

import pytest

from flower_blsgd.runtime.flower_internals import become_server

# A shell starts what it puts into the background (`make test &`) with Ctrl-C ignored, and every
# process started from there inherits that: the tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _may_make_messages() -> None:
    """Flower lets only its own processes make messages, unless told who they are."""
    become_server(run_id=1)
