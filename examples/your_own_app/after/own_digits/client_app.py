"""The ClientApp."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd import LocalSGD, TrainOrder, answer_profile, serve_sessions, worker_of
from own_digits.task import Net, accuracy_on, load_data

app = ClientApp()
app.query("profile")(answer_profile)
serve_sessions(app)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model that came along."""
    sgd = LocalSGD(Net(), load_data()[0], device=worker_of(context).device)
    return sgd.run(TrainOrder.from_message(message), state=context.state).to_reply(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model that came along."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    test = load_data()[1]
    metrics = MetricRecord({"accuracy": accuracy_on(net, test), "num-examples": len(test)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
