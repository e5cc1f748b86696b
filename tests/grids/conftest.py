"""The apps of these tests, in a folder of their own."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apps")
    for name in ("arrays_client.py", "foreign_client.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    return folder
