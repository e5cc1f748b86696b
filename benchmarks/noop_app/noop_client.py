"""A ClientApp that returns the model as it came."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import flower_blsgd

app = ClientApp()
flower_blsgd.serve_sessions(app)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model, after reading one number of each array."""
    arrays = message.content["arrays"]
    total = sum(float(array.numpy().flat[0]) for array in arrays.values())
    metrics = MetricRecord({"num-examples": 1, "total": total})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
