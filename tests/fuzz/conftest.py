"""What goes wrong is logged, thousands of times: nobody reads that here."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
