"""Find the run that ``resume`` names, and continue it from its newest checkpoint."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord

from ..config import CHANGEABLE, RunConfig
from ..errors import UsageError
from ..results.folder import CHECKPOINTS, RunFolder, alone_in, read_config
from ..results.recorder import RunRecorder
from ..results.summary import blsgd_command, train_call, versions
from ..strategy.biased_local_sgd import BiasedLocalSGD
from .state import restore
from .store import Checkpoint, CheckpointStore

RUN = "run"
"""Key of a checkpoint for the settings, the versions and the recorder of its run."""


@dataclass
class ResumedRun:
    """A run to continue: its folder, its settings now, and its newest checkpoint."""

    folder: Path
    config: RunConfig
    checkpoint: Checkpoint
    notes: list[str]
    restored: bool = False

    def restore(
        self, strategy: BiasedLocalSGD, recorder: RunRecorder, model: ArrayRecord
    ) -> tuple[ArrayRecord, int]:
        """Restore a new strategy and a new recorder; return the model and the last round.

        UsageError if the checkpoint does not fit them, or the run is finished.
        """
        arrays, last_round = restore(strategy, self.checkpoint, model)
        with _readable(self.checkpoint):
            state = self.checkpoint.values[RUN]
            recorder.history.resume(RunFolder(self.folder), state["recorder"], last_round, arrays)
            now = versions()
            if other := {k: v for k, v in state["versions"].items() if now.get(k, v) != v}:
                self.notes.append(f"  written with {other!s:.200}: results may differ in bits")
        if (why := recorder.history.why_over) and (self.folder / "summary.json").exists():
            command = resume_command(self.config, self.folder, recorder.history.setting_for_more)
            raise UsageError(f"{_shown(self.folder)} is finished: {why}; to continue, {command}")
        self.restored = True
        for line in (f"resuming {self.folder} after round {last_round}", *self.notes):
            recorder.say(line)
        return arrays, last_round


@contextlib.contextmanager
def open_run_to_resume(given: RunConfig, complete: bool) -> Iterator[ResumedRun | None]:
    """Find the run that ``resume`` names, and lock its folder; None with an empty ``resume``.

    An error after the run was restored gets a note with the command that resumes it. Unless the
    given settings are `complete`, that is based on those of the run, a setting that may change and
    has its default is taken from the run. UsageError if the run does not exist, has no checkpoint
    or is still running, or if a setting differs that may not change.
    """
    if not given.resume:
        yield None
        return
    folder = Path(given.resume).resolve()
    of_run = read_config(folder).with_absolute_paths()
    busy = f"{_shown(folder)} is in use by a run; wait until it ends, or end it"
    exists = (folder / CHECKPOINTS).is_dir()
    with alone_in(folder / CHECKPOINTS, busy) if exists else contextlib.nullcontext():
        checkpoint = CheckpointStore(folder, 0).newest()
        if checkpoint is None:
            out = ["-s", "out="] if of_run.out else []
            raise UsageError(
                f"{_shown(folder)} has no checkpoint: it ended before the first one, or had "
                "keep-checkpoints = 0; start again: "
                f"{blsgd_command(of_run, '-c', str(folder / 'config.toml'), *out)}"
            )
        with _readable(checkpoint):
            began = RunConfig.from_run_config(checkpoint.values[RUN]["config"], saved=True)
            began = began.with_absolute_paths()
        config, notes = _settings(given, of_run, began, complete)
        resumed = ResumedRun(folder, config, checkpoint, notes)
        try:
            yield resumed
        except BaseException as error:
            if resumed.restored:
                error.add_note(resume_command(config, folder))
            raise


@contextlib.contextmanager
def _readable(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = error if isinstance(error, UsageError) else repr(error)
        raise UsageError(f"{checkpoint.source}: invalid state of the run: {reason}") from None


def _settings(
    given: RunConfig, of_run: RunConfig, began: RunConfig, complete: bool
) -> tuple[RunConfig, list[str]]:
    """Return the settings of the resumed run, and a line for each that changed."""
    values, default = given.to_run_config(), RunConfig().to_run_config()
    before, theirs = began.to_run_config(), of_run.to_run_config()
    for key in CHANGEABLE if not complete else ():
        if values[key] == default[key]:
            values[key] = theirs[key]
    values["name"], values["out"] = before["name"], values["out"] or before["out"]
    changed = {k: v for k, v in values.items() if v != before[k] and k != "resume"}
    notes = {key: f"{key} = {v!r} instead of {before[key]!r}" for key, v in changed.items()}
    if wrong := [note for key, note in notes.items() if key not in CHANGEABLE]:
        raise UsageError(
            f"{_shown(Path(given.resume))} cannot be resumed with {', '.join(wrong)}; start a new "
            f"run for that; only these may change: {', '.join(CHANGEABLE)}"
        )
    if {"epochs", "seconds"} & changed.keys():
        notes[""] = "decay-epochs in percent and schedules are shares of the new budget"
    return RunConfig.from_run_config(values), [f"  {note}" for note in notes.values()]


def resume_command(config: RunConfig, folder: Path, setting: str = "") -> str:
    """Return the command that resumes a run, optionally with a changed setting."""
    if config.objects:
        more = [setting.replace("-", "_")] if setting else []
        return train_call(config, f"resume={_shown(folder)!r}", *more)
    return blsgd_command(config, "--resume", _shown(folder), *(["-s", setting] if setting else []))


def _shown(folder: Path) -> str:
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative
