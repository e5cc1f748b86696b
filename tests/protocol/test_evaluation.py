import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, ProtocolError

from ..in_process_grid import over_the_wire, same_bits, toy_arrays

NUM_TEST = 10


def order_of(first: int = 2, last: int = 6) -> EvaluateOrder:
    return EvaluateOrder(round=4, first=first, last=last, arrays=toy_arrays(1.0))


def sent(order: EvaluateOrder) -> Message:
    return over_the_wire(Message(order.to_records(), 7, "evaluate"))


def answered(order: EvaluateOrder, report: EvaluateReport) -> Message:
    return over_the_wire(report.to_reply(sent(order)))


def fedavg_message(**config: int) -> Message:
    records = RecordDict({"arrays": toy_arrays(1.0), "config": ConfigRecord(dict(config))})
    return over_the_wire(Message(records, 7, "evaluate"))


def test_order_survives_the_wire() -> None:
    order = order_of()
    found = EvaluateOrder.from_message(sent(order), NUM_TEST)
    assert (found.round, found.first, found.last) == (4, 2, 6)
    assert same_bits(found.arrays, order.arrays)


def test_order_of_a_plain_evaluate_message_is_the_whole_test_set() -> None:
    found = EvaluateOrder.from_message(fedavg_message(**{"server-round": 3}), NUM_TEST)
    assert (found.round, found.first, found.last) == (3, 0, NUM_TEST)
    without_config = Message(RecordDict({"arrays": toy_arrays()}), 7, "evaluate")
    found = EvaluateOrder.from_message(over_the_wire(without_config), NUM_TEST)
    assert (found.round, found.first, found.last) == (0, 0, NUM_TEST)


def test_order_without_a_model_or_of_a_slice_that_is_not_there_is_refused() -> None:
    message = sent(order_of())
    del message.content["arrays"]
    with pytest.raises(ProtocolError, match="no model"):
        EvaluateOrder.from_message(message, NUM_TEST)
    for first, last in ((-1, 3), (3, 3), (5, 3), (0, NUM_TEST + 1)):
        with pytest.raises(ProtocolError, match=f"{first} to {last}"):
            EvaluateOrder.from_message(sent(order_of(first, last)), NUM_TEST)


def test_report_survives_the_wire_to_the_last_bit_also_with_a_loss_alone() -> None:
    order, report = order_of(), EvaluateReport(2, 6, [0.1 + 0.2], [1 / 3])
    assert EvaluateReport.from_content(answered(order, report).content, order) == report
    assert (report.num_examples, report.loss) == (4, (0.1 + 0.2) / 4)
    assert report.totals == {"accuracy": 1 / 3}
    report = EvaluateReport(2, 6, [4.0, 2.0], [], [])
    assert EvaluateReport.from_content(answered(order, report).content, order) == report
    whole = EvaluateReport.total([report, EvaluateReport(6, 10, [6.0], [], [])])
    assert dict(whole.metrics()) == {"loss": 1.5}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("first", 1, "samples 1 to 6"),
        ("last", 7, "samples 2 to 7"),
        ("loss-sums", [], "of each batch"),
        ("loss-sums", [4.0, 0.0], "of each batch"),
        ("metric-names", ["precision", "recall"], "of each batch"),
        ("metric-names", [], "of each batch"),
        ("seconds", -1.0, "seconds"),
    ],
)
def test_report_that_is_nonsense_is_refused(key: str, value: object, expected: str) -> None:
    order = order_of()
    reply = answered(order, EvaluateReport(2, 6, [4.0], [3.0]))
    reply.content["sums"][key] = value
    with pytest.raises(ProtocolError, match=expected):
        EvaluateReport.from_content(reply.content, order)


def test_report_of_a_client_that_knows_only_fedavg_holds_no_sums() -> None:
    reply = answered(order_of(), EvaluateReport(2, 6, [4.0], [3.0]))
    del reply.content["sums"]
    reply.content["model"] = ArrayRecord({"x": Array("float32", (1,), "numpy.ndarray", b"")})
    with pytest.raises(ProtocolError, match="no sums"):
        EvaluateReport.from_content(reply.content, order_of())
