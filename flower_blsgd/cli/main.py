"""The command ``blsgd``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from flwr.app import Context, RecordDict
from flwr.app.exception import AppExitException
from rich.console import Console
from rich.table import Table

from ..config import RunConfig, without_retired
from ..errors import UsageError
from ..runtime.devices import format_ids, parse_workers, sharing_note, this_machine
from ..runtime.flower_app import find_app, run_config
from ..runtime.flower_internals import SERVER_NODE_ID, load_server_app
from ..runtime.local_grid import LocalGrid
from .experiments import add_commands
from .options import (
    add_settings,
    add_workers,
    config_name,
    find_modules_here,
    own_settings,
    terminated_like_interrupted,
)
from .supernode import add_supernode

USAGE_ERROR = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``blsgd`` and return its exit code: 0, 1 for a failed run, 2 for a user's mistake."""
    try:
        options = _parser().parse_args(arguments)
        _set_up_logging(options.verbose)
        options.command(options)
    except UsageError as error:
        print(f"blsgd: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except AppExitException as error:
        print(f"blsgd: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("blsgd: interrupted; all workers have ended", file=sys.stderr)  # noqa: T201
        return _INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage: every mistake is one line."""
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="blsgd",
        description="Train on fast and slow devices at once: each does as many steps as it can.",
    )
    parser.add_argument("--version", action="version", version=version("flower-blsgd"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train, with one pinned process per device")
    run.set_defaults(command=_run)
    run.add_argument(
        "app", nargs="?", help="folder of a Flower app (default: this one, else the built-in app)"
    )

    devices = commands.add_parser("devices", help="show this machine's devices and workers")
    devices.set_defaults(command=_devices)

    evaluate = commands.add_parser("evaluate", help="test a run's model on the whole test set")
    evaluate.set_defaults(command=_evaluate)
    evaluate.add_argument("run", help="a run's folder, such as runs/latest")
    evaluate.add_argument("--data", default="", help="where the data is, if no longer there")
    evaluate.add_argument("--device", default="", help="such as cuda:0 (default: the first)")

    prepare = commands.add_parser(
        "prepare", help="make a task's data ready, so that runs start at once"
    )
    prepare.set_defaults(command=_prepare)
    prepare.add_argument("--again", action="store_true", help="also if it is ready")
    command: argparse.ArgumentParser
    for command in (run, prepare):
        add_settings(command)
    for command in (run, devices):
        add_workers(command)
    run.add_argument(
        "--trace",
        action="store_true",
        help="let every worker write torch's profiler trace of one round into the results folder",
    )
    others = (*add_commands(commands), add_supernode(commands))
    for command in (run, devices, evaluate, prepare, *others):
        command.add_argument("-v", "--verbose", action="store_true", help="show Flower's log")
    return parser


def _run(options: argparse.Namespace) -> None:
    app, built_in = find_app(options.app)
    is_ours = app.config.keys() == RunConfig().to_run_config().keys()
    migrate = without_retired if is_ours else dict
    config, file_name = run_config(app, options.run_config, options.set, migrate)
    if options.workers is not None and "workers" in app.config:
        config["workers"] = options.workers
    if options.trace:
        if "trace" not in app.config:
            raise UsageError(f"--trace: {app.name} has no setting trace, so its workers write none")
        config["trace"] = True
    if "name" in app.config and not config["name"]:
        config["name"] = config_name(file_name)
    # Ours is checked here, before the machine is looked at; another app checks its own.
    workers = parse_workers(str(options.workers or config.get("workers", "auto")))
    if not is_ours:  # its log is all that it shows, as with `flwr run`
        logging.getLogger("flwr").setLevel(logging.INFO)
    elif config.get("profile"):
        from ..results.speed_profile import with_profile

        workers, _ = with_profile(workers, RunConfig.from_run_config(config))
    threads = config.get("threads", 0)
    try:
        find_modules_here()
        server_app = load_server_app(app.server_app, app.path)
    except ImportError as error:
        raise UsageError(f"{app.server_app} of {app.path} cannot be loaded: {error}") from None
    which = "the built-in app" if built_in else str(app.path)
    print(f"running {app.name} from {which}", flush=True)  # noqa: T201
    if note := sharing_note(workers):
        print(note, flush=True)  # noqa: T201
    grid = LocalGrid(
        workers,
        app.client_app,
        app.path,
        config,
        threads if isinstance(threads, int) else 0,
    )
    with grid, terminated_like_interrupted():
        server_app(grid, Context(1, SERVER_NODE_ID, {}, RecordDict(), config))


def _devices(options: argparse.Namespace) -> None:
    machine = this_machine()
    workers = parse_workers(options.workers or "auto", machine)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"CPU cores:    {format_ids(machine.cores)}")
    console.print(f"accelerators: {', '.join(machine.accelerators) or 'none'}")
    table = Table(title=f'workers of "{options.workers or "auto"}"', title_justify="left")
    for column in ("worker", "device", "tier", "steps", "slowdown", "name"):
        table.add_column(column)
    for rank, worker in enumerate(workers):
        table.add_row(
            str(rank),
            worker.device_with_cores,
            worker.tier or "by speed",
            str(worker.steps or "from the settings"),
            f"{worker.slowdown:g}x",
            worker.name,
        )
    console.print(table)
    if note := sharing_note(workers):
        console.print(note)


def _evaluate(options: argparse.Namespace) -> None:
    from ..api import evaluate_run

    find_modules_here()
    result = evaluate_run(options.run, data=options.data, device=options.device)
    print(  # noqa: T201
        f"test accuracy {result.accuracy:.2%}, loss {result.loss:.4f} on "
        f"{result.num_examples:,} samples ({options.run}, computed on {result.device})"
    )


def _prepare(options: argparse.Namespace) -> None:
    from ..tasks.prepare import prepare_task

    config = own_settings(options)
    find_modules_here()
    task, data, model = config.task, config.data, config.model
    line = prepare_task(task, data, model, options.again, **config.task_options)
    print(line)  # noqa: T201


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever stderr is now: the live progress line replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.stream = sys.stderr
        super().emit(record)


def _set_up_logging(verbose: bool) -> None:
    level = logging.INFO if verbose else logging.WARNING
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter("blsgd: %(message)s"))
    ours = logging.getLogger("flower_blsgd")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(level)
    logging.getLogger("flwr").setLevel(level)
