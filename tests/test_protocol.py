"""What crosses the wire: every record there and back, and every reply that is refused."""

import dataclasses

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_blsgd.protocol import (
    ProfileQuery,
    ProtocolError,
    TrainOrder,
    TrainReport,
    WorkerProfile,
)

from .in_process_grid import over_the_wire, same_bits, toy_arrays

PROFILE = WorkerProfile(
    device="cuda:1",
    tier="slow",
    name="attic",
    partition_id=3,
    steps=5,
    seconds_per_step=0.25,
    seconds_per_step_alone=0.125,
    data_fingerprint="00ff",
)


def order_of(steps: int = 2, batch_size: int = 3, **changes: object) -> TrainOrder:
    order = TrainOrder(
        round=4,
        epoch=2,
        local_steps=steps,
        batch_size=batch_size,
        learning_rate=0.125,
        seed=2**62 + 1,
        deadline_seconds=1.5,
        momentum_policy="keep",
        indices=np.arange(steps * batch_size, dtype=np.int32)[::-1].copy(),
        arrays=toy_arrays(1.0),
    )
    return dataclasses.replace(order, **changes)


def report_of(order: TrainOrder, steps: int | None = None, **changes: object) -> TrainReport:
    steps = order.local_steps if steps is None else steps
    report = TrainReport(
        completed_steps=steps,
        batch_size=order.batch_size,
        compute_seconds=0.5,
        started_at=1000.25,
        ended_at=1000.75,
        losses=np.arange(steps * order.batch_size, dtype=np.float32),
        arrays=toy_arrays(2.0),
    )
    return dataclasses.replace(report, **changes)


def sent(order: TrainOrder) -> Message:
    return over_the_wire(Message(order.to_records(), 7, "train"))


def answered(order: TrainOrder, report: TrainReport) -> Message:
    return over_the_wire(report.to_reply(sent(order)))


def query() -> Message:
    return over_the_wire(Message(RecordDict({"config": ConfigRecord()}), 7, "query.profile"))


def profile_reply(**records: ConfigRecord) -> Message:
    content = RecordDict({name.replace("_", "-"): record for name, record in records.items()})
    return Message(content, reply_to=query())


def profile_record(**changes: object) -> ConfigRecord:
    reply = PROFILE.to_reply(query())
    record = reply.content.config_records["profile"]
    for key, value in changes.items():
        record[key.replace("_", "-")] = value  # type: ignore[assignment]
    return record


# --- profiles


@pytest.mark.parametrize("profile", [PROFILE, WorkerProfile("cpu:0-3")], ids=["full", "defaults"])
def test_profile_survives_the_wire(profile: WorkerProfile) -> None:
    reply = over_the_wire(profile.to_reply(query()))
    assert WorkerProfile.list_from_reply(reply) == [profile]


def test_profile_keys_are_in_kebab_case() -> None:
    assert set(profile_record()) == {
        "device",
        "tier",
        "name",
        "partition-id",
        "steps",
        "seconds-per-step",
        "seconds-per-step-alone",
        "data-fingerprint",
        "model-fingerprint",
    }


def test_profile_reply_with_two_devices_holds_two_profiles() -> None:
    reply = profile_reply(profile_0=profile_record(), profile_1=profile_record(device="cpu"))
    devices = [profile.device for profile in WorkerProfile.list_from_reply(reply)]
    assert devices == ["cuda:1", "cpu"]


def test_profile_whole_number_stands_for_a_float() -> None:
    (profile,) = WorkerProfile.list_from_reply(
        profile_reply(profile=profile_record(seconds_per_step=2))
    )
    assert isinstance(profile.seconds_per_step, float)
    assert profile.seconds_per_step == 2.0


def test_profile_missing_record_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no profile"):
        WorkerProfile.list_from_reply(profile_reply(settings=profile_record()))


