"""The command ``blsgd launch``."""

import argparse

from ..errors import UsageError
from .options import (
    add_resume,
    add_settings,
    find_modules_here,
    terminated_like_interrupted,
    values_of,
)

_BUDGETS = {
    "samples": (int, "samples of all devices together"),
    "seconds": (float, "seconds of training"),
    "rounds": (int, "rounds"),
}


def _add_launch(command: argparse.ArgumentParser) -> None:
    add_settings(command)
    for name, (kind, words) in _BUDGETS.items():
        command.add_argument(
            f"--{name}", type=kind, metavar="N", help=f"length of the run in {words}"
        )
    add_resume(command)
    command.add_argument(
        "-m",
        dest="module",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        default=[],
        help="run this module as the script, like python -m",
    )
    command.add_argument("script", nargs="?", help="Python file that calls flower_blsgd.join")
    command.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the command line of the script"
    )


def _launch(options: argparse.Namespace) -> None:
    from ..config import RunConfig
    from ..devices.worker_spec import cores_note, parse_workers
    from ..flower.app_folder import built_in_app
    from ..launch import launch
    from ..strategy.budget import NO_LIMIT

    resume = options.resume
    words = [word for word in (options.script, *options.arguments) if word is not None]
    if resume and resume.endswith(".py"):  # --resume SCRIPT
        words.insert(0, resume)
        resume = "runs/latest"
    if options.module:
        words = ["-m", *options.module, *words]
    if not words:
        raise UsageError("the script is missing; blsgd launch [OPTIONS] SCRIPT [ARGUMENTS]")
    app = built_in_app()
    values = values_of(options, app, resume)
    values |= {name: n for name in _BUDGETS if (n := getattr(options, name)) is not None}
    given = any(values[name] for name in _BUDGETS)
    if given and not resume and values["epochs"] == app.config["epochs"]:
        values["epochs"] = NO_LIMIT
    elif not given and not resume:
        raise UsageError("give the length of the run: --samples, --seconds or --rounds")
    config = RunConfig.from_run_config(values)
    if note := cores_note(parse_workers(config.workers)):
        print(note, flush=True)
    find_modules_here()
    with terminated_like_interrupted():
        launch(words[0], words[1:], config)
