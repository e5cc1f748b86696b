"""transformers as we use it."""

import logging
import subprocess
import sys

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.models.hugging_face import import_transformers, quiet

pytest.importorskip("transformers")


def test_models_can_be_made_in_a_fresh_process() -> None:
    """Also where torchvision by itself cannot be imported."""
    code = """
from flower_blsgd.models.hugging_face import import_transformers
transformers = import_transformers("this", "vision")
print(transformers.ViTForImageClassification.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("ViTForImageClassification\n", "")


def test_missing_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^it needs transformers; pip install 'flower-blsgd\[t"):
        import_transformers("it", "text")


def test_quiet_is_over_afterwards() -> None:
    told = import_transformers("the tests", "vision").utils.logging
    before = told.get_verbosity(), told.is_progress_bar_enabled()
    within = []

    def fail() -> None:
        with quiet():
            within.append((told.get_verbosity(), told.is_progress_bar_enabled()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert within == [(logging.CRITICAL, False)]
    assert (told.get_verbosity(), told.is_progress_bar_enabled()) == before
    told.disable_progress_bar()
    try:
        with quiet():
            pass
        assert not told.is_progress_bar_enabled()  # the user's own choice stays
    finally:
        told.enable_progress_bar()
