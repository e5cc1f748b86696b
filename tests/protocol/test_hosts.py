"""Messages to and from a node with several devices."""

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from flower_blsgd.protocol import Failure, HostOrders, HostReply, ProtocolError

from ..in_process_grid import over_the_wire, same_bits, toy_arrays


def orders() -> HostOrders:
    arrays, momentum = toy_arrays(1.0), toy_arrays(2.0)
    contents = {
        rank: RecordDict(
            {"0/model": arrays, "momentum": momentum, "settings": ConfigRecord({"steps": rank})}
        )
        for rank in (2, 0, 11)
    }
    names = "0/model", "settings", "weight"
    return HostOrders(contents, *names, "equal", [0.0, 1.5], ["weight", "copy"], ["copy"])


def sent() -> Message:
    return over_the_wire(Message(orders().to_records(), 7, "train"))


def replied() -> RecordDict:
    reply = HostReply(
        {
            0: RecordDict({"metrics": MetricRecord({"x": 1})}),
            12: RecordDict({"metrics": MetricRecord({"x": 2})}),
        },
        {
            1: Failure("raised", "Traceback\nRuntimeError: the fan stands still\n"),
            4: Failure("died", ""),
            5: Failure("raised", "a buffer changed", refused=True),
        },
        RecordDict({"0/arrays": toy_arrays(5.0)}),
    )
    return over_the_wire(reply.to_reply(sent())).content


def test_orders_survive_the_wire_and_shared_records_travel_once() -> None:
    """Names are the user's choice, and may look like those of a worker's own records."""
    message = sent()
    orders_of_three = {"0/order", "2/order", "11/order"}
    assert set(message.content) == {"host", "/0/model", "/momentum", *orders_of_three}
    found, expected = HostOrders.from_message(message), orders()
    assert list(found.contents) == [0, 2, 11]
    for rank, content in found.contents.items():
        assert set(content) == {"0/model", "momentum", "settings"}
        assert content["settings"] == expected.contents[rank]["settings"]
        assert same_bits(content["momentum"], expected.contents[rank]["momentum"])
    for name in ("arrays_key", "config_key", "weighted_by", "worker_weight"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.update_norms, found.moving) == ([0.0, 1.5], ["weight", "copy"])
    assert found.maybe_tied == ["copy"]


@pytest.mark.parametrize("kind", [ConfigRecord, MetricRecord])
def test_orders_without_our_records_are_refused(kind: type) -> None:
    message = sent()
    message.content["host"] = kind({"x": 1})
    with pytest.raises(ProtocolError, match="arrays-key"):
        HostOrders.from_message(message)
    message = sent()
    for rank in (0, 2, 11):
        del message.content[f"{rank}/order"]
    with pytest.raises(ProtocolError, match="no orders"):
        HostOrders.from_message(message)


@pytest.mark.parametrize("rank", ["00", "9" * 5000, "-1", "٣"])
def test_record_of_no_rank_is_nobodys(rank: str) -> None:
    """Neither a second record of rank 0, nor more digits than Python reads."""
    content = replied()
    content[f"{rank}/metrics"] = MetricRecord({"x": 3})
    found = HostReply.from_content(content)
    assert sorted(found.parts) == [0, 12]
    assert found.parts[0]["metrics"] == MetricRecord({"x": 1})


def test_reply_survives_the_wire() -> None:
    found = HostReply.from_content(replied())
    assert sorted(found.parts) == [0, 12]
    assert found.parts[12]["metrics"] == MetricRecord({"x": 2})
    assert set(found.shared) == {"0/arrays"}
    assert found.failures[1].kind == "raised"
    assert found.failures[1].brief == "RuntimeError: the fan stands still"
    assert found.failures[4].brief == "died"
    assert [found.failures[rank].refused for rank in (1, 4, 5)] == [False, False, True]


def test_reply_of_another_node_is_refused() -> None:
    content = replied()
    del content["host"]
    with pytest.raises(ProtocolError, match="several devices"):
        HostReply.from_content(content)