def test_profile_missing_key_is_refused() -> None:
    record = profile_record()
    del record["device"]
    with pytest.raises(ProtocolError, match="device"):
        WorkerProfile.list_from_reply(profile_reply(profile=record))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", 3),
        ("steps", "5"),
        ("steps", True),
        ("partition_id", 1.0),
        ("seconds_per_step", "fast"),
        ("seconds_per_step_alone", "fast"),
        ("data_fingerprint", b"00ff"),
    ],
)
def test_profile_wrong_type_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=key.replace("_", "-")):
        WorkerProfile.list_from_reply(profile_reply(profile=profile_record(**{key: value})))


# --- profile queries


@pytest.mark.parametrize(
    "query", [ProfileQuery(), ProfileQuery(True, 32), ProfileQuery(True, 32, 0.25)], ids=str
)
def test_query_survives_the_wire(query: ProfileQuery) -> None:
    message = over_the_wire(Message(query.to_records(), 7, "query.profile"))
    assert set(message.content.config_records["config"]) == {"calibrate", "batch-size", "seconds"}
    assert ProfileQuery.from_message(message) == query


def test_query_without_our_keys_asks_only_who_it_is() -> None:
    assert ProfileQuery.from_message(query()) == ProfileQuery(calibrate=False)
    empty = Message(RecordDict(), 7, "query.profile")
    assert ProfileQuery.from_message(over_the_wire(empty)) == ProfileQuery()


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"calibrate": 1}, "calibrate"),
        ({"calibrate": "yes"}, "calibrate"),
        ({"calibrate": True}, "batch-size = 0"),
        ({"calibrate": True, "batch-size": -3}, "batch-size = -3"),
        ({"calibrate": True, "batch-size": 2.0}, "batch-size"),
        ({"batch-size": True}, "batch-size"),
    ],
    ids=str,
)
def test_query_broken_value_is_refused_by_name(record: dict[str, object], told: str) -> None:
    config = ConfigRecord(record)  # type: ignore[arg-type]
    message = Message(RecordDict({"config": config}), 7, "query.profile")
    with pytest.raises(ProtocolError, match=told):
        ProfileQuery.from_message(over_the_wire(message))


# --- orders


def test_order_survives_the_wire() -> None:
    order = order_of()
    found = TrainOrder.from_message(sent(order))
    for field in dataclasses.fields(TrainOrder):
        if field.name not in ("indices", "arrays", "momentum"):
            assert getattr(found, field.name) == getattr(order, field.name), field.name
    assert found.indices.tolist() == [5, 4, 3, 2, 1, 0]
    assert found.indices.dtype == np.int32
    assert same_bits(found.arrays, order.arrays)
    assert found.momentum is None


def test_order_with_momentum_survives_the_wire() -> None:
    order = order_of(momentum=toy_arrays(3.0), momentum_policy="average")
    found = TrainOrder.from_message(sent(order))
    assert found.momentum is not None
    assert same_bits(found.momentum, order.momentum)
    assert same_bits(found.arrays, order.arrays)


def test_order_indices_are_little_endian_int32_bytes() -> None:
    order = order_of(1, 2, indices=np.array([1, 258], np.int32))
    config = order.to_records().config_records["config"]
    assert config["indices"] == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_order_keeps_flowers_own_names_beside_ours() -> None:
    config = order_of().to_records().config_records["config"]
    assert config["server-round"] == config["round"] == 4
    assert config["lr"] == config["learning-rate"] == 0.125


def test_order_shares_the_model_and_nothing_else() -> None:
    arrays = toy_arrays()
    first = order_of(arrays=arrays).to_records()
    second = order_of(arrays=arrays).to_records()
    assert first["arrays"] is second["arrays"] is arrays
    assert first["config"] is not second["config"]


def test_order_under_other_record_names() -> None:
    order = order_of()
    message = Message(order.to_records("model", "settings"), 7, "train")
    assert set(message.content) == {"model", "settings"}
    found = TrainOrder.from_message(over_the_wire(message), "model", "settings")
    assert found.indices.tolist() == order.indices.tolist()


