"""``blsgd completion``: bash completes with the printed script."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flower_blsgd.cli.main import main

_PRESS_TAB = """
source ./blsgd.bash
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
[[ $(complete -p blsgd) =~ -F\\ ([^ ]+) ]]
${BASH_REMATCH[1]} blsgd "${!#}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a folder with the script for bash and a file ``digits-mine.toml``."""
    if shutil.which("bash") is None:
        pytest.skip("without bash")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "blsgd.bash").write_text(capsys.readouterr().out)
    (tmp_path / "digits-mine.toml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["com"], "compare completion"),
        (["run", "--res"], "--resume"),
        (["plan", "-s", "epochs=1", "--num"], "--num-samples"),
        (["run", "-c", "digits-"], "digits-1c1g-smoke digits-2c8g-smoke digits-five-speeds "
                                   "digits-mine.toml"),
        (["compare", "-c", "digits", "-s", "local-"], "local-steps-fast= local-steps-slow="),
        (["reproduce", "bias-2c8g", "--scale", ""], "smoke quick full"),
        (["report", "digits"], "digits-mine.toml"),
        (["devices", "--python", "digits"], "digits-mine.toml"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_bash_completes(in_bash: Path, words: list[str], expected: str) -> None:
    command = ["bash", "--norc", "-c", _PRESS_TAB, "bash", "blsgd", *words]
    done = subprocess.run(command, cwd=in_bash, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()


def test_zsh_gets_configs_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef blsgd")
    assert ":_blsgd_config_files" in script
    assert "\n_blsgd_keys() { compadd -S = -- name task data " in script
