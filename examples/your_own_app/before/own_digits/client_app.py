"""The ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from own_digits.task import Net, accuracy_on, load_data, share_of, train_on

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model that came along."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    place, count = context.node_config["partition-id"], context.node_config["num-partitions"]
    data = share_of(load_data()[0], place, count)
    epochs, batch_size = context.run_config["local-epochs"], context.run_config["batch-size"]
    loss = train_on(net, data, epochs, batch_size, message.content["config"]["lr"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model that came along."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    test = load_data()[1]
    metrics = MetricRecord({"accuracy": accuracy_on(net, test), "num-examples": len(test)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
