"""Finding a Flower app, and the order in which settings override each other."""

from pathlib import Path

import pytest

from flower_blsgd.app_folder import FlowerApp, built_in_app, find_app, read_app, run_config
from flower_blsgd.errors import UsageError

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


def refusal(app: FlowerApp, *sources: str, settings: tuple[str, ...] = ()) -> str:
    with pytest.raises(UsageError) as told:
        run_config(app, sources, settings)
    assert "\n" not in str(told.value)
    return str(told.value)


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
    ("text", "told"),
    [
        (None, "no pyproject.toml"),
        ("[project]\nname = 'x'\n", "tool.flwr.app.components"),
        ("[tool.flwr.app.components]\nserverapp = 'a:b'\n", "clientapp"),
        ("[tool.flwr\n", "not valid TOML"),
    ],
)
def test_read_app_refuses_what_is_no_app(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match=told) as refused:
        read_app(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_read_app_refuses_lists_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace('out = ""', "out = [1, 2]"))
    with pytest.raises(UsageError, match="out is a list"):
        read_app(tmp_path)


def test_find_app_current_folder_comes_before_the_built_in(
    app: FlowerApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(app.path)
    found, built_in = find_app(None)
    assert (found.name, built_in) == ("demo", False)


def test_find_app_built_in_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found, built_in = find_app(None)
    assert (found.name, built_in) == ("flower-blsgd", True)
    assert found.server_app == "server.blsgd_server:app"


def test_built_in_app_is_the_packed_one_where_there_is_one(
    app: FlowerApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel has it in a folder of the package; a source tree around the package."""
    from flower_blsgd import app_folder

    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(app_folder, "_PACKAGE", package)
    assert built_in_app().path == tmp_path.resolve()
    (package / "_app").mkdir()
    (package / "_app" / "pyproject.toml").write_text(PYPROJECT.replace("demo", "packed"))
    assert built_in_app().name == "packed"
    assert built_in_app().path == (package / "_app").resolve()


def test_find_app_a_python_project_that_is_no_flower_app_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'library'\n")
    monkeypatch.chdir(tmp_path)
    assert find_app(None)[1] is True


def test_find_app_by_path(app: FlowerApp) -> None:
    found, built_in = find_app(str(app.path))
    assert (found.name, built_in) == ("demo", False)
    with pytest.raises(UsageError, match="nowhere"):
        find_app("/nowhere")


# --- settings


def test_config_defaults_alone(app: FlowerApp) -> None:
    assert run_config(app, [], []) == (dict(app.config), "")


def test_config_later_sources_win_and_single_settings_last(app: FlowerApp, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("epochs = 7\nout = 'here'\n")
    config, name = run_config(
        app, ["short", str(file), "learning-rate=0.75"], ["epochs=9", "fast=false"]
    )
    assert config["epochs"] == 9
    assert config["learning-rate"] == 0.75
    assert config["out"] == "here"
    assert config["fast"] is False
    assert name == "mine"
    config, name = run_config(app, [str(file), "short"], [])
    assert (config["epochs"], config["out"], name) == (1, "here", "short")


def test_config_last_of_two_equal_settings_wins(app: FlowerApp) -> None:
    assert run_config(app, [], ["epochs=4", "epochs=5"])[0]["epochs"] == 5
    assert run_config(app, ["epochs=4", "epochs=5"], [])[0]["epochs"] == 5


def test_config_does_not_change_the_apps_defaults(app: FlowerApp) -> None:
    run_config(app, ["short"], ["epochs=9"])
    assert app.config["epochs"] == 3


def test_config_nested_tables_become_dotted_keys(app: FlowerApp, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[nested]\ndepth = 5\n")
    assert run_config(app, [str(file)], [])[0]["nested.depth"] == 5
    assert run_config(app, [], ["nested.depth=6"])[0]["nested.depth"] == 6


def test_config_several_pairs_in_one_argument(app: FlowerApp) -> None:
    text = "epochs=4 workers='1x cpu:0 fast; 1x cpu:0 slow steps=4' learning-rate=0.1"
    config, name = run_config(app, [text], [])
    assert config["epochs"] == 4
    assert config["workers"] == "1x cpu:0 fast; 1x cpu:0 slow steps=4"
    assert config["learning-rate"] == 0.1
    assert name == ""


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("epochs=5", "epochs", 5),
        ("epochs = 5", "epochs", 5),
        ("learning-rate=1e-3", "learning-rate", 0.001),
        ("learning-rate=nan", "learning-rate", "nan"),
        ("fast=false", "fast", False),
        ("out=5", "out", "5"),
        ("out=true", "out", "true"),
        ("out=a=b", "out", "a=b"),
        ('out="a b"', "out", "a b"),
        ("out='a b'", "out", "a b"),
        ("out=", "out", ""),
        ("workers=1x cpu:0 fast; 1x cpu:0 slow", "workers", "1x cpu:0 fast; 1x cpu:0 slow"),
        ("epochs=five", "epochs", "five"),
        ("epochs=1979-05-27", "epochs", "1979-05-27"),
    ],
)
def test_config_single_setting_is_read(
    app: FlowerApp, setting: str, key: str, value: object
) -> None:
    found = run_config(app, [], [setting])[0][key]
    if value == "nan":
        assert found != found
    else:
        assert found == value
        assert type(found) is type(value)


def test_config_unknown_key_is_refused_wherever_it_stands(app: FlowerApp, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("epocs = 7\n")
    lines = [
        refusal(app, str(file)),
        refusal(app, "epocs=7"),
        refusal(app, settings=("epocs=7",)),
    ]
    for line in lines:
        assert line == "epocs = 7: unknown key; did you mean epochs?"


def test_config_name_that_is_no_file_offers_the_nearest(app: FlowerApp) -> None:
    line = refusal(app, "shrt")
    assert "-c shrt" in line
    assert "did you mean short?" in line


def test_config_setting_without_a_value_is_refused_with_an_example(app: FlowerApp) -> None:
    line = refusal(app, settings=("epochs",))
    assert "-s epochs" in line
    assert "key=value" in line


def test_config_pairs_with_something_between_are_refused(app: FlowerApp) -> None:
    assert "key=value" in refusal(app, "workers=1x cpu:0 fast")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"epochs = \n", "not valid TOML"),
        (b"out = '\xff'\n", "not valid TOML"),
        (b"epochs = [1]\n", "epochs is a list"),
        (b"epochs = 1979-05-27\n", "epochs is a date"),
    ],
)
def test_config_file_that_cannot_be_used_is_refused_by_name(
    app: FlowerApp, tmp_path: Path, content: bytes, told: str
) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    line = refusal(app, str(file))
    assert told in line
    assert str(file) in line


def test_config_folder_in_place_of_a_file_is_refused(app: FlowerApp, tmp_path: Path) -> None:
    assert "neither a file" in refusal(app, str(tmp_path))


def test_config_every_file_of_the_built_in_app_names_known_keys_only() -> None:
    built_in, _ = find_app(str(Path(__file__).parents[1]))
    files = sorted((built_in.path / "configs").glob("*.toml"))
    assert files
    for file in files:
        config, name = run_config(built_in, [file.stem], [])
        assert name == file.stem
        assert config.keys() == built_in.config.keys()
