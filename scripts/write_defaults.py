"""Write the defaults of all settings into ``[tool.flwr.app.config]`` of pyproject.toml."""

from pathlib import Path

import tomli_w

from flower_blsgd.config import RunConfig


def write_defaults(pyproject: Path) -> None:
    """Replace the table in a file; one that has the defaults already is not touched."""
    text = pyproject.read_text()
    head, mark, rest = text.partition("[tool.flwr.app.config]\n")
    assert mark, "pyproject.toml has no [tool.flwr.app.config]"
    tail = rest[rest.index("\n[") :]
    written = head + mark + tomli_w.dumps(RunConfig().to_run_config()) + tail
    if written != text:  # an untouched file does not make `make` install again
        pyproject.write_text(written)


if __name__ == "__main__":
    write_defaults(Path(__file__).parents[1] / "pyproject.toml")
