"""The ServerApp: run config -> strategy -> fit, and a results folder."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_blsgd.config import RunConfig

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train on whatever grid Flower, or ``blsgd run``, gives us."""
    config = RunConfig.from_run_config(context.run_config)

    from flower_blsgd.run import train_on
    from flower_blsgd.runtime.stream.grid import stream

    with stream(grid, context) as fast:
        train_on(fast, config)