def test_order_of_another_strategy_is_refused_with_the_way_out() -> None:
    records = RecordDict(
        {"arrays": toy_arrays(), "config": ConfigRecord({"server-round": 1, "lr": 0.1})}
    )
    with pytest.raises(ProtocolError, match="BiasedLocalSGD"):
        TrainOrder.from_message(Message(records, 7, "train"))


def test_order_without_a_model_is_refused() -> None:
    records = order_of().to_records()
    del records["arrays"]
    with pytest.raises(ProtocolError, match="no order"):
        TrainOrder.from_message(Message(records, 7, "train"))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("indices", b"\x00" * 20, "5 indices"),
        ("indices", b"\x00" * 23, "indices"),
        ("indices", [0, 1, 2, 3, 4, 5], "indices"),
        ("local-steps", 3, "3 steps of 3"),
        ("local-steps", 2.0, "local-steps"),
        ("epoch", "two", "epoch"),
        ("learning-rate", True, "learning-rate"),
        ("momentum-policy", 1, "momentum-policy"),
    ],
)
def test_order_broken_value_is_refused_by_name(key: str, value: object, told: str) -> None:
    message = sent(order_of())
    message.content.config_records["config"][key] = value  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match=told):
        TrainOrder.from_message(message)


def test_order_missing_value_is_refused_by_name() -> None:
    message = sent(order_of())
    del message.content.config_records["config"]["seed"]
    with pytest.raises(ProtocolError, match="seed"):
        TrainOrder.from_message(message)


