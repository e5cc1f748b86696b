"""The ClientApp's line, and what of Flower it relies on."""

import inspect
from collections.abc import Iterator

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.superlink.grid.http_grid import HttpGrid

from flower_blsgd import serve_sessions
from flower_blsgd.runtime.flower_internals import inside_lifespan, is_deployment, superlink_of

from .streams import FakeFlower, answer


def test_app_is_changed_in_place_and_returned() -> None:
    app = ClientApp()
    assert serve_sessions(app) is app
    assert serve_sessions(app) is app, "twice is as good as once"


def test_functions_may_be_added_before_and_after() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        return Message(answer(who="train"), reply_to=message)

    serve_sessions(app)

    @app.evaluate()
    def evaluate(message: Message, _: Context) -> Message:
        return Message(answer(who="evaluate"), reply_to=message)

    context = Context(1, 7, {}, RecordDict(), {})
    for kind in ("train", "evaluate"):
        reply = app(Message(RecordDict(), 7, kind), context)
        assert reply.content["config"]["who"] == kind


@pytest.mark.filterwarnings("ignore")
def test_app_with_client_fn_is_refused_with_the_way_out() -> None:
    app = ClientApp(client_fn=lambda context: NumPyClient().to_client())
    with pytest.raises(ValueError, match=r"client_fn.*@app\.train"):
        serve_sessions(app)


def test_deployment_is_flowers_http_grid_alone() -> None:
    grid = HttpGrid.__new__(HttpGrid)
    assert is_deployment(grid)
    assert not is_deployment(FakeFlower())
    assert superlink_of(FakeFlower()) == ""


def test_grid_knows_the_superlinks_address(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(HttpGrid.__init__).parameters
    address = next(name for name in parameters if "address" in name)
    values = {address: "127.0.0.1:9999"}
    for name, parameter in parameters.items():
        if name not in ("self", address) and parameter.default is parameter.empty:
            values[name] = "x"
    assert "127.0.0.1:9999" in superlink_of(HttpGrid(**values))  # type: ignore[arg-type]


def test_app_inside_its_lifespan_enters_it_no_more_and_is_otherwise_the_same() -> None:
    entered: list[int] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        return Message(answer(entered=len(entered)), reply_to=message)

    @app.lifespan()
    def lifespan(context: Context) -> Iterator[None]:
        entered.append(context.node_id)
        yield

    context = Context(1, 7, {}, RecordDict(), {})
    inner = inside_lifespan(app)
    assert inner(Message(RecordDict(), 7, "train"), context).content["config"]["entered"] == 0
    assert app(Message(RecordDict(), 7, "train"), context).content["config"]["entered"] == 1
