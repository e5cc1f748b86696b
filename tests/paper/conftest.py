"""The pictures of comparisons are tested like those of runs."""

from ..results.conftest import figures  # noqa: F401
