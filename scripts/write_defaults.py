"""Write what follows from the settings of ``flower_blsgd/config.py`` into other files.

Their defaults go into ``[tool.flwr.app.config]`` of pyproject.toml, and their names and types into
``flower_blsgd/settings.py``. The table of worker options goes into docs/reference/workers.md.
"""

import dataclasses
from pathlib import Path
from typing import Literal, get_args, get_origin

import tomli_w

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.worker_spec import OPTIONS

_PARTS = {
    "steps": "StepPolicy",
    "sampler": "Sampler",
    "weights": "Weighting",
    "selection": "Selection",
}
"""Settings that also accept an object in Python."""

_OWN_ARGUMENTS = {"task", "workers", "resume"}
"""Settings that `train` declares itself."""

_HEAD = '''"""Keyword arguments of `train`; generated from config.py by ``make format``."""

from os import PathLike
from typing import Literal, TypedDict

from .algorithm.averaging import Weighting
from .algorithm.local_steps import StepPolicy
from .algorithm.sampling import Sampler
from .algorithm.selection import Selection


class Settings(TypedDict, total=False):
    """Settings of a run, by their names in Python; docs/reference/settings.md explains each."""

'''


def write_defaults(pyproject: Path) -> None:
    """Replace the table of defaults in a file."""
    text = pyproject.read_text()
    head, mark, rest = text.partition("[tool.flwr.app.config]\n")
    assert mark, "pyproject.toml has no [tool.flwr.app.config]"
    tail = rest[rest.index("\n[") :]
    _write(pyproject, head + mark + tomli_w.dumps(RunConfig().to_run_config()) + tail)


def write_settings(module: Path) -> None:
    """Write the module with the names and types."""
    fields = [f for f in dataclasses.fields(RunConfig) if f.name not in _OWN_ARGUMENTS]
    _write(module, _HEAD + "".join(f"    {f.name}: {_type_of(f)}\n" for f in fields))


def _type_of(field: "dataclasses.Field[object]") -> str:
    if field.metadata.get("is_path"):
        return "str | PathLike[str]"
    if field.name in _PARTS:
        return f"str | {_PARTS[field.name]}"
    if get_origin(field.type) is Literal:
        return "Literal[" + ", ".join(f'"{name}"' for name in get_args(field.type)) + "]"
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def _write(file: Path, text: str) -> None:
    # A file that is not touched does not make `make` install again.
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def options_table() -> str:
    """Return the table of options in Markdown."""
    rows = [
        f"| `{o.key}` | {o.values.replace('|', ', ')} | {o.meaning} |" for o in OPTIONS.values()
    ]
    return "\n".join(["| option | values | meaning |", "|---|---|---|", *rows]) + "\n"


def write_options(page: Path) -> None:
    """Replace the table of worker options in a page of the docs."""
    text = page.read_text()
    head, mark, rest = text.partition(options_table().splitlines()[0])
    assert mark, f"{page.name} has no table of worker options"
    tail = rest[rest.index("\n\n") + 1 :]
    _write(page, head + options_table() + tail)


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    write_defaults(root / "pyproject.toml")
    write_options(root / "docs" / "reference" / "workers.md")
    write_settings(root / "flower_blsgd" / "settings.py")
