"""Which worker a node is, and what it answers."""

from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import flower_blsgd
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.worker.profile import answer_profile, worker_of

from ..refusal import refusal

CORE = usable_cores()[0]


def context_of(node_config: dict[str, Any], **run_config: Any) -> Context:
    return Context(1, 7, node_config, RecordDict(), run_config)


def query() -> Message:
    return Message(RecordDict({"config": ConfigRecord()}), 7, "query.profile")


def test_worker_of_a_supernode_is_named_by_its_node_config() -> None:
    node = {"device": f"cpu:{CORE}", "tier": "slow", "steps": 4, "slowdown": 2.5, "name": "attic"}
    context = context_of(node, workers="8x cuda:0 fast")  # the run config's are ignored
    assert worker_of(context) == WorkerSpec(
        "cpu", (CORE,), tier="slow", steps=4, slowdown=2.5, name="attic"
    )


def test_worker_of_a_simulation_is_the_partition_of_the_run_config() -> None:
    workers = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow steps=3"
    for place, tier in ((0, "fast"), (1, "slow")):
        worker = worker_of(context_of({"partition-id": place}, workers=workers))
        assert worker.tier == tier
    assert worker.steps == 3
    assert worker_of(context_of({})).tier == "fast"  # the first of auto
    context = context_of({"partition-id": 0}, workers=f"cpu:{CORE} seconds-per-step=0.5")
    profile = WorkerProfile.from_content(answer_profile(query(), context, "ab").content)
    assert (profile.seconds_per_step, profile.partition_id) == (0.5, 0)
    assert profile.data_fingerprint == "ab"


def test_worker_of_more_nodes_than_workers_is_refused_with_the_way_out() -> None:
    line = refusal(worker_of, context_of({"partition-id": 1}, workers=f"1x cpu:{CORE} fast"))
    assert "node 1" in line
    assert "num-supernodes=1" in line


def test_answer_profile_is_one_line_in_anybodys_client_app_and_a_given_speed_wins() -> None:
    app = ClientApp()
    app.query("profile")(flower_blsgd.answer_profile)
    node = {"device": f"cpu:{CORE}", "tier": "fast", "partition-id": 2, "steps": 5}
    for given, measured, seconds in ((0.5, 0.0, 0.5), (2, 0.25, 2.0), (None, 0.25, 0.25)):
        context = context_of(node | ({"seconds-per-step": given} if given else {}))
        reply = (
            answer_profile(query(), context, seconds_per_step=measured)
            if measured
            else app(query(), context)
        )
        profile = WorkerProfile.from_content(reply.content)
        assert profile == WorkerProfile(
            f"cpu:{CORE}", tier="fast", partition_id=2, steps=5, seconds_per_step=seconds
        )
