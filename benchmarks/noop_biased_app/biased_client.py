"""A ClientApp that claims to have done its steps, and returns the model as it came."""

import time

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_blsgd import TrainOrder, TrainReport, answer_profile
from flower_blsgd.flower.app_call import accept_views
from flower_blsgd.flower.array_records import flat_like

app = ClientApp()
accept_views(app)
app.query("profile")(answer_profile)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model, copied as LocalSGD copies it."""
    order = TrainOrder.from_message(message)
    copied = flat_like(order.arrays)
    for name, array in copied.items():
        np.copyto(array.numpy(), order.arrays[name].numpy())
    now = time.time()
    report = TrainReport(
        completed_steps=order.local_steps,
        batch_size=order.batch_size,
        compute_seconds=0.0,
        started_at=now,
        ended_at=now,
        losses=np.zeros(len(order.indices), np.float32),
        arrays=copied,
    )
    return report.to_reply(message)
