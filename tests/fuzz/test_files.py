"""Files that are damaged, or that somebody made up: refused in one line, or they make sense."""

import contextlib
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from flower_blsgd.api import load, read_config
from flower_blsgd.config import RunConfig
from flower_blsgd.data.cache import UnusableError, open_entry
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.comparison import read_run
from flower_blsgd.flower.app_folder import built_in_app, run_config
from flower_blsgd.tasks.digits import small_cnn

from ..data.test_cache import numbers
from ..experiments.made_runs import made_run
from .mutations import HUGE, changed_bytes, changed_json, thoroughly

APP = built_in_app()
DEFAULTS = RunConfig().to_run_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("fuzz")


def one_line(error: UsageError) -> None:
    assert "\n" not in str(error)


# --- settings ---------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "auto", "digits", "60%, 80%", "60%,, 1e9%", "nan%", "nan", "inf", "1e999"]
    ),
    st.sampled_from(["-5", "9" * 5000, "9" * 5000 + "%", ":" + "9" * 5000, "h:²", "h:٣", "a\nb"]),
    st.sampled_from(["\0", "a\udcffb", "x" * 5000, "../..", "\x1b[2J"]),
)
SETTINGS = st.one_of(
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from(HUGE),
    st.floats(),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, math.nan, math.inf, 1e308, 5e-324]),
    TEXTS,
)


CHANGES = st.dictionaries(
    st.sampled_from([*DEFAULTS, "epoch-s", "", "replicas", "a.b"]), SETTINGS, min_size=1, max_size=4
)


def check_config(config: RunConfig) -> None:
    """A run's settings can be written and read again, on the wire and in its folder."""
    values = config.to_run_config()
    assert RunConfig.from_run_config(tomllib.loads(tomli_w.dumps(values))) == config
    for value in values.values():
        assert type(value) in (bool, int, float, str)
        if isinstance(value, str):
            assert "\0" not in value.encode().decode()
        else:
            assert isinstance(value, float) or -(2**63) <= value < 2**63
            assert math.isfinite(value)


@thoroughly(10)
@given(CHANGES)
def test_settings(changes: dict[str, bool | int | float | str]) -> None:
    try:
        config = RunConfig.from_run_config(changes)
    except UsageError as error:
        one_line(error)
    else:
        check_config(config)


LINES = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.tuples(st.sampled_from([*DEFAULTS, "x", "[a]"]), st.text(max_size=8)).map("=".join),
        st.sampled_from(
            ["epochs = 3", "seed = 7", "[a", "x = [", "a.b.c = 1", "[[x]]", "d = 1979-05-27"]
        ),
        st.sampled_from(
            ["[" * 3000, "x = " + "[" * 3000, "a" + ".a" * 3000 + " = 1", "epochs = " + "9" * 5000]
        ),
        st.sampled_from(
            [
                'task = "\\u0000"',
                "learning-rate = inf",
                "epochs = true",
                "seed = 0x7fffffffffffffff",
            ]
        ),
    ),
    max_size=4,
).map("\n".join)


@thoroughly(3)
@given(
    st.one_of(
        LINES.map(lambda t: t.encode(errors="surrogateescape")),
        changed_bytes(tomli_w.dumps(DEFAULTS).encode()),
    )
)
def test_file_of_settings(folder: Path, raw: bytes) -> None:
    """Given with ``-c``, and as that of a run to be loaded."""
    file = folder / "config.toml"
    file.write_bytes(raw)
    for read in (
        lambda: RunConfig.from_run_config(run_config(APP, [str(file)], [])[0]),
        lambda: read_config(folder),
    ):
        try:
            check_config(read())
        except UsageError as error:
            one_line(error)


@thoroughly(5)
@given(st.sampled_from([*DEFAULTS, "x", ""]), st.text(max_size=8) | TEXTS | SETTINGS.map(str))
def test_setting_on_the_command_line(key: str, value: str) -> None:
    for source in (
        {"sources": [f"{key}={value}"], "settings": []},
        {"sources": [], "settings": [f"{key}={value}"]},
    ):
        try:
            config = RunConfig.from_run_config(run_config(APP, **source)[0])
        except UsageError:
            continue
        check_config(config)


# --- what a run left ---------------------------------------------------------------------------


KINDS = {name: (t.shape, t.dtype) for name, t in small_cnn().state_dict().items()}
MODEL = save({name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in KINDS.items()})
HEADER = 8 + int.from_bytes(MODEL[:8], "little")


@thoroughly(1)
@given(changed_bytes(MODEL[:HEADER]), st.sampled_from([None, 0, -1, 7]))
def test_saved_model(folder: Path, head: bytes, end: int | None) -> None:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(tomli_w.dumps(DEFAULTS))
    (run / "model.safetensors").write_bytes(head + MODEL[HEADER:][:end])
    try:
        model = load(run)
    except UsageError as error:
        one_line(error)
    else:
        assert {n: (t.shape, t.dtype) for n, t in model.state_dict().items()} == KINDS


@thoroughly(2)
@given(st.data())
def test_finished_run(folder: Path, data: st.DataObject) -> None:
    run = made_run(interrupted=False)
    rows = run.pop("rows")
    columns = ",".join(rows[0]).replace("value", "accuracy")
    files = {
        "summary.json": json.dumps(run),
        "config.toml": tomli_w.dumps(DEFAULTS),
        "epochs.csv": "\n".join([columns, *(",".join(map(str, row.values())) for row in rows)]),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    name = data.draw(st.sampled_from(sorted(files)))
    changes = changed_json if name.endswith("json") else changed_bytes_of
    (folder / name).write_bytes(data.draw(changes(files[name])))
    try:
        found = read_run(folder)
    except UsageError as error:
        one_line(error)
    else:
        assert found is None or all(row["epoch"] is None or row["epoch"] for row in found["rows"])


def changed_bytes_of(text: str) -> st.SearchStrategy[bytes]:
    return changed_bytes(text.encode())


@pytest.fixture(scope="module")
def entry(folder: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLSGD_CACHE", str(folder / "cache"))
        yield numbers().folder


@thoroughly(1)
@given(st.data())
def test_prepared_data(entry: Path, data: st.DataObject) -> None:
    files = {path: path.read_bytes() for path in sorted(entry.iterdir())}
    path = data.draw(st.sampled_from(sorted(files)))
    if path.suffix == ".json":
        raw = data.draw(changed_json(files[path].decode()))
    else:
        raw = data.draw(changed_bytes(files[path]))
    try:
        path.write_bytes(raw)
        with contextlib.suppress(UnusableError):
            open_entry(entry, content=True)
            assert path.suffix == ".json" or raw == files[path]
    finally:
        path.write_bytes(files[path])
