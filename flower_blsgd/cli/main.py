"""The command ``blsgd``. A command imports what it needs when it runs."""

import argparse
import atexit
import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UsageError, nearest
from .commands import COMMANDS, overview
from .options import (
    HUNG_UP,
    TERMINATED,
    add_resume,
    add_settings,
    add_workers,
    find_modules_here,
    own_settings,
    terminated_like_interrupted,
    values_of,
)

USAGE_ERROR = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``blsgd``; return its exit code: 0, 1 if a run failed, 2 for a user error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser(arguments).parse_args(arguments)
        if options.command is None:
            print(overview(), end="")
            return 0
        if options.command is _run:  # first: it imports torch for the workers meanwhile
            from ..engines.local.fork_server import start_fork_server
            from ..worker import MODULES

            start_fork_server(MODULES)
        _set_up_logging(options.verbose)
        options.command(options)
    except (UsageError, PermissionError) as error:
        if isinstance(error, PermissionError) and not error.filename:
            raise
        return _fail(_brief(error), USAGE_ERROR, error)
    except KeyboardInterrupt as error:
        return _fail("interrupted; all workers have ended", _INTERRUPTED, error)
    except SystemExit as error:
        if error.code not in (TERMINATED, HUNG_UP):  # as of --help
            raise
        return _fail("terminated; all workers have ended", error.code, error)
    except Exception as error:
        from flwr.app.exception import AppExitException

        if not isinstance(error, AppExitException):  # as a round without a usable reply
            raise
        return _fail(error, getattr(error, "code", 1), error)  # that of a script
    return 0


def _brief(error: UsageError | PermissionError) -> str:
    """Return the line of an error, also of a path that may not be read or written."""
    if isinstance(error, PermissionError):
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _fail(reason: object, code: int, error: BaseException) -> int:
    """Print why a command ends, and the notes of the error, such as the command that resumes."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Ctrl-C no longer matters
    print(f"blsgd: {reason}", file=sys.stderr)
    cause: BaseException | None = error
    while cause is not None:  # after a second Ctrl-C the note is on the first error
        for note in getattr(cause, "__notes__", ()):
            print(note, file=sys.stderr)
        cause = cause.__context__
    return code


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage: every error is one line."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; UsageError with the nearest option if one is unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            if word.startswith("-"):
                near = nearest(word, self._option_string_actions)
                raise UsageError(f"unknown option {word}, see {self.prog} --help; {near}")
            self.error(f"unexpected argument {word}")
        return options, unknown


class _Overview(_Parser):
    commands: Mapping[str, argparse.ArgumentParser]
    """The parser of each command."""

    def format_help(self) -> str:
        """Return the list of all commands, grouped by purpose."""
        return overview()


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser, which has all commands, but arguments only for the given one."""
    given = next((argument for argument in arguments if not argument.startswith("-")), "")
    if given and given not in COMMANDS:
        raise UsageError(f"unknown command {given}, see blsgd --help; {nearest(given, COMMANDS)}")
    return parser_with([given])


def parser_with(names: Collection[str]) -> _Overview:
    """Return the parser, which has all commands, but arguments only for these."""
    parser = _Overview(prog="blsgd")
    parser.add_argument(
        "--version",
        action="store_const",
        dest="command",
        const=_version,
        help="show the versions of flower-blsgd, Python, torch and flwr, and the devices",
    )
    parser.set_defaults(command=None, verbose=False)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for name, its in COMMANDS.items():
        command = commands.add_parser(name, help=its.brief, description=its.text, epilog=its.epilog)
        if name in names:
            commands_of = importlib.import_module(f"{__package__}.{its.module}")
            command.set_defaults(command=getattr(commands_of, f"_{name}"))
            getattr(commands_of, f"_add_{name}")(command)
            command.add_argument("-v", "--verbose", action="store_true", help="show Flower's log")
    parser.commands = commands.choices
    return parser


def _version(_: argparse.Namespace) -> None:
    from ..devices.machine import accelerator_names, cpu_name, format_ids, this_machine
    from ..results.summary import versions

    found, machine = versions(), this_machine()
    print(f"{found['flower-blsgd']}\nPython {found['python']}\ntorch {found['torch']}")
    print(f"flwr {found['flwr']}\ncpu:{format_ids(machine.cores)} ({cpu_name()})")
    for device, name in zip(machine.accelerators, accelerator_names(machine), strict=True):
        print(f"{device} ({name})")


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "app",
        nargs="?",
        help="folder of a Flower app (default: the current folder, else the built-in app)",
    )
    add_settings(command)
    add_resume(command)
    command.add_argument(
        "--trace",
        action="store_true",
        help="write torch's profiler trace of one round of every worker into the results folder",
    )


