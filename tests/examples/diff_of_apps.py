r"""The difference between the two apps of examples/your_own_app, as its README prints it.

Write it anew after a change of the apps::

    python -m tests.examples.diff_of_apps
"""

import difflib
import re
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_own_app"
README = EXAMPLE / "README.md"
SUFFIXES = {".py", ".toml", ".md"}

_BLOCK = re.compile(r"(?<=```diff\n).*?(?=```)", re.DOTALL)


def files_of(app: str) -> dict[str, str]:
    """Return the text of every file of an app by its path in there."""
    folder = EXAMPLE / app
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.suffix in SUFFIXES
    }


def real_diff() -> str:
    """Return what differs, with a line of context around it and no line numbers."""
    before, after = files_of("before"), files_of("after")
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "").splitlines(), after.get(name, "").splitlines()
        names = f"before/{name}", f"after/{name}"
        lines += difflib.unified_diff(old, new, *names, n=1, lineterm="")
    return "".join(f"{'@@' if line.startswith('@@') else line}".rstrip() + "\n" for line in lines)


def printed_diff() -> str:
    """Return the diff in the README."""
    (block,) = _BLOCK.findall(README.read_text())
    return block


def count(diff: str, sign: str) -> int:
    """Return how many lines a diff adds ("+") or takes away ("-")."""
    return sum(line.startswith(sign) and line[:3] != 3 * sign for line in diff.splitlines())


if __name__ == "__main__":
    README.write_text(_BLOCK.sub(lambda _: real_diff(), README.read_text()))
