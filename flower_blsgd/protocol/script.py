"""Messages between the launcher and a training script."""

from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from ..fields import to_record
from .failure import ProtocolError
from .records import ARRAYS, CONFIG, from_wire, records_of

SCRIPT = "script"
"""Key of the node config: the command line of the training script, quoted as for a shell."""

SCRIPT_JOIN, SCRIPT_END = "script_join", "script_end"
QUERY_JOIN, QUERY_END = f"query.{SCRIPT_JOIN}", f"query.{SCRIPT_END}"

_MOST_SAMPLES = 2**31 - 1
"""Indices of samples are int32."""


@dataclass(frozen=True)
class ScriptInfo:
    """Facts that the main worker's script has told its session.

    - `num_samples`: size of the data set of the session's sampler; 0 without one.
    - `batch_size`: samples of the first step, if it came before the first order; else 0.
    - `evaluate_every`: samples between two evaluations; 0 for one epoch, -1 without a function to
      evaluate.
    - `metric_name`, `metric_mode`: the figure by which models are compared; empty without a
      function.
    - `fingerprint`: `model_fingerprint` of the model.
    - `parameter_names`: those that are sent.
    """

    num_samples: int = field(metadata={"limits": 0})
    batch_size: int = field(metadata={"limits": 0})
    evaluate_every: int = field(metadata={"limits": -1})
    metric_name: str
    metric_mode: str = field(metadata={"limits": ("max", "min", "")})
    fingerprint: str
    parameter_names: list[str]

    @property
    def data_fingerprint(self) -> str:
        """Text that is equal for equal data sets; empty without the session's sampler."""
        return f"{self.num_samples} samples" if self.num_samples else ""

    def to_records(self, arrays: ArrayRecord) -> RecordDict:
        """Return the content of the reply, with the initial model."""
        return RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord(to_record(self))})

    @classmethod
    def from_content(cls, content: RecordDict) -> "ScriptInfo":
        """Read the content of a reply; ProtocolError if it is not one."""
        info = cls(**from_wire(cls, records_of(content, ConfigRecord).get(CONFIG, ConfigRecord())))
        largest = max(info.num_samples, info.batch_size, info.evaluate_every)
        if largest > _MOST_SAMPLES:
            raise ProtocolError(f"{largest} samples are too many; at most {_MOST_SAMPLES}")
        return info
