"""Whether the Hugging Face hub can be reached."""

import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub.constants as hf_hub_constants

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
