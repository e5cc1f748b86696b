"""Every record and key that crosses the wire, once.

A message holds Flower records only: arrays in an ArrayRecord, settings in a ConfigRecord,
figures in a MetricRecord. Sample indices travel as int32 bytes and losses as float32 bytes,
both little-endian; nothing is pickled.
"""

from ..wire import ProtocolError
from .evaluation import EvaluateOrder, EvaluateReport
from .hosting import HOST, Failure, HostOrders, HostReply
from .names import (
    ARRAYS,
    COMPLETED_STEPS,
    CONFIG,
    EVALUATE,
    LOSSES,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    NUM_EXAMPLES,
    PROFILE,
    QUERY_PROFILE,
    SERVER_ROUND,
    SUMS,
    TIMING_KEYS,
    TRACE,
    TRAIN_LOSS,
    TRAIN_SUM,
)
from .optimizer_state import COUNTERS, SLOTS, state_copies, state_name
from .profile import ProfileQuery, WorkerProfile
from .summing import SumOrder, SumReport
from .tracing import Operators, WorkerTrace
from .training import MOMENTUM_POLICIES, MomentumPolicy, TrainOrder, TrainReport

__all__ = [
    "ARRAYS",
    "COMPLETED_STEPS",
    "CONFIG",
    "COUNTERS",
    "EVALUATE",
    "HOST",
    "LOSSES",
    "METRICS",
    "MOMENTUM",
    "MOMENTUM_LOADS",
    "MOMENTUM_POLICIES",
    "NUM_EXAMPLES",
    "PROFILE",
    "QUERY_PROFILE",
    "SERVER_ROUND",
    "SLOTS",
    "SUMS",
    "TIMING_KEYS",
    "TRACE",
    "TRAIN_LOSS",
    "TRAIN_SUM",
    "EvaluateOrder",
    "EvaluateReport",
    "Failure",
    "HostOrders",
    "HostReply",
    "MomentumPolicy",
    "Operators",
    "ProfileQuery",
    "ProtocolError",
    "SumOrder",
    "SumReport",
    "TrainOrder",
    "TrainReport",
    "WorkerProfile",
    "WorkerTrace",
    "state_copies",
    "state_name",
]
