"""Find a Flower app on disk, and merge its run config with what the user overrides."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest

Value = bool | int | float | str

_PACKAGE = Path(__file__).parents[1]
_DEEPEST = 20
_ASSIGNMENT = re.compile(r"""([^\s=]+)=("[^"]*"|'[^']*'|\S*)""")


@dataclass(frozen=True)
class FlowerApp:
    """The folder of a Flower app, as its ``pyproject.toml`` describes it.

    `server_app` and `client_app` are ``module:attribute``. `config` has the defaults of the run
    config, flat, with keys joined by dots.
    """

    path: Path
    name: str
    server_app: str
    client_app: str
    config: Mapping[str, Value]


def find_app(path: str | None) -> tuple[FlowerApp, bool]:
    """Return the app in a folder, and whether it is the built-in one.

    None stands for the current folder if it is a Flower app, and for the built-in app otherwise.
    UsageError if the folder is not a Flower app.
    """
    if path is not None:
        return read_app(Path(path)), False
    if _is_app(Path.cwd()):
        return read_app(Path.cwd()), False
    return built_in_app(), True


def built_in_app() -> FlowerApp:
    """Return the app that comes with this library."""
    packed = _PACKAGE / "_app"  # in a wheel; an editable install uses the repository
    return read_app(packed if packed.is_dir() else _PACKAGE.parent)


def read_app(folder: Path) -> FlowerApp:
    """Read an app's ``pyproject.toml``.

    UsageError if it is missing or does not declare a Flower app.
    """
    components = _section(folder, "tool.flwr.app.components")
    server_app, client_app = (components.get(name) for name in ("serverapp", "clientapp"))
    if not (isinstance(server_app, str) and isinstance(client_app, str)):
        raise UsageError(
            f"{folder} is not a Flower app: its pyproject.toml has no "
            "[tool.flwr.app.components] with serverapp and clientapp"
        )
    return FlowerApp(
        path=folder.resolve(),
        name=str(_section(folder, "project").get("name", folder.resolve().name)),
        server_app=server_app,
        client_app=client_app,
        config=_flat(_section(folder, "tool.flwr.app.config"), "pyproject.toml"),
    )


def run_config(
    app: FlowerApp,
    sources: Iterable[str],
    settings: Iterable[str],
) -> tuple[dict[str, Value], str]:
    """Return the app's run config with the overrides, and the name of the last config file.

    `sources` are those of ``-c``: a file, the bare name of a file in the app's ``configs/``, or
    ``key=value`` pairs. `settings` are those of ``-s``, one ``key=value`` each; they override
    `sources`. Later overrides win. UsageError if a file or a value cannot be read, or a key is not
    one of the app's.
    """
    config = dict(app.config)
    name = ""
    for source in sources:
        file = _config_file(app, source)
        if file is not None:
            name = file.stem
            overrides = _flat(_toml(file), str(file))
        elif "=" in source:
            overrides = dict(_pairs(app, source))
        else:
            known = sorted(path.stem for path in (app.path / "configs").glob("*.toml"))
            raise UsageError(
                f"-c {source}: neither a file nor a config of {app.name} nor key=value; "
                f"{nearest(source, known)}"
            )
        config.update(_known(app, overrides))
    for setting in settings:
        key, equals, raw = setting.partition("=")
        if not equals:
            raise UsageError(f"-s {setting}: write key=value, such as -s epochs=5")
        override = {key.strip(): _value(app, key.strip(), raw.strip())}
        config.update(_known(app, override))
    return config, name


def _known(app: FlowerApp, overrides: dict[str, Value]) -> dict[str, Value]:
    for key, value in overrides.items():
        if key not in app.config:
            raise UsageError(f"{key} = {value!r}: unknown key; {nearest(key, app.config)}")
    return overrides


def _config_file(app: FlowerApp, source: str) -> Path | None:
    for path in (Path(source), app.path / "configs" / f"{source}.toml"):
        if os.path.isfile(path):  # pathlib raises if the name is too long, as of key=value pairs
            return path
    return None


def _pairs(app: FlowerApp, text: str) -> Iterable[tuple[str, Value]]:
    if _ASSIGNMENT.sub("", text).strip():
        raise UsageError(f"-c {text}: write key=value pairs with a space between them")
    return [(m[1], _value(app, m[1], m[2])) for m in _ASSIGNMENT.finditer(text)]


def _value(app: FlowerApp, key: str, raw: str) -> Value:
    """Read a value from the command line. A key whose default is a text accepts any text."""
    if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'":
        return raw[1:-1]
    if isinstance(app.config.get(key), str):
        return raw
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return raw
    return value if isinstance(value, Value) else raw


def _is_app(folder: Path) -> bool:
    try:
        return "app" in _section(folder, "tool.flwr")
    except UsageError:
        return False


def _section(folder: Path, name: str) -> Mapping[str, Any]:
    """Return a table of the ``pyproject.toml`` in a folder, empty if it is not there."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        raise UsageError(f"{folder} is not a Flower app: it has no pyproject.toml")
    table = _toml(file)
    for key in name.split("."):
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {key} of [{name}] is not a table")
    return table


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def _flat(table: Mapping[str, Any], file: str, prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    if prefix.count(".") > _DEEPEST:
        raise UsageError(f"{file}: {prefix:.40}... is nested too deeply")
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, file, f"{prefix}{key}.")
        elif isinstance(value, Value):
            flat[prefix + key] = value
        else:
            raise UsageError(
                f"{file}: {prefix}{key} is a {type(value).__name__}; Flower's run config holds "
                "true/false, numbers and texts only"
            )
    return flat
