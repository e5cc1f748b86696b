"""Finding a Flower app, and the order in which settings override each other."""

import math
import re
from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.flower.app_folder import FlowerApp, built_in_app, find_app, read_app, run_config

PYPROJECT = """
[project]
name = "demo"

[tool.flwr.app.components]
serverapp = "demo.server:app"
clientapp = "demo.client:app"

[tool.flwr.app.config]
epochs = 3
learning-rate = 0.5
fast = true
out = ""
workers = "auto"

[tool.flwr.app.config.nested]
depth = 2
"""


@pytest.fixture
def app(tmp_path: Path) -> FlowerApp:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "short.toml").write_text("epochs = 1\nlearning-rate = 0.25\n")
    return read_app(tmp_path)


# --- apps


def test_read_app_takes_components_and_flat_defaults(app: FlowerApp, tmp_path: Path) -> None:
    assert app.path == tmp_path.resolve()
    assert app.name == "demo"
    assert (app.server_app, app.client_app) == ("demo.server:app", "demo.client:app")
    assert app.config == {
        "epochs": 3,
        "learning-rate": 0.5,
        "fast": True,
        "out": "",
        "workers": "auto",
        "nested.depth": 2,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no pyproject.toml"),
        ("[project]\nname = 'x'\n", "tool.flwr.app.components"),
        ("[tool.flwr.app.components]\nserverapp = 'a:b'\n", "clientapp"),
        ("[tool.flwr.app.components]\nserverapp = 'a:b'\nclientapp = 1\n", "clientapp"),
        ("tool = 1\n", r"tool of \[tool.flwr.app.components\] is not a table"),
        ("[tool.flwr\n", "not valid TOML"),
    ],
)
def test_read_app_refuses_what_is_no_app(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match=expected) as refused:
        read_app(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_find_app_by_path_or_here_or_the_built_in(
    app: FlowerApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(app.path)
    for path in (None, str(app.path)):
        found, built_in = find_app(path)
        assert (found.name, built_in) == ("demo", False)
    with pytest.raises(UsageError, match="nowhere"):
        find_app("/nowhere")
    (tmp_path / "empty").mkdir()
    library = tmp_path / "library"  # a Python project that is no Flower app is passed over
    library.mkdir()
    (library / "pyproject.toml").write_text("[project]\nname = 'library'\n")
    for folder in (tmp_path / "empty", library):
        monkeypatch.chdir(folder)
        found, built_in = find_app(None)
        assert (found.name, built_in) == ("flower-blsgd", True)
        assert found.server_app == "server.blsgd_server:app"


def test_built_in_app_is_the_packed_one_where_there_is_one(
    app: FlowerApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has it in a folder of the package; a source tree around the package."""
    from flower_blsgd.flower import app_folder

    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(app_folder, "_PACKAGE", package)
    assert built_in_app().path == tmp_path.resolve()
    (package / "_app").mkdir()
    (package / "_app" / "pyproject.toml").write_text(PYPROJECT.replace("demo", "packed"))
    assert built_in_app().name == "packed"
    assert built_in_app().path == (package / "_app").resolve()


# --- settings


def test_config_later_sources_win_and_single_settings_last(app: FlowerApp, tmp_path: Path) -> None:
    assert run_config(app, [], []) == (dict(app.config), "")
    file = tmp_path / "mine.toml"
    file.write_text("epochs = 7\nout = 'here'\n[nested]\ndepth = 5\n")
    config, name = run_config(
        app, ["short", str(file), "learning-rate=0.75"], ["epochs=9", "fast=false"]
    )
    assert (config["epochs"], config["learning-rate"], config["out"]) == (9, 0.75, "here")
    assert config["fast"] is False
    assert config["nested.depth"] == 5
    assert name == "mine"
    config, name = run_config(app, [str(file), "short"], [])
    assert (config["epochs"], config["out"], name) == (1, "here", "short")
    for sources, settings in (([], ["epochs=4", "epochs=5"]), (["epochs=4", "epochs=5"], [])):
        assert run_config(app, sources, settings)[0]["epochs"] == 5
    assert run_config(app, [], ["nested.depth=6"])[0]["nested.depth"] == 6
    assert app.config["epochs"] == 3  # the app's own defaults stay


def test_config_several_pairs_in_one_argument(app: FlowerApp) -> None:
    text = "epochs=4 workers='1x cpu:0 fast; 1x cpu:0 slow steps=4' learning-rate=0.1"
    config, name = run_config(app, [text], [])
    assert (config["epochs"], config["learning-rate"], name) == (4, 0.1, "")
    assert config["workers"] == "1x cpu:0 fast; 1x cpu:0 slow steps=4"
    long = "; ".join(["1x cpu:0 fast"] * 400)  # no file may have such a name
    assert run_config(app, [f"workers='{long}'"], [])[0]["workers"] == long


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("epochs = 5", "epochs", 5),
        ("learning-rate=1e-3", "learning-rate", 0.001),
        ("learning-rate=nan", "learning-rate", math.nan),
        ("fast=false", "fast", False),
        ("out=5", "out", "5"),
        ("out=a=b", "out", "a=b"),
        ('out="a b"', "out", "a b"),
        ("out=", "out", ""),
        ("workers=1x cpu:0 fast; 1x cpu:0 slow", "workers", "1x cpu:0 fast; 1x cpu:0 slow"),
        ("epochs=five", "epochs", "five"),
        *((f"epochs={text}", "epochs", text) for text in ("9" * 5000, "[" * 3000)),
    ],
)
def test_config_single_setting_is_read(
    app: FlowerApp, setting: str, key: str, value: object
) -> None:
    found = run_config(app, [], [setting])[0][key]
    assert (repr(found), type(found)) == (repr(value), type(value))


@pytest.mark.parametrize(
    ("sources", "settings", "line"),
    [
        (["mine.toml"], [], "epocs = 7: unknown key; did you mean epochs?"),
        (["epocs=7"], [], "epocs = 7: unknown key; did you mean epochs?"),
        ([], ["epocs=7"], "epocs = 7: unknown key; did you mean epochs?"),
        (["shrt"], [], "-c shrt: .*did you mean short?"),
        (["."], [], "-c .: neither a file"),
        ([], ["epochs"], "-s epochs: write key=value"),
        (["workers=1x cpu:0 fast"], [], "write key=value"),
        (["list.toml"], [], "list.toml: epochs is a list"),
        (["broken.toml"], [], "broken.toml is not valid TOML"),
        (["bytes.toml"], [], "bytes.toml is not valid TOML"),
        *(([f"{name}.toml"], [], f"{name}.toml is not valid TOML") for name in ("digits", "deep")),
        (["tables.toml"], [], "tables.toml: a.a.a.*is nested too deeply"),
    ],
)
def test_config_mistakes_are_refused_with_the_way_out(
    app: FlowerApp,
    monkeypatch: pytest.MonkeyPatch,
    sources: list[str],
    settings: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(app.path)
    Path("mine.toml").write_text("epocs = 7\n")
    Path("list.toml").write_text("epochs = [1]\n")
    Path("broken.toml").write_text("epochs = \n")
    Path("bytes.toml").write_bytes(b"out = '\xff'\n")
    Path("digits.toml").write_text("epochs = " + "9" * 5000)  # more than Python reads
    Path("deep.toml").write_text("epochs = " + "[" * 3000)
    Path("tables.toml").write_text("a" + ".a" * 3000 + " = 1")
    with pytest.raises(UsageError) as refused:
        run_config(app, sources, settings)
    assert re.search(line.replace("?", r"\?"), str(refused.value))
    assert "\n" not in str(refused.value)


def test_config_every_file_of_the_built_in_app_names_known_keys_only() -> None:
    built_in, _ = find_app(str(Path(__file__).parents[2]))
    files = sorted((built_in.path / "configs").glob("*.toml"))
    assert files
    for file in files:
        config, name = run_config(built_in, [file.stem], [])
        assert name == file.stem
        assert config.keys() == built_in.config.keys()
