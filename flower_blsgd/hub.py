"""Whether the hub of data sets and models can be asked, found out in seconds."""

import contextlib
import http.client
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_PATIENCE_SECONDS = 5.0


def hub_answers() -> bool:
    """Say whether the hub can be asked: it is not switched off, and it answers at all.

    The hub's own library tries for half a minute before it gives up.
    """
    import huggingface_hub.constants as hub

    return not hub.HF_HUB_OFFLINE and _answers(str(hub.ENDPOINT))


@contextlib.contextmanager
def offline(active: bool = True) -> Iterator[None]:
    """Keep the hub's libraries from asking again and again; they use what they have downloaded.

    Parameters
    ----------
    active : bool (default: True)
        False changes nothing.
    """
    import huggingface_hub.constants as hub

    modules: list[Any] = [hub]
    if "datasets" in sys.modules:
        modules.append(sys.modules["datasets"].config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules if active else ():
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _answers(endpoint: str) -> bool:
    answered = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return answered.is_set()
