"""What all tests share."""

import os
import signal

# Before torch is loaded, and for all that tests start: the threads of OpenMP wait for one another
# by spinning. Where several processes share the cores, as here, that takes most of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from flower_blsgd.runtime.flower_internals import become_server

# A shell starts what it puts into the background (`make test &`) with Ctrl-C ignored, and every
# process started from there inherits that: the tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _may_make_messages() -> None:
    """Flower lets only its own processes make messages, unless told who they are."""
    become_server(run_id=1)
