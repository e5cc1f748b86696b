"""The ServerApp: train with the run config's settings, and write a results folder."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_blsgd.config import RunConfig
from flower_blsgd.flower.internals import is_deployment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train on the grid of Flower or ``blsgd run``."""
    config = RunConfig.from_run_config(context.run_config)

    from flower_blsgd.launch import train_script
    from flower_blsgd.run import train_on

    train = train_script if config.is_script else train_on
    if config.transport != "stream" and not is_deployment(grid):
        train(grid, config)
        return
    from flower_blsgd.engines.stream.grid import stream

    with stream(grid, context) as streams:
        train(streams, config)
