"""What a release needs: one version, valid workflows and forms, and a changelog with dates."""

import re
import tomllib
from pathlib import Path

import check_jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", [*(GITHUB / "workflows").glob("*.yml")]),
        (
            "github-issue-forms",
            [GITHUB / "ISSUE_TEMPLATE" / f"{n}.yml" for n in ("bug", "feature")],
        ),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_for_others_are_valid(
    schema: str, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert files
    with pytest.raises(SystemExit) as ended:
        check_jsonschema.main(["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    assert ended.value.code == 0, capsys.readouterr().out


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    released = [heading for heading in headings if heading != "[Unreleased]"]
    version = r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d"
    assert all(re.fullmatch(version, heading) for heading in released)
    assert released[0] == f"[{VERSION}] - {citation['date-released']}"
    assert f"\n[{VERSION}]: https://" in changelog


def test_the_workflow_of_a_release_checks_every_extra_that_users_install() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = (ROOT / "scripts" / "check_release.py").read_text()
    assert all(f'"{extra}": ' in text for extra in extras if extra != "dev")
    assert "scripts/check_release.py dist" in (GITHUB / "workflows" / "release.yml").read_text()
