"""Whether the Hugging Face hub can be reached."""

import socket
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub.constants as hf_hub_constants

from flower_blsgd.data import source
from flower_blsgd.data.source import hf_hub_reachable


def test_any_answer_is_one_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any, timeout: float) -> None:
        assert (request.full_url, request.method) == ("http://hub", "HEAD")
        raise urllib.error.HTTPError("http://hub", 404, "not found", Message(), None)

    monkeypatch.setattr(hf_hub_constants, "ENDPOINT", "http://hub")
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert hf_hub_reachable()
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", True)
    assert not hf_hub_reachable()


def test_one_that_is_silent_or_absent_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source, "_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    for endpoint in ("http://127.0.0.1:9", "nonsense"):
        monkeypatch.setattr(hf_hub_constants, "ENDPOINT", endpoint)
        assert not hf_hub_reachable()
    silent, began = threading.Event(), time.monotonic()
    monkeypatch.setattr(hf_hub_constants, "ENDPOINT", "http://hub")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: silent.wait(60))
    assert not hf_hub_reachable()
    assert time.monotonic() - began < 20  # its library takes half a minute or more
    silent.set()
