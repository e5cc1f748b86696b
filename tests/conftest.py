"""What all tests share."""

import pytest

from flower_blsgd.runtime.flower_internals import become_server


@pytest.fixture(autouse=True)
def _may_make_messages() -> None:
    """Flower lets only its own processes make messages, unless told who they are."""
    become_server(run_id=1)
