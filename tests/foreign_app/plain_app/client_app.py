"""The ClientApp: train, evaluate, a mod, a lifespan, and state between rounds."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from .task import load_data, make_model

entered = 0


def count_calls(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Count the calls in the node's state, and write into what came in, which is ours."""
    calls = context.state.config_records.setdefault("calls", ConfigRecord({"count": 0}))
    calls["count"] += 1
    reply = call_next(message, context)
    for array in message.content["arrays"].values():
        array.numpy()[...] = 0
    reply.content["metrics"]["calls"] = calls["count"]
    return reply


app = ClientApp(mods=[count_calls])


@app.lifespan()
def lifespan(context: Context) -> Iterator[None]:
    """Count the messages."""
    global entered  # noqa: PLW0603
    entered += 1
    yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute the same bits on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load(message: Message) -> nn.Module:
    """Return the global model."""
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do four steps; momentum is kept in the node's state."""
    with one_thread():
        model = load(message)
        inputs, targets = load_data(int(context.node_config["partition-id"]))
        optimizer = torch.optim.SGD(
            model.parameters(), lr=float(message.content["config"]["lr"]), momentum=0.9
        )
        kept = context.state.array_records.get("momentum")
        if kept is not None:
            buffers = kept.to_torch_state_dict()
            for name, parameter in model.named_parameters():
                optimizer.state[parameter] = {"momentum_buffer": buffers[name]}
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        context.state["momentum"] = ArrayRecord(
            {
                name: optimizer.state[parameter]["momentum_buffer"]
                for name, parameter in model.named_parameters()
            }
        )
    metrics = {
        "loss": float(loss),
        "num-examples": len(targets),
        "entered": float(entered > 0),
        "round": int(message.content["config"]["server-round"]),
    }
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Return the loss, times what the config says."""
    with one_thread(), torch.no_grad():
        model = load(message).eval()
        inputs, targets = load_data(int(context.node_config["partition-id"]))
        loss = float(nn.functional.cross_entropy(model(inputs), targets))
    scale = float(message.content["config"]["scale"])
    metrics = MetricRecord({"loss": scale * loss, "num-examples": len(targets)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
