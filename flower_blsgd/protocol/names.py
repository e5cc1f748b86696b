"""The names of message types, records and figures on the wire."""

QUERY_PROFILE = "query.profile"
EVALUATE = "evaluate"
TRAIN_SUM = "train.sum"

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
MOMENTUM = "momentum"
MOMENTUM_LOADS = "momentum-loads"
LOSSES = "losses"
PROFILE = "profile"
SUMS = "sums"
TRACE = "trace"

SERVER_ROUND = "server-round"
NUM_EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
COMPLETED_STEPS = "completed-steps"
TIMING_KEYS = ("compute-seconds", "started-at", "ended-at", "batch-size", COMPLETED_STEPS)
"""Figures of a reply that mean nothing as an average."""
