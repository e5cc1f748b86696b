"""The layout: which package may import which, what an import must not load, what is shipped."""

import ast
import functools
import io
import itertools
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.object_ref import load_app, validate

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig

ROOT = Path(__file__).parents[1]
APPS = ("clients", "server")
MODULES = sorted(path for part in ("flower_blsgd", *APPS) for path in (ROOT / part).rglob("*.py"))

ARROWS = {
    "errors": set(),
    "fields": set(),
    "files": set(),
    "processes": set(),
    "algorithm": {"errors"},
    "devices": {"errors"},
    "flower": {"errors"},
    # of devices the table of worker options
    "protocol": {"devices", "flower", "errors", "fields"},
    "engines": {"devices", "flower", "errors", "fields", "files", "processes"},
    "worker": {"protocol", "algorithm", "devices", "flower", "errors", "processes"},
    "data": {"errors", "files"},
    "models": {"data", "errors"},  # of data only whether the hub answers
    "tasks": {"data", "models", "worker", "algorithm", "errors"},
    # of tasks the names of options
    "config": {"algorithm", "protocol", "data", "tasks", "errors", "fields"},
    "strategy": {"protocol", "algorithm", "config", "devices", "flower", "engines", "errors"}
    | {"fields"},
    "hosts": {"strategy", "engines", "flower", "devices", "protocol", "errors"},
    "results": {"strategy", "protocol", "algorithm", "devices", "flower", "tasks", "config"}
    | {"files", "errors", "fields"},
    "checkpoint": {"results", "strategy", "tasks", "protocol", "engines", "flower", "config"}
    | {"files", "errors"},
    "released": {"strategy", "algorithm", "errors"},
    "parts": {"released", "strategy", "worker", "engines", "flower", "devices", "config"}
    | {"protocol", "algorithm", "errors"},
    "workload": {"checkpoint", "results", "strategy", "tasks", "worker", "devices", "config"}
    | {"protocol", "algorithm", "errors"},
    "run": {"parts", "workload", "checkpoint", "results", "strategy", "tasks", "engines"}
    | {"devices", "config", "protocol", "errors"},
    "experiments": {
        "run",
        "parts",
        "workload",
        "results",
        "strategy",
        "protocol",
        "algorithm",
        "engines",
        "devices",
    }
    | {"worker", "config", "errors", "files"},
    # only the command line imports it
    "paper": {
        "experiments",
        "results",
        "strategy",
        "flower",
        "devices",
        "config",
        "errors",
        "files",
    },
    # of data only the repair of torchvision
    "session": {"worker", "protocol", "algorithm", "flower", "devices", "errors", "data"},
    "launch": {
        "run",
        "workload",
        "session",
        "results",
        "strategy",
        "protocol",
        "engines",
        "devices",
    }
    | {"client_app", "config", "errors"},
    "settings": {"algorithm"},  # written by make format
    "api": {"run", "parts", "results", "strategy", "devices", "tasks", "worker", "config", "errors"}
    | {"algorithm", "settings"},
    "integrations": {"session", "algorithm", "errors"},  # of algorithm the seeds
    "cli": {"api", "launch", "experiments", "paper", "results", "strategy", "engines"}
    | {"flower", "devices", "tasks", "worker", "config", "errors", "files", "processes"},
    "task_executor": {"tasks", "worker", "protocol", "devices", "config"},
    "client_app": {"task_executor", "session", "hosts", "worker", "protocol", "engines"}
    | {"flower", "devices", "errors"},
    "clients": {"client_app"},
    "server": {"launch", "run", "engines", "flower", "config"},
}
"""What each package may import of the others: arrows point one way."""

FLOOR = {"errors", "files", "processes", "fields"}
"""Modules that many packages import; the page on the architecture says it in a sentence."""

HEADS = ("flower_blsgd", "__main__")
"""The public names, and the command: they may import everything."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    """Return the package of a module: ``"grids"``, ``"run"``, ``"clients"``."""
    words = name.split(".")
    return words[1] if words[0] == "flower_blsgd" and len(words) > 1 else words[0]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a module's syntax tree that these tests look at."""
    kinds = ast.Import | ast.ImportFrom | ast.Call | ast.Constant
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the absolute names of what a module imports, wherever in it the import stands."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def packages_imported(path: Path) -> set[str]:
    ours = {name for name in imports_of(path) if name.split(".")[0] in ("flower_blsgd", *APPS)}
    return {package_of(name) for name in ours} - {package_of(name_of(path))}


def test_arrows_between_packages_point_one_way() -> None:
    wrong = []
    for path in MODULES:
        package = package_of(name_of(path))
        if package in HEADS:
            continue
        if more := packages_imported(path) - ARROWS[package]:
            wrong.append(f"{name_of(path)} imports {', '.join(sorted(more))}")
    assert wrong == []
    # A reader of imports that finds nothing would hold every rule.
    assert {"strategy", "results", "tasks"} <= packages_imported(ROOT / "flower_blsgd" / "run.py")


def test_page_on_the_architecture_lists_the_arrows() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    block = page.partition("point one way (`tests/test_layout.py`):")[2].split("```")[1]
    listed: dict[str, set[str]] = {}
    for line in block.removeprefix("text\n").splitlines():
        packages, _, below = line.partition("->")
        names = set() if "none" in below else {name.strip() for name in below.split(",")}
        listed |= {package.strip(): names for package in packages.split(",")}
    assert listed == {name: below - FLOOR for name, below in ARROWS.items() if name not in FLOOR}


