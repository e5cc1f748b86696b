"""What is shipped: the wheel; `tests/test_layout.py` has the bundle that Flower sends."""

import zipfile
from pathlib import Path

from ..test_release_files import VERSION


def test_wheel_holds_one_package_with_the_app_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "flower_blsgd",
        f"flower_blsgd-{VERSION}.dist-info",
    }
    for part in ("clients/blsgd_client.py", "server/blsgd_server.py", "pyproject.toml"):
        assert f"flower_blsgd/_app/{part}" in names
    data = ("py.typed", "paper/tables/comparison_2c8g.csv", "experiments/report.html")
    assert {f"flower_blsgd/{name}" for name in data} <= set(names)
