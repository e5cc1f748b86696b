"""What a worker does: its local steps, and saying who it is."""

MODULES = (
    "flower_blsgd.worker.local_sgd",
    "flower_blsgd.worker.evaluation",
    "flower_blsgd.tasks",
)
"""What every worker process of our own app imports: see `grids.fork_server`."""
