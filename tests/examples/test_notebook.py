"""examples/first_run.ipynb: every cell runs, and its pictures are there."""

import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

from .commands import EXAMPLES, ROOT

SKIP_AN_EVALUATION = """
table = both.folder / "epochs.csv"
header, first, *others = table.read_text().splitlines()
cells = first.split(",")
cells[header.split(",").index("accuracy")] = ""
table.write_text("\\n".join([header, ",".join(cells), *others]))
"""


class ThisPython(KernelManager):
    """Starts the kernel with the interpreter of the tests."""

    @property
    def kernel_spec(self) -> KernelSpec:
        arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=arguments, env={"PYTHONPATH": str(ROOT)}, language="python")


@pytest.mark.processes
def test_every_cell_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    (curves,) = (cell.source for cell in notebook.cells if "plt.plot" in cell.source)
    for cell in notebook.cells:
        cell.source = cell.source.replace('"epochs": 8', '"epochs": 3')
    # With a GPU, the CPU evaluates, and the line of a model that it skips has no accuracy.
    notebook.cells += [nbformat.v4.new_code_cell(code) for code in (SKIP_AN_EVALUATION, curves)]
    manager = ThisPython()
    client = NotebookClient(
        notebook, km=manager, timeout=200, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises the error of a cell
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    text = "".join(output.get("text", "") for output in outputs)
    assert len(pictures) == 3
    assert text.count("test accuracy") >= 2
    assert "slow-1 (cpu:1): " in text
