"""Worker side of the method: local steps, evaluation and the worker profile."""

MODULES = ("flower_blsgd.worker.local_sgd", "flower_blsgd.worker.evaluation")
"""Modules that every worker process of our app imports; see `engines.local.fork_server`."""
