"""A link that is down, and connections that are reset, while a node computes and while it waits.

The round waits, the session stays, nothing is computed twice, and no reply is lost. The longer
outages run with `make soak`.
"""

import time
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from ..processes import wait_until
from .streams import (
    LinkedGrid,
    answer,
    collect,
    config_of,
    exchange,
    flower_of,
    made_app,
    order,
    streaming,
)


@pytest.mark.parametrize(
    "seconds",
    [0.2, 2.0, *(pytest.param(s, marks=pytest.mark.soak) for s in (10.0, 40.0))],
)
@pytest.mark.parametrize("kind", ["down", "reset"])
def test_outage(kind: str, seconds: float) -> None:
    calls: list[Any] = []

    def count(message: Message, _: Context) -> RecordDict:
        config = message.content["config"]
        calls.append(config["x"])
        time.sleep(config["seconds"])
        return answer(x=config["x"], calls=calls)

    with streaming(made_app(count), kind=LinkedGrid) as grid:
        exchange(grid, order(x=0, seconds=0.0))
        (computing,) = grid.push_messages([order(x=1, seconds=0.3)])
        time.sleep(0.1)
        grid.link.stall() if kind == "down" else grid.link.cut()
        (sent_meanwhile,) = grid.push_messages([order(x=2, seconds=0.0)])
        time.sleep(seconds)
        grid.link.restore()
        replies = map(config_of, collect(grid, [computing, sent_meanwhile]))
        assert {reply["x"]: reply["calls"] for reply in replies} == {1: [0, 1], 2: [0, 1, 2]}
        assert wait_until(lambda: list(grid.get_node_ids()) == [7])
        (reply,) = exchange(grid, order(x=3, seconds=0.0))
        assert config_of(reply) == {"x": 3, "calls": [0, 1, 2, 3]}
        assert len(flower_of(grid).pushed) == 1, "the session is still the first"
