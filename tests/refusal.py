"""What a user reads when something is refused."""

from collections.abc import Callable

import pytest

from flower_blsgd.errors import UsageError


def refusal(call: Callable[..., object], *arguments: object, **settings: object) -> str:
    """Call a function and return the message, of one line, with which it refuses to work."""
    with pytest.raises(UsageError) as refused:
        call(*arguments, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)
