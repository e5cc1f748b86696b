"""examples/your_own_app: the printed difference is the real one, and all apps learn."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .commands import EXAMPLES, train_in_this_process
from .scripts import difference

APPS = EXAMPLES / "your_own_app"
README = APPS / "README.md"
SUFFIXES = {".py", ".toml"}


def test_readme_prints_the_real_difference() -> None:
    real: list[str] = []
    for file in sorted(path for path in (APPS / "after").rglob("*") if path.suffix in SUFFIXES):
        name = file.relative_to(APPS / "after")
        if lines := difference(APPS / "before" / name, file):
            real += [f"--- before/{name}", f"+++ after/{name}", *lines]
    (block,) = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    assert [line for line in block.splitlines() if line.strip()] == real
    new, old = (
        sum(re.match(rf"{sign}(?!{sign})", x) is not None for x in real) for sign in (r"\+", "-")
    )
    assert f"{new} lines are new and {old} old ones go" in README.read_text()
    assert new <= 20
    task_files = [APPS / app / "own_digits" / "task.py" for app in ("before", "after")]
    assert task_files[0].read_text() == task_files[1].read_text()


@pytest.mark.filterwarnings("ignore")  # of Flower's own strategy
@pytest.mark.parametrize("app", ["before", "after"])
def test_app_learns(app: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = train_in_this_process(APPS / app, capsys)
    assert list(found) == [f"round {number}" for number in range(6)]
    assert found["round 0"] < 40  # ten classes
    assert found["round 5"] > 80


def test_copy_that_the_readme_makes_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = re.findall(
        r"^    (cp -r after .*?)^    blsgd run",
        README.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-ec", *commands], cwd=APPS, env=environment, check=True)
    assert "own" not in (tmp_path / "my-app" / "pyproject.toml").read_text()
    assert train_in_this_process(tmp_path / "my-app", capsys)["round 5"] > 80
