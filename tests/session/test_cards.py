"""Launched scripts on two emulated cards."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.environment import emulated
from tests.fake_cuda.log import process_logs

SCRIPT = """
import os, torch
from torch import nn
import flower_blsgd

early = nn.Linear(1000, 1000).to("cuda")  # 4 MB, as libraries do before they know of a session
model = nn.Linear(8, 2)
session = flower_blsgd.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(session.rank, session.device, torch.cuda.device_count(), os.environ["CUDA_VISIBLE_DEVICES"])
while not session.done:
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    session.step(samples=4)
"""


@pytest.mark.processes
def test_each_script_sees_its_own_card_only(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    log = tmp_path / "log"
    log.mkdir()
    options = ["--workers", "2x cuda:0-1 steps=2", "--rounds", "14", "-s", "out=out"]
    done = subprocess.run(
        [sys.executable, "-m", "flower_blsgd", "launch", *options, "own.py"],
        cwd=tmp_path,
        # The other way round than on the machine, whose numbers the log has.
        env={**emulated(log=str(log)), "CUDA_VISIBLE_DEVICES": "1,0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=250,
    )
    assert "0 cuda:0 1 1" in done.stdout
    assert "cuda:1" in done.stdout  # in the lines of the run, after those that measure
    assert (tmp_path / "out" / "worker-1.log").read_text() == "1 cuda:0 1 0\n"
    used = [{card for card, peak in p.peak_bytes.items() if peak} for p in process_logs(log)]
    assert sorted(used, key=sorted) == [set(), {0}, {1}]  # the server's process uses no card
