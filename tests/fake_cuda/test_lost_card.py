"""A card that fails at every call after an assertion in a kernel."""

import subprocess
import sys

import pytest

from .environment import emulated

PROGRAM = """
import torch
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.app_call import error_of

print(error_of(ValueError()).code, torch.cuda.is_initialized())
ones = torch.ones(2, device="cuda:1")
print(error_of(ValueError()).code)
try:
    while True:
        ones += 1
        ones.sum().item()
except torch.AcceleratorError as error:
    print(error_of(error).code, error_of(UsageError("a consequence")).code)
"""


@pytest.mark.processes
def test_process_ends_after_an_error_that_its_card_keeps() -> None:
    """Whichever card is the current one, and not after another error: codes 2 and 1002."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=emulated(fail_at="9"), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["2 False", "2", "1002 1002"]
