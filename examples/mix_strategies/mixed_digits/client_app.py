"""The ClientApp, the same for all combinations, which differ only on the server."""

import functools

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_blsgd import LocalSGD, Task, TrainOrder, answer_profile, serve_sessions, worker_of
from flower_blsgd.tasks import load_task

app = ClientApp()
app.query("profile")(answer_profile)
serve_sessions(app)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run the steps of an order."""
    task = digits()
    sgd = LocalSGD(task.model(), task.train, task.loss, worker_of(context).device)
    return sgd.run(TrainOrder.from_message(message), state=context.state).to_reply(message)


@functools.cache
def digits() -> Task:
    """Return data and model: the 1,797 digits of scikit-learn."""
    return load_task("digits")