@settings(max_examples=30, deadline=None)
@given(
    steps=st.integers(1, 5),
    batch_size=st.integers(1, 5),
    learning_rate=st.floats(0, 1e30),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_order_any_values_survive_the_wire(
    steps: int, batch_size: int, learning_rate: float, seed: int, data: st.DataObject
) -> None:
    indices = data.draw(hnp.arrays(np.int32, steps * batch_size))
    order = order_of(steps, batch_size, indices=indices, learning_rate=learning_rate, seed=seed)
    found = TrainOrder.from_message(sent(order))
    assert found.indices.tolist() == indices.tolist()
    assert (found.learning_rate, found.seed) == (learning_rate, seed)


# --- reports


def test_report_survives_the_wire() -> None:
    order = order_of()
    report = report_of(order, 1)
    found = TrainReport.from_reply(answered(order, report), order)
    assert found.completed_steps == 1
    assert found.batch_size == 3
    assert (found.compute_seconds, found.started_at, found.ended_at) == (0.5, 1000.25, 1000.75)
    assert found.losses.tolist() == [0.0, 1.0, 2.0]
    assert same_bits(found.arrays, report.arrays)
    assert found.momentum is None


def test_report_with_momentum_survives_the_wire() -> None:
    order = order_of()
    report = report_of(order, momentum=toy_arrays(5.0))
    found = TrainReport.from_reply(answered(order, report), order)
    assert same_bits(found.momentum, report.momentum)
    assert same_bits(found.arrays, report.arrays)


def test_report_losses_are_little_endian_float32_bytes() -> None:
    order = order_of(1, 2)
    reply = report_of(order, losses=np.array([1.0, -2.0], np.float32)).to_reply(sent(order))
    raw = reply.content.config_records["losses"]["losses"]
    assert raw == b"\x00\x00\x80\x3f\x00\x00\x00\xc0"


def test_report_counts_examples_and_their_mean_loss() -> None:
    order = order_of(2, 3)
    report = report_of(order)  # losses 0, 1, 2, 3, 4, 5
    assert report.num_examples == 6
    assert report.mean_loss == 2.5
    (metrics,) = answered(order, report).content.metric_records.values()
    assert metrics["num-examples"] == 6
    assert metrics["train-loss"] == 2.5


def test_report_without_a_step_has_no_mean_loss() -> None:
    order = order_of()
    report = report_of(order, 0)
    assert np.isnan(report.mean_loss)
    found = TrainReport.from_reply(answered(order, report), order)
    assert found.completed_steps == found.num_examples == len(found.losses) == 0


def test_report_can_be_averaged_by_flowers_own_fedavg() -> None:
    order = order_of(2, 3)
    replies = []
    for value, steps in ((1.0, 2), (4.0, 1)):
        report = report_of(order, steps, arrays=toy_arrays(value))
        replies.append(answered(order, report))
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    assert arrays["weight"].numpy() == pytest.approx(np.full((2, 1), 2.0))  # (6 x 1 + 3 x 4) / 9
    assert metrics is not None
    assert metrics["train-loss"] == pytest.approx((6 * 2.5 + 3 * 1.0) / 9)


def test_report_of_a_client_that_knows_only_fedavg_counts_as_all_steps() -> None:
    order = order_of(2, 3)
    records = RecordDict(
        {"weights": toy_arrays(9.0), "numbers": MetricRecord({"num-examples": 6, "acc": 0.5})}
    )
    found = TrainReport.from_reply(Message(records, reply_to=sent(order)), order)
    assert found.completed_steps == 2
    assert found.num_examples == 6
    assert len(found.losses) == 0
    assert same_bits(found.arrays, toy_arrays(9.0))


@pytest.mark.parametrize("steps", [-1, 3])
def test_report_of_steps_that_were_not_ordered_is_refused(steps: int) -> None:
    order = order_of(2, 3)
    reply = answered(order, report_of(order))
    reply.content.metric_records["metrics"]["completed-steps"] = steps
    with pytest.raises(ProtocolError, match=f"{steps} steps were completed of 2"):
        TrainReport.from_reply(reply, order)


@pytest.mark.parametrize("count", [0, 5, 7])
def test_report_with_wrong_number_of_losses_is_refused(count: int) -> None:
    order = order_of(2, 3)
    report = report_of(order, losses=np.zeros(count, np.float32))
    with pytest.raises(ProtocolError, match=f"{count} losses"):
        TrainReport.from_reply(answered(order, report), order)


def test_report_of_another_batch_size_is_refused() -> None:
    order = order_of(3, 2)
    report = report_of(order_of(2, 3))  # six losses as well, but of another shape
    with pytest.raises(ProtocolError, match="2 steps"):
        TrainReport.from_reply(answered(order, report), order)


def test_report_whose_losses_are_no_bytes_is_refused() -> None:
    order = order_of()
    reply = answered(order, report_of(order))
    reply.content.config_records["losses"]["losses"] = [0.0] * 6
    with pytest.raises(ProtocolError, match="losses"):
        TrainReport.from_reply(reply, order)


@pytest.mark.parametrize("count", [0, 2])
def test_report_needs_exactly_one_model(count: int) -> None:
    order = order_of()
    reply = answered(order, report_of(order))
    if count == 0:
        del reply.content["arrays"]
    else:
        reply.content["more"] = ArrayRecord({"x": Array(np.zeros(1))})
    with pytest.raises(ProtocolError, match=f"one ArrayRecord in the reply, found {count}"):
        TrainReport.from_reply(reply, order)


@pytest.mark.parametrize("count", [0, 2])
def test_report_needs_exactly_one_metric_record(count: int) -> None:
    order = order_of()
    reply = answered(order, report_of(order))
    if count == 0:
        del reply.content["metrics"]
    else:
        reply.content["more"] = MetricRecord({"x": 1})
    with pytest.raises(ProtocolError, match=f"one MetricRecord in the reply, found {count}"):
        TrainReport.from_reply(reply, order)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float32, 6, elements=st.floats(0, width=32)))
def test_report_any_losses_survive_the_wire(losses: np.ndarray) -> None:
    order = order_of(2, 3)
    found = TrainReport.from_reply(answered(order, report_of(order, losses=losses)), order)
    assert found.losses.tobytes() == losses.tobytes()
