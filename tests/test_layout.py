"""The house: who may import whom, and what an import must not load (DESIGN section 2)."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.object_ref import load_app, validate

from flower_blsgd.config import RunConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flower_blsgd"
APPS = ("clients", "server")
MODULES = sorted(path for part in ("flower_blsgd", *APPS) for path in (ROOT / part).rglob("*.py"))
LONGEST_MODULE = 300


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, module_level: bool = False) -> set[str]:
    """Return the absolute names of what a module imports, wherever in it the import stands.

    With `module_level` those inside functions and behind TYPE_CHECKING are left out.
    """
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    tree = ast.parse(path.read_text())
    nodes = _run_at_import(tree) if module_level else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_at_import(child)


def part_of(name: str) -> str:
    """Return the part of the house that a module of ours belongs to: ``"runtime"``, ``"cli"``."""
    words = name.split(".")
    return words[1] if words[0] == "flower_blsgd" and len(words) > 1 else words[0]


def parts_imported(path: Path) -> set[str]:
    ours = {name for name in imports_of(path) if name.split(".")[0] in ("flower_blsgd", *APPS)}
    return {part_of(name) for name in ours} - {part_of(name_of(path))}


def imports(path: Path, package: str, module_level: bool = False) -> bool:
    return any(name.split(".")[0] == package for name in imports_of(path, module_level))


def modules_in(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


# What the strategy is made of; DESIGN names the first file only.
STRATEGY = {
    "strategy",
    "strategy_checks",
    "aggregation",
    "rebalancing",
    "round_books",
    "slow_sums",
    "team",
    "planner",
    "roster",
    "model_check",
    "reply_check",
    "host_replies",
    "train_messages",
    "round_replies",
    "round_log",
    "training_loop",
    "profile_query",
    "speeds",
    "worker_evaluation",
}

ARROWS = {
    "errors": set(),
    "round_log": set(),
    "algorithm": set(),
    "array_view": set(),
    "flat_record": {"array_view"},
    "runtime": {"errors", "array_view", "flat_record"},
    "wire": set(),
    "quick_records": set(),
    "protocol": {"wire", "quick_records"},
    # A worker that adds up models does it with the server's own function: the bits agree.
    "worker": {"protocol", "runtime", "errors", "array_view", "flat_record", "algorithm"},
    "hub": set(),
    "data": {"errors", "hub"},
    "models": {"errors", "hub"},
    "tasks": {"algorithm", "worker", "data", "models", "errors"},
    "config": {"algorithm", "protocol", "errors", "tasks"},  # of tasks the names of options
    "supernode": {"errors", "runtime", "command_line"},
    # A host averages as the server does, and checks what it averages as the server would.
    "host": {
        "protocol",
        "runtime",
        "errors",
        "array_view",
        "flat_record",
        "algorithm",
        "model_check",
        "reply_check",
    },
    **{
        part: STRATEGY
        | {"algorithm", "protocol", "wire", "errors"}
        | {"array_view", "flat_record", "quick_records"}
        for part in STRATEGY - {"round_log"}
    },
}
"""What each part may import of the others; `errors` is below all."""


@pytest.mark.parametrize("part", ARROWS)
def test_arrows_point_one_way(part: str) -> None:
    for path in modules_in(part):
        assert parts_imported(path) <= ARROWS[part], name_of(path)


def test_arrows_are_seen_by_this_test() -> None:
    """A reader of imports that finds nothing would hold every rule."""
    assert {"strategy", "results", "tasks", "runtime", "worker"} <= parts_imported(
        PACKAGE / "run.py"
    )
    assert parts_imported(PACKAGE / "runtime" / "devices.py") == {"errors"}
    assert "torch" in imports_of(PACKAGE / "worker" / "local_sgd.py")
    client = ROOT / "clients" / "blsgd_client.py"
    assert "flower_blsgd.tasks.load_task" in imports_of(client)
    assert "flower_blsgd.tasks.load_task" not in imports_of(client, module_level=True)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_library_never_imports_the_apps(path: Path) -> None:
    if part_of(name_of(path)) not in APPS:
        assert not any(imports(path, app) for app in APPS)


def test_algorithm_knows_no_flower_no_process_and_no_clock() -> None:
    for path in modules_in("algorithm"):
        for package in ("flwr", "time", "datetime", "subprocess", "threading", "multiprocessing"):
            assert not imports(path, package), (name_of(path), package)


def test_worker_takes_of_the_algorithm_only_the_average_that_the_server_takes() -> None:
    for path in modules_in("worker"):
        found = {name for name in imports_of(path) if part_of(name) == "algorithm"}
        allowed = {"flower_blsgd.algorithm.averaging.weighted_average"}
        assert found <= (allowed if path.stem == "summing" else set()), name_of(path)
    assert "flower_blsgd.algorithm.averaging.weighted_average" in imports_of(
        PACKAGE / "slow_sums.py"
    )


def ours_imported(path: Path) -> set[str]:
    """Return the modules of ours that a module takes something from."""
    known = {name_of(module) for module in MODULES}
    found = imports_of(path)
    return {name for name in known if any(f == name or f.startswith(f"{name}.") for f in found)} - {
        "flower_blsgd"
    }


def test_cost_model_is_pure() -> None:
    path = PACKAGE / "experiments" / "cost_model.py"
    assert parts_imported(path) == {"algorithm"}
    assert all(part_of(name) == "algorithm" for name in ours_imported(path))
    for package in ("flwr", "torch", "time", "datetime", "subprocess", "threading"):
        assert not imports(path, package), package


# Experiments are made of runs and their results, which know none of them; but a run says what it
# expects, and takes speeds that were measured before.
OF_EXPERIMENTS: dict[str, set[str]] = {
    "results": set(),
    "run": {"run_prediction", "speed_profile"},
    "experiments.run_prediction": {"cost_model"},
    "experiments.speed_profile": set(),
}


@pytest.mark.parametrize("part", OF_EXPERIMENTS)
def test_run_takes_of_the_experiments_only_speeds_and_what_to_expect(part: str) -> None:
    whole = "flower_blsgd.experiments"
    for path in modules_in(part.replace(".", "/")):
        found = {name for name in ours_imported(path) if part_of(name) == "experiments"}
        allowed = {f"{whole}.{name}" for name in OF_EXPERIMENTS[part]}
        assert found - {whole} <= allowed, name_of(path)


def test_apps_import_what_the_design_names() -> None:
    client = parts_imported(ROOT / "clients" / "blsgd_client.py")
    assert client <= {"worker", "protocol", "tasks", "runtime", "config", "host"}
    server = parts_imported(ROOT / "server" / "blsgd_server.py")
    assert server <= {"strategy", "runtime", "tasks", "checkpoint", "config", "run"}


@pytest.mark.parametrize("package", ["torch", "torchvision", "ray", "matplotlib", "sklearn"])
def test_apps_import_nothing_heavy_at_module_level(package: str) -> None:
    for app in APPS:
        for path in (ROOT / app).rglob("*.py"):
            assert not imports(path, package, module_level=True), name_of(path)


@pytest.mark.parametrize("app", APPS)
def test_apps_have_a_docstring_only_init(app: str) -> None:
    (statement,) = ast.parse((ROOT / app / "__init__.py").read_text()).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize(
    "module", ["flower_blsgd", "clients.blsgd_client", "server.blsgd_server", "flower_blsgd.cli"]
)
def test_import_loads_neither_torch_nor_ray_nor_matplotlib(module: str) -> None:
    heavy = ("torch", "ray", "matplotlib", "sklearn", "torchvision")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules], end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]"


def test_public_names_are_there() -> None:
    import flower_blsgd

    for name in flower_blsgd.__all__:
        assert getattr(flower_blsgd, name).__module__.startswith("flower_blsgd.")
    with pytest.raises(AttributeError, match="no_such_name"):
        flower_blsgd.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_is_not_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_MODULE


OUR_OWN_PIPE = {f"flower_blsgd.runtime.{name}" for name in ("channel", "shared_arrays", "shipping")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_unpickles_nothing(path: Path) -> None:
    """Only a pipe between our own processes may carry pickles."""
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing"}
    found = {name for name in imports_of(path) if name.split(".")[0] in forbidden}
    if name_of(path) not in OUR_OWN_PIPE:
        assert not found
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "torch.save"), ast.unparse(node)
            assert "allow_pickle=True" not in ast.unparse(node)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_prints_only_in_the_command_line(path: Path) -> None:
    if name_of(path) != "flower_blsgd.cli":
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [node for node in calls if ast.unparse(node.func) == "print"]


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
    assert validate(reference, check_module=True, project_dir=ROOT) == (True, None)
    assert isinstance(load_app(reference, ImportError, ROOT), kind)


def test_pyproject_module_names_of_the_apps_are_unique(pyproject: dict[str, Any]) -> None:
    components = pyproject["tool"]["flwr"]["app"]["components"]
    assert components == {
        "serverapp": "server.blsgd_server:app",
        "clientapp": "clients.blsgd_client:app",
    }


def test_pyproject_every_bundle_pattern_matches_a_file(pyproject: dict[str, Any]) -> None:
    for pattern in pyproject["tool"]["flwr"]["app"]["fab-include"]:
        assert any(path.is_file() for path in ROOT.glob(pattern.lstrip("/"))), pattern


def test_pyproject_bundle_holds_neither_tests_nor_results(pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["flwr"]["app"]["fab-include"]
    bundled = {
        path.relative_to(ROOT).parts[0] for p in patterns for path in ROOT.glob(p.lstrip("/"))
    }
    assert bundled == {"flower_blsgd", "clients", "server", "configs", "README.md", "LICENSE"}


def test_pyproject_keeps_dev_tools_out_of_dependency_groups(pyproject: dict[str, Any]) -> None:
    assert "dependency-groups" not in pyproject
    assert {"simulation", "vision", "dev"} <= pyproject["project"]["optional-dependencies"].keys()
    assert "flwr>=1.41,<1.43" in pyproject["project"]["dependencies"]


def test_pyproject_command_can_be_called(pyproject: dict[str, Any]) -> None:
    module, _, function = pyproject["project"]["scripts"]["blsgd"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
