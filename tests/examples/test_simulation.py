"""docs/simulation.md: of ten virtual nodes, the i-th is the i-th worker of the spec."""

import json
import re
from pathlib import Path

import pytest

from flower_blsgd.runtime.machine import usable_cores

from .commands import ROOT, run

PROBE = Path(__file__).with_name("ten_nodes_app")
FIRST, LAST = usable_cores()[0], usable_cores()[-1]


def test_page_has_the_command_that_the_script_gives() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    script = (ROOT / "scripts" / "flower_engine.py").read_text()
    assert "client-resources-num-cpus=1 init-args-num-cpus={nodes}" in script
    resources = "client-resources-num-cpus=1 init-args-num-cpus=10"
    assert f"--federation-config 'num-supernodes=10 {resources}'" in page


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_node_i_is_worker_i() -> None:
    pytest.importorskip("ray")
    spec = f"2x cpu:{FIRST} fast; 8x cpu:{LAST} slow"
    arguments = ["--app", PROBE, "--num-supernodes", "10", "-c", f"workers='{spec}'"]
    told = run("scripts/flower_engine.py", "simulation", *arguments)
    answers = [json.loads(line) for line in re.findall(r"^answer (.*)$", told, re.MULTILINE)]
    found = sorted((a["place"], a["device"], a["tier"], a["cores"]) for a in answers)
    assert found == [
        *[(place, f"cpu:{FIRST}", "fast", [FIRST]) for place in (0, 1)],
        *[(place, f"cpu:{LAST}", "slow", [LAST]) for place in range(2, 10)],
    ]
