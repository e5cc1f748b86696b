"""The ServerApp: it sends a message to every node that is there, again and again."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

import flower_blsgd

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write a line for each round, until the run is stopped."""
    notes = Path(str(context.run_config["notes"]))
    with flower_blsgd.stream(grid, context) as fast, (notes / "rounds.jsonl").open("a") as file:
        while True:
            messages = [Message(RecordDict(), node, "train") for node in fast.get_node_ids()]
            replies = list(fast.send_and_receive(messages, timeout=5))
            answers = [dict(r.content["metrics"]) for r in replies if r.has_content()]
            errors = [str(r.error.reason) for r in replies if r.has_error()]
            processes = {str(a["partition"]): a["process"] for a in answers}
            file.write(json.dumps({"processes": processes, "errors": errors}) + "\n")
            file.flush()
            time.sleep(0.1)  # on as few cores as tests have
