"""The command ``blsgd completion``: a script for the tab key."""

import argparse
from string import Template

_FILES = {
    *("app", "run", "folder", "script", "resume", "data", "out", "python"),
    *("root_certificates", "keys"),
}
"""Destinations of the arguments that are files or folders."""

_BASH = Template("""\
_blsgd_config_files() {
  compgen -W "$configs" -- "$$1"
  compgen -f -- "$$1"
}
_blsgd_keys() { compgen -W "$keys" -S = -- "$$1"; }
""")
# A key is followed by its value, and not by a space.
_BASH_END = """
_blsgd_complete() {
  _shtab_blsgd "$@"
  if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace 2>/dev/null || :; fi
}
complete -o bashdefault -F _blsgd_complete blsgd
"""
_ZSH = Template("""\
_blsgd_config_files() { compadd -- $configs; _files }
_blsgd_keys() { compadd -S = -- $keys }
""")


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh"), help="the shell that runs the script")


def _completion(options: argparse.Namespace) -> None:
    import shtab

    from ..flower.app_folder import built_in_app
    from .commands import COMMANDS
    from .main import parser_with

    app = built_in_app()
    names = {
        "configs": " ".join(sorted(path.stem for path in app.path.glob("configs/*.toml"))),
        "keys": " ".join(app.config),
    }
    functions = {"bash": _BASH.substitute(names), "zsh": _ZSH.substitute(names)}
    words = {
        name: {"bash": function, "zsh": function, "preamble": functions}
        for name, function in (("run_config", "_blsgd_config_files"), ("set", "_blsgd_keys"))
    }
    parser = parser_with(COMMANDS)
    for command in parser.commands.values():
        for action in command._actions:
            completed = shtab.FILE if action.dest in _FILES else words.get(action.dest)
            if completed:
                action.complete = completed  # type: ignore[attr-defined]
    script = shtab.complete(parser, options.shell)
    print(script + _BASH_END * (options.shell == "bash"))
