import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from flower_blsgd.protocol import ProtocolError, ScoreOrder, ScoreReport

from ..in_process_grid import over_the_wire, same_bits, toy_arrays

ORDER = ScoreOrder(4, np.array([7, 0, 7], np.int32), toy_arrays(1.0))


def sent() -> Message:
    return over_the_wire(Message(ORDER.to_records(), 7, "query.score"))


def answered(*losses: float) -> Message:
    return over_the_wire(ScoreReport(np.array(losses, np.float32)).to_reply(sent()))


def test_order_and_report_survive_the_wire() -> None:
    found = ScoreOrder.from_message(sent())
    assert (found.round, found.indices.tolist()) == (4, [7, 0, 7])
    assert found.indices.dtype == np.int32
    assert same_bits(found.arrays, ORDER.arrays)
    report = ScoreReport.from_content(answered(0.1, 0.0, 3.5).content, ORDER)
    assert report.losses.tobytes() == np.array([0.1, 0.0, 3.5], np.float32).tobytes()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("indices", b"abc", "not int32 bytes"),
        ("indices", np.array([-1], "<i4").tobytes(), "below 0"),
        ("server-round", -1, "out of its range"),
    ],
)
def test_order_that_is_nonsense_is_refused(key: str, value: object, expected: str) -> None:
    message = sent()
    message.content.config_records["config"][key] = value  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match=expected):
        ScoreOrder.from_message(message)
    del message.content["arrays"]
    with pytest.raises(ProtocolError, match="no model"):
        ScoreOrder.from_message(message)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((1.0, 2.0), "3 samples were to be scored, but there are 2 losses"),
        ((1.0, float("nan"), 2.0), "not finite"),
        ((1.0, float("inf"), 2.0), "not finite"),
    ],
)
def test_report_of_other_losses_is_refused(losses: tuple[float, ...], expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        ScoreReport.from_content(answered(*losses).content, ORDER)


@pytest.mark.parametrize("raw", [b"abc", 3.0, None])
def test_report_without_float32_bytes_is_refused(raw: object) -> None:
    reply = answered(1.0, 2.0, 3.0)
    values = {} if raw is None else {"losses": raw}
    reply.content["losses"] = ConfigRecord(values)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="losses are not float32 bytes"):
        ScoreReport.from_content(reply.content, ORDER)
