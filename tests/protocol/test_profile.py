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
)


def query(**config: object) -> Message:
    record = ConfigRecord(config)  # type: ignore[arg-type]
    return over_the_wire(Message(RecordDict({"config": record}), 7, "query.profile"))


def record_of(**changes: object) -> ConfigRecord:
    record = PROFILE.to_reply(query()).content.config_records["profile"]
    for key, value in changes.items():
        record[key] = value  # type: ignore[assignment]
    return record


def profiles_in(**records: ConfigRecord) -> dict[int | None, WorkerProfile]:
    content = RecordDict({name.replace("_", "-"): record for name, record in records.items()})
    return WorkerProfile.by_local_rank(over_the_wire(Message(content, reply_to=query())))


@pytest.mark.parametrize("profile", [PROFILE, WorkerProfile("cpu:0-3")], ids=["full", "defaults"])
def test_profile_survives_the_wire(profile: WorkerProfile) -> None:
    reply = over_the_wire(profile.to_reply(query()))
    assert WorkerProfile.by_local_rank(reply) == {None: profile}


def test_profiles_of_a_node_with_several_devices_are_in_order_of_their_ranks() -> None:
    records = {f"profile_{rank}": record_of(device=f"cpu:{rank}") for rank in (10, 2, 0)}
    found = profiles_in(**records)
    assert [(rank, one.device) for rank, one in found.items()] == [
        (0, "cpu:0"),
        (2, "cpu:2"),
        (10, "cpu:10"),
    ]
    with pytest.raises(ProtocolError, match="two kinds"):
        profiles_in(profile=record_of(), **records)
    with pytest.raises(ProtocolError, match="no profile"):
        profiles_in(settings=record_of())
    with pytest.raises(ProtocolError, match="steps"):
        profiles_in(profile=record_of(steps="5"))


@pytest.mark.parametrize(
    "query", [ProfileQuery(), ProfileQuery(True, 32, 0.25, [0, 2])], ids=["profile", "speeds"]
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
        ({"calibrate": "yes"}, "calibrate"),
        ({"calibrate": True}, "batch-size = 0"),
        ({"calibrate": True, "batch-size": -3}, "batch-size = -3"),
        ({"ranks": [0.5]}, "ranks"),
    ],
    ids=str,
)
def test_query_broken_value_is_refused_by_name(record: dict[str, object], expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        ProfileQuery.from_message(query(**record))
