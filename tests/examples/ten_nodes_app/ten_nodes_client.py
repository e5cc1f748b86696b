"""Says which worker the node is, and on which cores and cards its work would run."""

import os

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd import worker_of
from flower_blsgd.runtime.pinning import on_cores_of

app = ClientApp()


@app.query()
def who(message: Message, context: Context) -> Message:
    """Answer from a thread that is pinned as that of a worker is."""
    worker = worker_of(context)
    with on_cores_of(worker):
        cores = sorted(os.sched_getaffinity(0))
    answer = ConfigRecord(
        {
            "place": context.node_config["partition-id"],
            "device": worker.device_with_cores,
            "tier": worker.tier,
            "cores": cores,
            "cards": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        }
    )
    return Message(RecordDict({"answer": answer}), reply_to=message)
