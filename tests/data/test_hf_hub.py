"""Whether the Hugging Face hub can be reached, and work without it."""

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub.constants as hf_hub_constants

from flower_blsgd.data import hf_hub
from flower_blsgd.data.hf_hub import hf_hub_reachable, offline


class _Refusing(http.server.BaseHTTPRequestHandler):
    requests = 0

    def do_HEAD(self) -> None:
        _Refusing.requests += 1
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a server of our own be the hub."""
    _Refusing.requests = 0
    with http.server.HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(hf_hub_constants, "ENDPOINT", url)
        monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "*")
        yield
        server.shutdown()
        serving.join()


@pytest.mark.usefixtures("endpoint")
def test_any_answer_is_one_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hf_hub_reachable()
    assert _Refusing.requests == 1
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", True)
    assert not hf_hub_reachable()
    assert _Refusing.requests == 1


def test_one_that_is_silent_or_absent_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_hub, "_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        for endpoint in (f"http://127.0.0.1:{port}", "http://127.0.0.1:9", "nonsense"):
            monkeypatch.setattr(hf_hub_constants, "ENDPOINT", endpoint)
            began = time.monotonic()
            assert not hf_hub_reachable()
            assert time.monotonic() - began < 20  # its library takes half a minute or more


def test_offline_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    modules = (hf_hub_constants, datasets.config)
    for module in modules:
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    with offline(active=False):
        assert [module.HF_HUB_OFFLINE for module in modules] == [False] * 2
    with contextlib.suppress(KeyError), offline():
        assert [module.HF_HUB_OFFLINE for module in modules] == [True] * 2
        raise KeyError
    assert [module.HF_HUB_OFFLINE for module in modules] == [False] * 2
