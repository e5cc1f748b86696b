"""A ClientApp that claims to have done its steps, and returns the model as it came."""

import time

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_blsgd import TrainOrder, TrainReport, answer_profile
from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.shared_arrays import accept_views

app = ClientApp()
accept_views(app)
app.query("profile")(answer_profile)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model, copied as LocalSGD copies it."""
    order = TrainOrder.from_message(message)
    now = time.time()
    report = TrainReport(
        completed_steps=order.local_steps,
        batch_size=order.batch_size,
        compute_seconds=0.0,
        started_at=now,
        ended_at=now,
        losses=np.zeros(len(order.indices), np.float32),
        arrays=view_record({name: a.numpy().copy() for name, a in order.arrays.items()}),
    )
    return report.to_reply(message)
