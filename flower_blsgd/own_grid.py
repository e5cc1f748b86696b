"""The local grid that our own settings describe."""

from collections.abc import Callable, Sequence

from .app_folder import built_in_app
from .config import RunConfig
from .errors import UsageError
from .experiments.speed_profile import with_profile
from .runtime.devices import WorkerSpec, parse_workers
from .runtime.local_grid import LocalGrid


def own_grid(
    config: RunConfig,
    setup: Callable[[], object] | None = None,
    workers: Sequence[WorkerSpec] | None = None,
) -> LocalGrid:
    """Return the grid with this app's workers; its processes start with the first message.

    Parameters
    ----------
    config : RunConfig
        Names the workers, and perhaps a profile with their speeds.
    setup : callable, optional
        Called in every process before it loads the app.
    workers : sequence of WorkerSpec, optional
        Instead of those that the settings name.

    Raises
    ------
    UsageError
        If a worker, the profile or what is to be sent cannot be used.
    """
    app = built_in_app()
    if workers is None:
        workers, _ = with_profile(parse_workers(config.workers), config)
    try:
        return LocalGrid(
            workers,
            app.client_app,
            app.path,
            config.to_run_config(),
            config.threads,
            config.processes_per_device,
            setup,
        )
    except UsageError:
        raise
    except Exception as error:
        if setup is None:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"task: it cannot be sent to the workers ({reason}); make locks, open files and the "
            "like inside its functions, or name it as module:function"
        ) from error
