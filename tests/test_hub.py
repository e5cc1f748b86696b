"""Whether the hub can be asked."""

import http.server
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub.constants as hub

from flower_blsgd.hub import hub_answers, offline


class _Asked(http.server.BaseHTTPRequestHandler):
    count = 0

    def do_HEAD(self) -> None:
        _Asked.count += 1
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a server of our own be the hub."""
    _Asked.count = 0
    with http.server.HTTPServer(("127.0.0.1", 0), _Asked) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "*")
        yield
        server.shutdown()
        serving.join()


@pytest.mark.usefixtures("endpoint")
def test_any_answer_is_one() -> None:
    assert hub_answers()
    assert _Asked.count == 1


@pytest.mark.usefixtures("endpoint")
def test_a_hub_that_is_switched_off_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert not hub_answers()
    assert _Asked.count == 0


@pytest.mark.parametrize("before", [False, True])
def test_offline_is_put_back(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    datasets = pytest.importorskip("datasets")
    modules = (hub, datasets.config)
    for module in modules:
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", before)
    with offline(active=False):
        assert [module.HF_HUB_OFFLINE for module in modules] == [before] * 2
    seen: list[bool] = []

    def fail() -> None:
        with offline():
            seen.extend(module.HF_HUB_OFFLINE for module in modules)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [True] * 2
    assert [module.HF_HUB_OFFLINE for module in modules] == [before] * 2
