from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from flower_blsgd.protocol import ProfileQuery, ProtocolError, WorkerProfile

from ..in_process_grid import over_the_wire

PROFILE = WorkerProfile(
    device="cuda:1",
    tier="slow",
    name="attic",
    partition_id=3,
    steps=5,
    seconds_per_step=0.25,
    seconds_per_step_alone=0.125,
    data_fingerprint="00ff",
    batch_size=16,
    precision="bfloat16",
)


def query(**config: object) -> Message:
    record = ConfigRecord(config)  # type: ignore[arg-type]
    return over_the_wire(Message(RecordDict({"config": record}), 7, "query.profile"))


def record_of() -> ConfigRecord:
    return PROFILE.to_reply(query()).content.config_records["profile"]


def profile_in(**records: ConfigRecord) -> WorkerProfile:
    content = RecordDict(dict(records))
    return WorkerProfile.from_content(over_the_wire(Message(content, reply_to=query())).content)


@pytest.mark.parametrize("profile", [PROFILE, WorkerProfile("cpu:0-3")], ids=["full", "defaults"])
def test_profile_survives_the_wire(profile: WorkerProfile) -> None:
    reply = over_the_wire(profile.to_reply(query()))
    assert WorkerProfile.from_content(reply.content) == profile


def test_option_that_is_missing_has_its_default_and_the_device_must_be_there() -> None:
    """A node or a checkpoint may be older than an option."""
    record = record_of()
    del record["batch"]
    assert profile_in(profile=record) == replace(PROFILE, batch_size=0)
    del record["device"]
    with pytest.raises(ProtocolError, match="device is None"):
        profile_in(profile=record)


def test_answer_without_a_profile_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no profile"):
        profile_in(settings=record_of())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("steps", -1), ("partition-id", -2), ("seconds-per-step", -0.5)),
        *(("batch", 1), ("precision", "half")),
        *(("name", "a\nb"), ("name", "\x1b[2J"), ("device", "x" * 1001)),
    ],
)
def test_profile_that_cannot_be_is_refused(key: str, value: object) -> None:
    record = record_of()
    record[key] = value  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match=r"must be|invalid name|expected"):
        profile_in(profile=record)


@pytest.mark.parametrize(
    "query", [ProfileQuery(), ProfileQuery(True, 32, 0.25)], ids=["profile", "speeds"]
)
def test_query_survives_the_wire(query: ProfileQuery) -> None:
    message = over_the_wire(Message(query.to_records(), 7, "query.profile"))
    assert ProfileQuery.from_message(message) == query


def test_query_without_our_keys_asks_for_the_profile_only() -> None:
    assert ProfileQuery.from_message(query()) == ProfileQuery(calibrate=False)
    empty = Message(RecordDict(), 7, "query.profile")
    assert ProfileQuery.from_message(over_the_wire(empty)) == ProfileQuery()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"calibrate": True}, "batch-size = 0"),
        ({"calibrate": True, "batch-size": -3}, "batch-size = -3"),
        ({"seconds": float("inf")}, "seconds is inf"),  # it would measure for ever
    ],
    ids=str,
)
def test_query_broken_value_is_refused_by_name(record: dict[str, object], expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        ProfileQuery.from_message(query(**record))