def test_modules_of_a_package_import_each_other_one_way_only() -> None:
    """Also within functions, and for types only."""
    names = {name_of(path) for path in MODULES}
    below: dict[str, set[str]] = {}
    for path in MODULES:
        name = name_of(path)
        found = {n if n in names else n.rpartition(".")[0] for n in imports_of(path)} & names
        below[name] = {n for n in found - {name} if package_of(n) == package_of(name)}
    for middle, name in itertools.product(names, names):  # everything that a module reaches
        if middle in below[name]:
            below[name] = below[name] | below[middle]
    circles = {
        frozenset(n.removeprefix("flower_blsgd.") for n in (name, other))
        for name in names
        for other in below[name] - {name}
        if name in below[other]
    }
    assert circles == set()


def test_no_string_names_a_module_of_a_package_above() -> None:
    names = {name_of(path) for path in MODULES} - set(APPS)  # these are words, too
    found = set()
    for path in MODULES:
        package = package_of(name_of(path))
        if package in HEADS:
            continue
        allowed = ARROWS[package] | {package, *HEADS}
        for node in nodes_of(path):
            text = node.value if isinstance(node, ast.Constant) else None
            module = text.partition(":")[0] if isinstance(text, str) else ""
            if module in names and package_of(module) not in allowed:
                found.add((package, text))
    assert found == set()


def test_algorithm_knows_no_flower_no_process_and_no_clock() -> None:
    forbidden = {"flwr", "torch", "time", "datetime", "subprocess", "multiprocessing"}
    for path in (ROOT / "flower_blsgd" / "algorithm").glob("*.py"):
        assert not forbidden & {name.split(".")[0] for name in imports_of(path)}, name_of(path)


def test_names_of_algorithms_stand_in_the_catalog_only() -> None:
    """Code that knows one, or a table by name elsewhere, would be an `if` in disguise."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        texts = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant)}
        if names := ALGORITHMS.keys() & texts:
            found[name_of(path)] = names
    assert found.pop("flower_blsgd.algorithm.catalog") == set(ALGORITHMS)
    assert found.pop("flower_blsgd.config") == {"recommended"}
    # The paper's reproductions are lists of algorithms.
    assert all(name.startswith("flower_blsgd.paper.") for name in found), found


def test_imports_load_neither_torch_nor_ray_nor_matplotlib() -> None:
    modules = ["flower_blsgd", "flower_blsgd.cli.experiments"]
    modules += ["clients.blsgd_client", "server.blsgd_server"]
    heavy = {"torch", "ray", "matplotlib", "sklearn", "torchvision"}
    code = (
        f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
        f"    print(name, *sorted({heavy} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == modules


def test_public_names_are_there() -> None:
    import flower_blsgd

    for name in flower_blsgd.__all__:
        assert getattr(flower_blsgd, name).__module__.startswith("flower_blsgd.")
    with pytest.raises(AttributeError, match="no_such_name"):
        flower_blsgd.no_such_name  # noqa: B018


OUR_OWN_PIPE = {
    "flower_blsgd.worker.loader",  # a DataLoader's processes
    *(
        f"flower_blsgd.engines.local.{name}"
        for name in (
            *("elsewhere", "fork_server", "grid", "shared_memory", "shipping", "worker_process"),
        )
    ),
}


RUNS_WHAT_IT_READS = {
    *(
        "torch.load",
        "torch.save",
        "torch.jit.load",
        "torch.hub.load",
        "torch.package.PackageImporter",
    ),
    *("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "pd.read_pickle"),
}


def test_nothing_is_unpickled_but_from_a_pipe_between_our_own_processes() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing"}
    for path in MODULES:
        found = forbidden & {name.split(".")[0] for name in imports_of(path)}
        assert not found or name_of(path) in OUR_OWN_PIPE, name_of(path)
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                weights = "weights_only=True" in map(ast.unparse, node.keywords)
                safe = called == "torch.load" and weights
                assert safe or called not in RUNS_WHAT_IT_READS, name_of(path)
                for name in ("allow_pickle", "trust_remote_code"):
                    given = [k.value for k in node.keywords if k.arg == name]
                    assert all(ast.unparse(value) == "False" for value in given), name_of(path)


# --- pyproject


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pyproject_defaults_are_those_of_the_run_config(pyproject: dict[str, Any]) -> None:
    written = pyproject["tool"]["flwr"]["app"]["config"]
    defaults = RunConfig().to_run_config()
    assert list(written.items()) == list(defaults.items())
    assert [type(value) for value in written.values()] == [
        type(value) for value in defaults.values()
    ]


@pytest.mark.parametrize(
    ("component", "kind"), [("serverapp", ServerApp), ("clientapp", ClientApp)]
)
def test_pyproject_components_load_as_flower_loads_them(
    pyproject: dict[str, Any], component: str, kind: type[Any]
) -> None:
    reference = pyproject["tool"]["flwr"]["app"]["components"][component]
    assert reference.split(".")[1].startswith("blsgd_")  # no other project's module has its name
    assert validate(reference, check_module=True, project_dir=ROOT) == (True, None)
    assert isinstance(load_app(reference, ImportError, ROOT), kind)


def test_flower_builds_a_bundle_without_tests_and_results() -> None:
    """As `flwr run` does first: it also refuses what this version of Flower does not accept."""
    names = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))).namelist()
    app = {"flower_blsgd", "clients", "server", "configs", "README.md", "LICENSE", "pyproject.toml"}
    assert {name.partition("/")[0] for name in names} == app | {".info"}


def test_pyproject_keeps_dev_tools_out_of_dependency_groups(pyproject: dict[str, Any]) -> None:
    assert "dependency-groups" not in pyproject
    assert {"simulation", "vision", "dev"} <= pyproject["project"]["optional-dependencies"].keys()
    assert "flwr>=1.41,<1.43" in pyproject["project"]["dependencies"]
