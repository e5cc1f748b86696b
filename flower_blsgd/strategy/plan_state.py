"""Settings of a planner, and the counters of a run."""

from dataclasses import dataclass

from ..algorithm.catalog import TrainOn
from ..algorithm.epoch_plan import EpochMode
from ..algorithm.local_steps import StepPolicy
from ..algorithm.sampling import Sampler
from ..algorithm.schedules import LearningRate
from ..algorithm.selection import Selection
from ..protocol import Average, Keys


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of a planner; the parameters are those of `BiasedLocalSGD`.

    `mode` is its ``epoch``, and `keys` are the names of records in messages.
    """

    num_samples: int
    batch_size: int
    step_policy: StepPolicy
    local_steps_fast: int
    sampler: Sampler
    mode: EpochMode
    learning_rate: LearningRate
    momentum_buffers: str
    deadline_seconds: float
    seed: int
    train_on: TrainOn = TrainOn()
    selection: Selection | None = None
    average: Average = "models"
    overlap: bool = False
    keys: Keys = Keys()


@dataclass(frozen=True)
class PlannerProgress:
    """Counters of a run.

    - `epoch`: the current one; 0 before the first.
    - `rounds_done`, `rounds_total`: completed rounds of this epoch, and of all epochs.
    - `began`: number of workers in the first epoch.
    - `samples_planned`, `samples_due`: samples of all epochs, including the whole current one:
      after rounding to whole rounds, and before.
    - `samples_trained`, `samples_cut_off`: samples of completed rounds: trained on, and skipped
      because of a deadline.
    - `rounds_before`, `share_before`: of this epoch, when the number of its rounds changed.
    """

    epoch: int = 0
    rounds_done: int = 0
    rounds_total: int = 0
    began: int = 0
    samples_planned: int = 0
    samples_due: int = 0
    samples_trained: int = 0
    samples_cut_off: int = 0
    rounds_before: int = 0
    share_before: float = 0.0
