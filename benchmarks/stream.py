"""What a round costs on a SuperLink with SuperNodes when nobody computes: stream, messages, gRPC.

An ordinary Flower app with Flower's own FedAvg, and the two lines that put it on the stream; the
client returns the model as it came. "Engine" is the time in which the messages are away. The
floor is bare Python gRPC with TLS that moves the same bytes between as many processes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .bare_grpc import round_seconds
from .rows import Row, conditions, main, row

APP = Path(__file__).parent / "noop_app"
SMALL = {"nodes": 2, "parameters": 270_000, "tensors": 20}
LARGE = {"nodes": 10, "parameters": 11_500_000, "tensors": 60}
WARM_UP_ROUNDS = 3


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Run all of them, one after another."""
    small = rounds_of(SMALL, rounds=100 if quick else 500)
    large = rounds_of(LARGE, rounds=6 if quick else 15)
    halved = rounds_of(LARGE, rounds=6 if quick else 15, wire_dtype="bfloat16")
    floor = {
        name: round_seconds(size["nodes"], 4 * size["parameters"], rounds)[WARM_UP_ROUNDS:]
        for name, size, rounds in (("small", SMALL, 200), ("large", LARGE, 8 if quick else 15))
    }
    messages = rounds_of(SMALL, rounds=4 if quick else 12, transport="messages", warm_up=1)
    rows = [
        row("2 nodes, 1.1 MB: engine, stream", small["engine"], "s per round"),
        row("2 nodes, 1.1 MB: whole round, stream", small["round"], "s per round"),
        row(
            "2 nodes, 1.1 MB: engine, Flower's messages",
            messages["engine"],
            "s per round",
            small["engine"],
            "stream",
        ),
        row("2 nodes, 1.1 MB: bare gRPC", floor["small"], "s per round"),
        row("10 nodes, 46 MB: bare gRPC", floor["large"], "s per round"),
        row(
            "10 nodes, 46 MB: engine, stream",
            large["engine"],
            "s per round",
            floor["large"],
            "bare gRPC",
        ),
        row(
            "10 nodes, 46 MB: engine, stream, bfloat16",
            halved["engine"],
            "s per round",
            floor["large"],
            "bare gRPC of float32",
        ),
    ]
    return rows, conditions(small=SMALL, large=LARGE, warm_up_rounds=WARM_UP_ROUNDS)


def rounds_of(
    size: dict[str, int],
    rounds: int,
    transport: str = "stream",
    wire_dtype: str = "float32",
    warm_up: int = WARM_UP_ROUNDS,
) -> dict[str, list[float]]:
    """Return the seconds of every round but the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        settings = (
            f"rounds={rounds} parameters={size['parameters']} tensors={size['tensors']} "
            f"min-nodes={size['nodes']} transport='{transport}' wire-dtype='{wire_dtype}' "
            f"out='{out}'"
        )
        nodes = [part for i in range(size["nodes"]) for part in ("--node", f"partition-id={i}")]
        command = [sys.executable, "scripts/flower_engine.py", "deployment", "--app", str(APP)]
        done = subprocess.run(
            [*command, *nodes, "-c", settings],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        parts: dict[str, list[float]] = json.loads(out.read_text())
        return {part: values[warm_up:] for part, values in parts.items()}


if __name__ == "__main__":
    main(measure, __doc__)
