"""Asks every node who it is, and prints the answers."""

import json
import time

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Ask all nodes at once."""
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    messages = [Message(RecordDict(), node, "query") for node in nodes]
    for reply in grid.send_and_receive(messages):
        print("answer", json.dumps(dict(reply.content["answer"])), flush=True)