def _run(options: argparse.Namespace) -> None:
    from flwr.app import Context, RecordDict
    from flwr.serverapp import ServerApp

    from ..config import RunConfig
    from ..devices.worker_spec import cores_note, parse_workers
    from ..engines.local.grid import LocalGrid
    from ..flower.app_folder import find_app, run_config
    from ..flower.internals import SERVER_NODE_ID, load_app

    app, built_in = find_app(options.app)
    is_ours = app.config.keys() == RunConfig().to_run_config().keys()
    if is_ours:
        config = values_of(options, app)
        if resume := os.path.expanduser(str(options.resume or config["resume"])):
            config = values_of(options, app, resume)
        config["trace"] = options.trace or config["trace"]
        checked = RunConfig.from_run_config(config)
        if checked.is_script:
            from ..results.summary import blsgd_command

            command = blsgd_command(checked, *(["--resume", resume] if resume else []))
            raise UsageError(f"task = {checked.task!r} is a training script; use {command}")
    else:
        for name in ("trace", "resume"):
            if getattr(options, name):
                raise UsageError(f"--{name}: {app.name} has no setting {name}")
        config, _ = run_config(app, options.run_config, options.set)
    # Our settings are checked here; another app checks its own.
    workers = parse_workers(str(options.workers or config.get("workers", "auto")))
    if not is_ours:  # its log is its only output, as with `flwr run`
        logging.getLogger("flwr").setLevel(logging.INFO)
    try:
        find_modules_here()
        server_app = load_app(app.server_app, app.path, ServerApp)
    except ImportError as error:
        raise UsageError(f"{app.server_app} of {app.path} cannot be loaded: {error}") from None
    which = "the built-in app" if built_in else str(app.path)
    print(f"running {app.name} from {which}", flush=True)
    if note := cores_note(workers):
        print(note, flush=True)
    grid = LocalGrid(workers, app.client_app, app.path, config)
    with grid, terminated_like_interrupted():
        server_app(grid, Context(1, SERVER_NODE_ID, {}, RecordDict(), config))


def _add_devices(command: argparse.ArgumentParser) -> None:
    add_workers(command)
    command.add_argument(
        "--python", metavar="PATH", help="another interpreter: list what its torch sees"
    )


def _devices(options: argparse.Namespace) -> None:
    if options.python:
        from ..devices.interpreter import interpreter

        python = os.path.expanduser(options.python)
        interpreter(python)  # refuses one that cannot be used
        words = [python, "-P", "-m", "flower_blsgd", "devices"]
        words += ["--workers", options.workers] if options.workers else []
        raise SystemExit(subprocess.run(words, check=False).returncode)
    from rich import filesize
    from rich.console import Console
    from rich.table import Table

    from ..devices.machine import accelerator_of, format_ids, this_machine
    from ..devices.worker_spec import OPTIONS, cores_note, parse_workers

    machine = this_machine()
    workers = parse_workers(options.workers or "auto", machine)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"CPU cores:    {format_ids(machine.cores)}")
    columns = ("device", "name", "memory", "capability", "bfloat16", "supported")
    table = Table(*columns, title="accelerators", title_justify="left")
    for device in machine.accelerators:
        its = accelerator_of(device)
        memory = filesize.decimal(its.memory_bytes) if its.memory_bytes else "-"
        name = its.name.removeprefix("NVIDIA ")
        capability = ".".join(map(str, its.capability)) or "-"
        bfloat16 = ("yes" if its.has_bfloat16 else "no") if its.capability else "-"
        supported = "no" if its.problem else "yes"
        table.add_row(device, name, memory, capability, bfloat16, supported)
    console.print(table if machine.accelerators else "accelerators: none")
    if {"cuda:0", "cuda:1"} <= {*machine.accelerators} and "CUDA_DEVICE_ORDER" not in os.environ:
        console.print(
            "note: CUDA puts the fastest card first; for the order of nvidia-smi, set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    title = f'workers of "{options.workers or "auto"}"'
    given = [worker.given_options() for worker in workers]
    keys = [key for key in OPTIONS if any(key in options for options in given)]
    table = Table("worker", "device", *keys, title=title, title_justify="left")
    for rank, (worker, its_options) in enumerate(zip(workers, given, strict=True)):
        cells = (str(its_options.get(key, "-")) for key in keys)
        table.add_row(str(rank), worker.device_with_cores, *cells)
    console.print(table)
    if note := cores_note(workers):
        console.print(note)


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="folder of a run, such as runs/latest")
    command.add_argument("--data", default="", help="folder of the data, if it has moved")
    command.add_argument(
        "--device", default="", help="such as cuda:0 (default: the first accelerator)"
    )


def _evaluate(options: argparse.Namespace) -> None:
    from ..api import evaluate_run
    from ..results.metric import Metric

    find_modules_here()
    result = evaluate_run(options.run, data=options.data, device=options.device)
    figure = Metric(result.metric_name).named(result.metric)
    print(
        f"{result.split} {figure}, loss {result.loss:.4f} on "
        f"{result.num_examples:,} samples ({options.run}, computed on {result.device})"
    )


def _add_prepare(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--again", action="store_true", help="prepare the data even if they are ready"
    )
    add_settings(command, workers=False)


def _prepare(options: argparse.Namespace) -> None:
    from ..tasks.by_name import prepare_task

    config = own_settings(options)
    find_modules_here()
    names = config.task, config.data, config.model
    print(prepare_task(*names, options.again, **config.task_options))


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        """Write to the current stderr, which the live progress line replaces temporarily."""
        self.stream = sys.stderr
        super().emit(record)


def _set_up_logging(verbose: bool) -> None:
    import flwr.app  # noqa: F401  # first: it sets the level of its logger

    level = logging.INFO if verbose else logging.WARNING
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter("blsgd: %(message)s"))
    ours = logging.getLogger("flower_blsgd")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(level)
    logging.getLogger("flwr").setLevel(level)
