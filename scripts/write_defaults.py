"""Write the defaults of all settings into pyproject.toml, and worker options into the docs."""

from pathlib import Path

import tomli_w

from flower_blsgd.config import RunConfig
from flower_blsgd.grids.worker_spec import options_table


def write_defaults(pyproject: Path) -> None:
    """Replace the table in a file; one that has the defaults already is not touched."""
    text = pyproject.read_text()
    head, mark, rest = text.partition("[tool.flwr.app.config]\n")
    assert mark, "pyproject.toml has no [tool.flwr.app.config]"
    tail = rest[rest.index("\n[") :]
    written = head + mark + tomli_w.dumps(RunConfig().to_run_config()) + tail
    if written != text:  # an untouched file does not make `make` install again
        pyproject.write_text(written)


def write_options(page: Path) -> None:
    """Replace the table of worker options in a page of the docs."""
    text = page.read_text()
    head, mark, rest = text.partition(options_table().splitlines()[0])
    assert mark, f"{page.name} has no table of worker options"
    tail = rest[rest.index("\n\n") + 1 :]
    if (written := head + options_table() + tail) != text:
        page.write_text(written)


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    write_defaults(root / "pyproject.toml")
    write_options(root / "docs" / "settings.md")
