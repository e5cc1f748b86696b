"""The ServerApp."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from flower_blsgd import BiasedLocalSGD, stream
from own_digits.task import Net, accuracy_on, load_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train."""
    settings = context.run_config
    rounds, lr = settings["num-server-rounds"], settings["learning-rate"]
    share = settings["fraction-evaluate"]
    strategy = BiasedLocalSGD(
        len(load_data()[0]), local_steps_slow=8, learning_rate=lr, fraction_evaluate=share
    )
    model, config = ArrayRecord(Net().state_dict()), ConfigRecord({"lr": lr})
    with stream(grid, context) as streams:
        strategy.start(streams, model, rounds, train_config=config, evaluate_fn=evaluate)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    accuracy = accuracy_on(net, load_data()[1])
    print(f"round {server_round}: test accuracy {accuracy:.2%}", flush=True)
    return MetricRecord({"accuracy": accuracy})
