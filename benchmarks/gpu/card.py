"""Checks of the card itself: its support by torch, the fork server, and the tests on CUDA."""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from xml.etree import ElementTree

from .lines import CARD, IS_DRY_RUN, ON_CARD, ROOT, Lines, finished, tail


def card(lines: Lines) -> None:
    """Write the conditions of the call; what `blsgd devices` says must be what torch can do."""
    import torch

    from ..rows import conditions

    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,compute_mode"
    lines.fact(
        "conditions",
        dry_run=IS_DRY_RUN,
        **conditions(**{name: version(name) for name in ("protobuf", "grpcio", "numpy")}),
        card=finished("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")[1],
        mig=re.findall(r"UUID: (MIG-[^)]*)", finished("nvidia-smi", "-L")[1]),
    )
    _, said = finished(sys.executable, "-m", "flower_blsgd", "devices")
    refusals = [line for line in said.splitlines() if "not supported" in line]
    for number in range(torch.cuda.device_count() if ON_CARD else 0):
        capability = torch.cuda.get_device_capability(number)
        try:
            torch.ones(2, device=f"cuda:{number}").mul_(2).sum().item()
            works = True
        except RuntimeError:
            works = False
        refused = any(f"cuda:{number}" in line for line in refusals)
        lines.expect(
            f"blsgd devices says whether torch supports cuda:{number}",
            works != refused,
            works=works,
            capability=capability,
            architectures=torch.cuda.get_arch_list(),
            bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        )
    lines.fact("blsgd devices", said=said)


_FORK = f"""
import importlib, os, sys
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as the fork server has it
from flower_blsgd.engines.local.fork_server import _PRELOAD
from flower_blsgd.worker import MODULES
for module in (*_PRELOAD, *MODULES):
    importlib.import_module(module)
import torch
assert not torch.cuda.is_initialized(), "the imports initialized CUDA"
child = os.fork()
if not child:
    print("sum in the fork:", torch.ones(3, device="{CARD}").sum().item(), flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def fork(lines: Lines) -> None:
    """Import what the fork server does, and use the card in a fork of that."""
    code, said = finished(sys.executable, "-c", _FORK)
    lines.expect("a fork of the fork server uses the card", code == 0, said=tail(said))


def tests(lines: Lines) -> None:
    """Run the tests that need CUDA, without those of torch.compile."""
    run_tests(lines, "not compil")


def run_tests(lines: Lines, chosen: str) -> None:
    """Run the tests marked ``cuda`` whose names match; warnings of torch are no failures here."""
    files = [str(f) for f in ROOT.glob("tests/**/test_*.py") if "mark.cuda" in f.read_text()]
    options = ["-v", "-rfE", "-W", "default", "--tb=short", "--maxfail=8", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-m", "cuda", "-k", chosen, *files]
    with tempfile.NamedTemporaryFile() as report:
        code = subprocess.call([*command, f"--junitxml={report.name}"], cwd=ROOT)
        suites = ElementTree.parse(report.name).iter("testsuite") if code in (0, 1) else ()
        suite = next(iter(suites), ElementTree.Element("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
    ran = counts["tests"] > counts["skipped"] or IS_DRY_RUN
    lines.expect(f"tests marked cuda, {chosen}", code == 0 and ran, code=code, **counts)
