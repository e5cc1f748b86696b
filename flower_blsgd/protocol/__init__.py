# mypy: implicit-reexport
# ruff: noqa: F401
"""All records and keys on the wire.

A message holds only Flower records: arrays in an ArrayRecord, settings in a ConfigRecord, and
metrics in a MetricRecord. Sample indices travel as int32 bytes and losses as float32 bytes,
both little-endian; nothing is pickled.
"""

from .evaluation import EvaluateOrder, EvaluateReport
from .failure import Failure, FailureKind, NotFiniteError, ProtocolError
from .hosts import HOST, HostOrders, HostReply
from .profile import ProfileQuery, WorkerProfile
from .records import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    GRAD_SCALER,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    MOMENTUM_ZEROED,
    NUM_EXAMPLES,
    OWN_MODEL,
    PROFILE,
    QUERY_MOMENTUM,
    QUERY_PROFILE,
    SKIPPED_STEPS,
    TIMING_KEYS,
    TRACE_FOLDER,
    TRAIN_SUM,
    Keys,
)
from .script import QUERY_END, QUERY_JOIN, SCRIPT, SCRIPT_END, SCRIPT_JOIN, ScriptInfo
from .sums import SumOrder, SumReport
from .training import (
    COUNTERS,
    MOMENTUM_POLICIES,
    MOST_SKIPS,
    SLOTS,
    Average,
    Brings,
    MomentumPolicy,
    TrainOrder,
    TrainReport,
    state_copies,
    state_name,
)
