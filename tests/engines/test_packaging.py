"""What is shipped: the wheel, and the bundle that Flower sends to every node."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from ..examples.commands import ROOT


def tracked() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listing.stdout.split()


def test_wheel_holds_one_package_with_the_app_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "flower_blsgd",
        "flower_blsgd-0.1.0.dist-info",
    }
    for part in ("clients/blsgd_client.py", "server/blsgd_server.py", "pyproject.toml"):
        assert f"flower_blsgd/_app/{part}" in names
    data = ("py.typed", "paper/tables/comparison_2c8g.csv", "experiments/report.html")
    assert {f"flower_blsgd/{name}" for name in data} <= set(names)


def test_bundle_holds_the_allowed_files_only(tmp_path: Path) -> None:
    flwr = Path(sys.executable).with_name("flwr")
    clone = tmp_path / "flower-blsgd"  # `flwr build` wants a folder name without an underscore
    for name in tracked():
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    environment = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment["FLWR_TELEMETRY_ENABLED"] = "0"
    subprocess.run([flwr, "build"], cwd=clone, env=environment, check=True, capture_output=True)
    (bundle,) = clone.glob("*.fab")
    names = set(zipfile.ZipFile(bundle).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops <= {
        *("flower_blsgd", "clients", "server", "configs", "README.md", "LICENSE"),
        *("pyproject.toml", ".info"),
    }
    code = {n for n in tracked() if n.startswith(("flower_blsgd/", "clients/", "server/"))}
    assert {n for n in code if n.endswith(".py")} <= names
