"""The history of a run: rounds, epochs, durations, the best model, and whether it is over."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord

from ..config import RunConfig
from ..fields import from_json, to_json
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.budget import Budget
from ..strategy.round_metrics import RoundRecord
from ..strategy.rounds import EpochEnd
from .folder import EpochRow, RunFolder, shown_late
from .metric import ACCURACY, Metric
from .round_totals import Figures, RunMetrics
from .stopping import Best, EarlyStopping


@dataclasses.dataclass
class Durations:
    """Seconds that the parts of a run took, summed over all processes of a resumed run.

    `wall_seconds` are from the first plan to the last model, `setup_seconds` before that.
    `evaluation_seconds` and `checkpoint_seconds` are how long training waited for these.
    `async_evaluation_seconds` is how long workers with ``role=evaluate`` evaluated while the others
    trained.
    """

    wall_seconds: float = 0.0
    setup_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    async_evaluation_seconds: float = 0.0


class RunHistory:
    """What happened in a run so far.

    `began_at` is the start of the set-up, on the clock of `time.monotonic`. `metrics` has the
    rounds, and `measuring` how many of them measured speeds. `rows` are the epochs. `resumed` has
    the last round before each time that the run was resumed. `stopped_early` is why the run ended
    before its budget; None if it did not. `predicted` has the names of `measured_figures`; None if
    a speed is unknown. `arrays` is the model that is saved at the end; None before the end of an
    epoch. `arrays_epoch` is the epoch at whose end it was the model.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: BiasedLocalSGD,
        began_at: float,
        metric: Metric = ACCURACY,
    ) -> None:
        self.config = config
        self.metric = metric
        self.metrics = RunMetrics(config.clock)
        self.measuring = 0
        self.rows: list[EpochRow] = []
        self.durations = Durations()
        self.stopping = EarlyStopping(config, metric)
        self.stopped_early: str | None = None
        self.predicted: Figures | None = None
        self.arrays: ArrayRecord | None = None
        self.arrays_epoch = 0
        self.resumed: list[int] = []
        self._strategy = strategy
        self._began_at = began_at
        self._last_model_at = 0.0

    @property
    def best(self) -> Best | None:
        """The first best model; None before an evaluation with a finite figure."""
        return self.stopping.best

    # --- the wall clock

    def start_clock(self, now: float) -> None:
        """Let the wall clock run from now on, after the set-up, unless it runs already."""
        if not self._last_model_at:
            self._last_model_at = now
            self.durations.setup_seconds += now - self._began_at

    def _wall_seconds_now(self) -> float:
        since = time.monotonic() - self._last_model_at if self._last_model_at else 0.0
        return self.durations.wall_seconds + since

    # --- rounds and epochs

    def add_round(self, record: RoundRecord, measures_speeds: bool = False) -> None:
        """Add a finished round."""
        now = self._strategy.planner.clock.added_at  # the next orders have left since
        self.start_clock(now - record.round_seconds - record.planning_seconds)
        self.durations.wall_seconds += now - self._last_model_at
        self._last_model_at = now
        registry = self._strategy.registry
        self.metrics.add(record, registry.seconds_per_step_alone(self.config.clock))
        if measures_speeds:
            self.measuring = len(self.metrics.records)

    def add_epoch(self, end: EpochEnd) -> EpochRow:
        """Add a finished epoch, or a late result to the row of its epoch, and return the row."""
        found: Mapping[str, Any] = end.metrics or {}
        measured: dict[str, Any] = {
            **self.metric.columns(found.get(self.metric.name)),
            "loss": found.get("loss"),
        }
        rounds = self.metrics.records
        if end.late:
            self.durations.async_evaluation_seconds += end.busy_seconds
            number = next(i for i, row in enumerate(self.rows) if row.epoch == end.epoch)
            row = self.rows[number] = dataclasses.replace(
                self.rows[number],
                **measured,
                result_rounds=len(rounds),
                result_seconds=self._wall_seconds_now(),
            )
            return row
        self.arrays, self.arrays_epoch = end.arrays, end.epoch
        planner = self._strategy.planner
        row = EpochRow(
            epoch=end.epoch,
            wall_seconds=self.durations.wall_seconds,
            training_seconds=self.metrics.training_seconds,
            device_seconds=self.metrics.device_seconds,
            **measured,
            # A resumed run may have lost all rounds.
            learning_rate=rounds[-1].learning_rate if rounds else math.nan,
            train_loss=rounds[-1].train_loss if rounds else math.nan,
            rounds=len(rounds),
            samples=self.metrics.samples,
            mean_loss_age_rounds=planner.table.mean_age_rounds(end.round),
            sampling=planner.sampling_stats,
        )
        self.rows.append(row)
        return row

    # --- the end

    @property
    def arrays_are_evaluated(self) -> bool:
        """Whether the metric of the model that is saved is known."""
        return any(row.epoch == self.arrays_epoch and row.value is not None for row in self.rows)

    def stop_early(self, row: EpochRow) -> str:
        """Decide by the newest result whether the run ends before its budget.

        Return the reason if it is new, else nothing.
        """
        reason = self._reason_to_stop()
        if not reason or self.stopped_early:
            return ""
        self.stopped_early = reason
        if row.late:
            self.stopped_early += f", known {shown_late(row.late)} later"
        return self.stopped_early

    def _reason_to_stop(self) -> str | None:
        return None if self._budget_used_up() else self.stopping.reason()

    def _budget_used_up(self) -> str:
        planner = self._strategy.planner
        return Budget.of_run(self.config).used_up(planner.used, planner.epoch_ended)

    @property
    def evaluation_missing(self) -> bool:
        """Whether a resumed run still owes the evaluation after its last round, or an epoch's."""
        planner = self._strategy.planner
        ended = planner.epoch_ended or bool(self._budget_used_up() or self.stopped_early)
        return ended and planner.progress.epoch > (self.rows[-1].epoch if self.rows else 0)

    @property
    def why_over(self) -> str:
        """Why a resumed run has nothing left to do; empty if it has."""
        over = self._budget_used_up() or self.stopped_early or ""
        return "" if self.evaluation_missing else over

    @property
    def setting_for_more(self) -> str:
        """Setting with which a run that is over continues."""
        planner = self._strategy.planner
        limit = Budget.of_run(self.config).limit_reached(planner.used, planner.epoch_ended)
        return f"{limit}=N" if limit else f"{self.stopping.ended_by}=0"

    # --- a resumed run

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON can hold it; the rounds are in ``rounds.jsonl``."""
        durations = dataclasses.replace(self.durations, wall_seconds=self._wall_seconds_now())
        state = {
            "epochs": [dataclasses.asdict(row) for row in self.rows],
            "durations": dataclasses.asdict(durations),
            "resumed": self.resumed,
            **self.stopping.state_dict(),
        }
        return dict(to_json(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; LookupError, TypeError or ValueError if it is invalid."""
        self.rows = [from_json(EpochRow, row) for row in state["epochs"]]
        self.durations = from_json(Durations, state["durations"])
        self.resumed = [*map(int, state["resumed"])]
        self.stopping.load_state_dict(state)

    def resume(
        self, folder: RunFolder, state: Mapping[str, Any], last_round: int, arrays: ArrayRecord
    ) -> None:
        """Continue after a round of the run in a folder, with the state and the model of then.

        The strategy has been restored before. LookupError, TypeError or ValueError if the state is
        invalid.
        """
        planner = self._strategy.planner
        self.load_state_dict(state)
        self.resumed.append(last_round)
        seconds_per_step = self._strategy.registry.seconds_per_step_alone(self.config.clock)
        for record in folder.rounds_until(last_round):
            self.metrics.add(record, seconds_per_step)
            self._strategy.count_seconds(record)
        self.stopped_early = self._reason_to_stop()
        if self._budget_used_up() or planner.epoch_ended or self.stopped_early:
            self.arrays, self.arrays_epoch = arrays, planner.progress.epoch
        else:  # a budget in seconds may have ended the run within an epoch, whose row is not final
            self.rows = [row for row in self.rows if row.epoch < planner.progress.epoch]
