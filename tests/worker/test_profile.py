"""Which worker a node is, and what it answers."""

from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import flower_blsgd
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.worker.profile import answer_profile, profile_of, worker_of

CORE = usable_cores()[0]


def context_of(node_config: dict[str, Any], **run_config: Any) -> Context:
    return Context(1, 7, node_config, RecordDict(), run_config)


def query() -> Message:
    return Message(RecordDict({"config": ConfigRecord()}), 7, "query.profile")


def test_worker_of_a_supernode_is_named_by_its_node_config() -> None:
    node = {"device": f"cpu:{CORE}", "tier": "slow", "steps": 4, "slowdown": 2.5, "name": "attic"}
    context = context_of(node, workers="8x cuda:0 fast")  # the run config's are ignored
    assert worker_of(context) == WorkerSpec("cpu", (CORE,), "slow", 4, 2.5, "attic")


def test_worker_of_a_simulation_is_the_partition_of_the_run_config() -> None:
    workers = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow steps=3"
    for place, tier in ((0, "fast"), (1, "slow")):
        worker = worker_of(context_of({"partition-id": place}, workers=workers))
        assert worker.tier == tier
    assert worker.steps == 3


def test_worker_of_without_any_config_is_the_first_of_auto() -> None:
    assert worker_of(context_of({})).tier == "fast"


def test_worker_of_more_nodes_than_workers_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="num-supernodes=1") as told:
        worker_of(context_of({"partition-id": 1}, workers=f"1x cpu:{CORE} fast"))
    assert "node 1" in str(told.value)


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({"device": "cuda:77"}, "cuda:77 is not there"),
        ({"device": "cpu", "tier": "medium"}, "medium"),
        ({"device": "cpu", "steps": 0}, "steps=0"),
        ({"device": "cpu", "slowdown": 0.5}, "slowdown=0.5"),
        ({"device": f"2x cpu:{CORE}"}, "one worker"),
    ],
)
def test_worker_of_a_bad_node_config_is_refused(node: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        worker_of(context_of(node))


def test_profile_of_tells_all_but_the_slowdown() -> None:
    worker = WorkerSpec("cpu", (0, 1, 2, 5), "slow", 4, 2.5, "attic")
    assert profile_of(worker, 3, 0.25, "ff") == WorkerProfile(
        "cpu:0-2,5", "slow", "attic", 3, 4, 0.25, data_fingerprint="ff"
    )
    assert profile_of(WorkerSpec("cuda:1")) == WorkerProfile("cuda:1")


@pytest.mark.parametrize("alone", [None, 0.125])
@pytest.mark.parametrize("seconds", [None, 0.25])
def test_profile_of_a_worker_is_the_same_through_its_node_config(
    seconds: float | None, alone: float | None
) -> None:
    worker = WorkerSpec("cpu", (CORE,), "slow", 4, 2.5, "attic", seconds, alone)
    node = {**worker.to_node_config(), "partition-id": 3}
    (profile,) = WorkerProfile.list_from_reply(answer_profile(query(), context_of(node)))
    assert profile == profile_of(worker, 3)
    assert profile.seconds_per_step == (seconds or 0.0)
    assert profile.seconds_per_step_alone == (alone or 0.0)


def test_profile_of_a_worker_of_the_run_config_tells_its_speed() -> None:
    """As in Flower's simulation, where nodes have no config of their own."""
    context = context_of({"partition-id": 0}, workers=f"cpu:{CORE} seconds-per-step=0.5")
    (profile,) = WorkerProfile.list_from_reply(answer_profile(query(), context))
    assert (profile.seconds_per_step, profile.seconds_per_step_alone) == (0.5, 0.0)


def test_answer_profile_is_one_line_in_anybodys_client_app() -> None:
    app = ClientApp()
    app.query("profile")(flower_blsgd.answer_profile)
    node = {
        "device": f"cpu:{CORE}",
        "tier": "fast",
        "partition-id": 2,
        "steps": 5,
        "seconds-per-step": 0.5,
    }
    (profile,) = WorkerProfile.list_from_reply(app(query(), context_of(node)))
    assert profile == WorkerProfile(f"cpu:{CORE}", "fast", "", 2, 5, 0.5)


def test_answer_profile_carries_the_fingerprint() -> None:
    reply = answer_profile(query(), context_of({"device": "cpu"}), "abcd")
    (profile,) = WorkerProfile.list_from_reply(reply)
    assert profile.data_fingerprint == "abcd"
    assert profile.partition_id == -1


def test_answer_profile_tells_a_measured_speed_but_a_given_one_wins() -> None:
    for node, seconds in (
        ({}, 0.25),
        ({"seconds-per-step": 0.5}, 0.5),
        ({"seconds-per-step": 2}, 2),
    ):
        context = context_of({"device": f"cpu:{CORE}", **node})
        reply = answer_profile(query(), context, seconds_per_step=0.25)
        (profile,) = WorkerProfile.list_from_reply(reply)
        assert profile.seconds_per_step == seconds


def test_answer_profile_refuses_a_speed_alone_that_is_none() -> None:
    context = context_of({"device": f"cpu:{CORE}", "seconds-per-step-alone": 0})
    with pytest.raises(UsageError, match="seconds-per-step-alone = 0"):
        answer_profile(query(), context)


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), "fast", True])
def test_answer_profile_refuses_a_speed_that_is_none(given: Any) -> None:
    context = context_of({"device": f"cpu:{CORE}", "seconds-per-step": given})
    with pytest.raises(UsageError, match="seconds-per-step = ") as told:
        answer_profile(query(), context)
    assert "leave it out" in str(told.value)
