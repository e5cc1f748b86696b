"""Find out in seconds whether the Hugging Face hub can be reached, and work without it if not."""

import contextlib
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_TIMEOUT_SECONDS = 5.0


def hf_hub_reachable() -> bool:
    """Return whether the hub is not switched off (``HF_HUB_OFFLINE``), and answers at all.

    Its own library tries for half a minute before it gives up.
    """
    import huggingface_hub.constants as hf_hub

    if hf_hub.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def request() -> None:
        try:
            head = urllib.request.Request(str(hf_hub.ENDPOINT), method="HEAD")
            urllib.request.urlopen(head, timeout=_TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except Exception:  # there is no network, no such address, or something else answers
            return
        answered.set()

    requesting = threading.Thread(target=request, daemon=True)  # resolving a name has no timeout
    requesting.start()
    requesting.join(_TIMEOUT_SECONDS)
    return answered.is_set()


@contextlib.contextmanager
def offline(active: bool = True) -> Iterator[None]:
    """Let the hub's libraries use only what they have downloaded, for the length of a block.

    Parameters
    ----------
    active : bool (default: True)
        False changes nothing.
    """
    import huggingface_hub.constants as hf_hub

    modules: list[Any] = [hf_hub]
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
