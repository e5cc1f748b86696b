"""The settings: every wrong key or value is refused in one line with the way out."""

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd import settings
from flower_blsgd.algorithm.catalog import (
    ALGORITHMS,
    RELEASED_SAMPLERS,
    SAMPLERS,
    STEPS,
    WEIGHTS,
)
from flower_blsgd.config import RunConfig, check_ranges
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks import TASK_OPTIONS
from scripts.write_defaults import write_defaults, write_settings

from .refusal import refusal


def refused(**settings: Any) -> str:
    """Return the one line that refuses these settings (keys in kebab-case, '_' for '-')."""
    values = {key.replace("_", "-"): value for key, value in settings.items()}
    return refusal(RunConfig.from_run_config, values)


def test_defaults_survive_the_run_config_whose_keys_are_in_kebab_case() -> None:
    config = RunConfig()
    values = config.to_run_config()
    assert RunConfig.from_run_config(values) == RunConfig.from_run_config({}) == config
    for key, value in values.items():
        assert key == key.lower()
        assert "_" not in key
        assert isinstance(value, bool | int | float | str)
    assert config.task_options == TASK_OPTIONS
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert hash(config) == hash(RunConfig())


# --- keys


@pytest.mark.parametrize(
    ("key", "offered"),
    [
        ("learning_rate", "did you mean learning-rate"),
        ("local-step-slow", "did you mean local-steps-slow"),
        ("zzz", "known: algorithm, average"),
    ],
)
def test_unknown_key_is_refused_and_the_nearest_offered(key: str, offered: str) -> None:
    line = refusal(RunConfig.from_run_config, {key: 1})
    assert line.startswith(f"{key} = 1")
    assert offered in line


def test_values_that_stand_for_a_number() -> None:
    config = RunConfig.from_run_config({"learning-rate": 1, "momentum": 0})
    assert isinstance(config.learning_rate, float)
    assert (config.learning_rate, config.momentum) == (1.0, 0.0)
    # A number is also the text of a command line where the default is a text.
    assert RunConfig(dropout="0.25").dropout == RunConfig(dropout=0.25).dropout == 0.25
    assert RunConfig(local_steps_slow="4").local_steps_slow == 4


# --- types and ranges


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("epochs", "three", "an integer"),
        ("epochs", True, "an integer"),
        ("learning_rate", [0.1], "a number"),
        ("nesterov", "true", "true or false"),
        ("task", 5, "a string"),
        ("local_steps_slow", 2.5, 'an integer or "auto"'),
        ("dropout", True, 'a number or "auto"'),
        ("high_loss_ratio", 1.5, "in [0, 1]"),
        ("high_loss_ratio", math.nan, "in [0, 1]"),
        ("epochs", 0, "at least 1"),
        ("batch_size", 1, "at least 2"),
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", math.inf, "above 0"),
        ("local_steps_fast", 0, "at least 1"),
        ("local_steps_fast", "many", 'empty, at least 1, or "auto"'),
        ("local_steps_slow", "9" * 30, 'at least 1, or "auto"'),
        ("dropout", 1.0, 'in [0, 1), or "auto"'),
        ("dropout", "some", 'in [0, 1), or "auto"'),
        ("split", "half", 'empty, "official" or "paper"'),
        ("max_tokens", 7, "at least 8"),
        ("validation_share", 1.0, "in [0, 1)"),
        ("steps", "by-turns", "empty, or one of system-aware, same, one, one-by-throughput"),
        ("sampler", "unifrom", "empty, or one of separated, unified, uniform, candidates, resh"),
        ("selection", "info", "one of infobatch, importance-sampling, active-bias"),
        ("name", "a/b", "letters, digits"),
        ("stream_address", ":" + "9" * 5000, '"HOST:PORT"'),
        ("data", "a\0b", "a string that can be written to a file"),
        ("out", "a\udcff", "a string that can be written to a file"),
    ],
)
def test_value_of_wrong_type_or_out_of_range_is_refused_by_key_value_and_rule(
    key: str, value: Any, rule: str
) -> None:
    line = refused(**{key: value})
    assert line.startswith(f"{key.replace('_', '-')} = {value!r} must be ")
    assert rule in line


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400])
def test_number_that_no_engine_can_pass_on_is_refused(value: int) -> None:
    """Also where a number is asked for that may have a fraction."""
    assert refused(seed=value) == "seed must be an integer below 2**63"
    assert refused(learning_rate=value) == "learning-rate must be a number below 2**63"


@pytest.mark.parametrize(
    ("key", "value", "offered"),
    [
        ("algorithm", "biased-sgd", "biased-local-sgd"),
        ("transport", "message", "did you mean messages?"),
        ("evaluate_on", "serve", "did you mean server?"),
    ],
)
def test_unknown_name_is_refused_and_the_nearest_offered(
    key: str, value: str, offered: str
) -> None:
    line = refused(**{key: value})
    assert line.startswith(f"{key.replace('_', '-')} = {value!r}")
    assert offered in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("high_loss_ratio", 0.0),
        ("batch_size", 2),
        ("local_steps_fast", "auto"),
        ("local_steps_slow", 1),
        ("validation_share", 0.0),
        ("name", "digits_2.b-1"),
    ],
)
def test_value_at_the_edge_is_accepted(key: str, value: Any) -> None:
    assert getattr(RunConfig(**{key: value}), key) == value


@pytest.mark.parametrize("text", ["sixty", "0%", "100%", "-5", "60%, inf", "nan"])
def test_decay_epochs_that_cannot_be_read_are_refused_with_an_example(text: str) -> None:
    line = refused(decay_epochs=text)
    assert line.startswith(f"decay-epochs = {text!r}")
    assert "60%, 80%" in line
    with pytest.raises(UsageError, match='wire-dtype = "float16" sends changes of models, not'):
        RunConfig(algorithm="dlb", wire_dtype="float16")
    coarse = {"wire_dtype": "float16", "momentum_buffers": "average"}
    for own in ({"optimizer": "adamw"}, {"task": "own.py"}):
        with pytest.raises(UsageError, match='"float16" is too coarse for the state of the opt'):
            RunConfig(**coarse, **own)  # type: ignore[arg-type]
    RunConfig(**coarse)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match='steps = "one-by-throughput" changes batch sizes'):
        RunConfig(task="own.py", average="gradients", steps="one-by-throughput")
    with pytest.raises(UsageError, match="nesterov = true requires momentum above 0"):
        RunConfig(nesterov=True, momentum=0.0)
    with pytest.raises(
        UsageError, match=r'"auto" cannot be combined with epoch = "table".*a number'
    ):
        RunConfig(local_steps_fast="auto", epoch="table")


def test_check_ranges_is_for_users_of_the_library() -> None:
    check_ranges(batch_size=2, epoch="table", deadline_seconds=0, clock="device")
    with pytest.raises(UsageError, match=r"^batch_size = 1 must be at least 2$"):
        check_ranges(epoch="table", batch_size=1)
    with pytest.raises(UsageError, match=r"^clock = 'walls' is not known; did you mean wall\?$"):
        check_ranges(clock="walls")


def test_every_path_has_the_home_folder_for_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("data", "model", "out", "resume"):
        config = RunConfig.from_run_config({key: "~/a b"})
        assert config.to_run_config()[key] == f"{tmp_path}/a b"
        line = refusal(RunConfig.from_run_config, {key: "~nobody-here/x"})
        assert line == f"{key} = '~nobody-here/x': no such home folder; or write ./~nobody-here/x"
        assert RunConfig.from_run_config({key: "./~x"}).to_run_config()[key] == "./~x"
    assert RunConfig(out="~").out == str(tmp_path)


def test_absolute_paths_are_those_of_what_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "resnet8").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for data, expected in (
        ("resnet8", f"{tmp_path}/here/resnet8"),
        ("../here", f"{tmp_path}/here/../here"),
        ("owner/name", "owner/name"),
        ("GTSRB:resnet8", f"GTSRB:{tmp_path}/here/resnet8"),
        ("GTSRB:/to/download", "GTSRB:/to/download"),
        ("", ""),
    ):
        assert RunConfig(data=data).with_absolute_paths() == RunConfig(data=expected)
    models = {"resnet8": "resnet8", "./resnet8": f"{tmp_path}/here/resnet8", "a/b": "a/b"}
    for model, expected in models.items():  # a built-in name is not a folder
        assert RunConfig(model=model).with_absolute_paths().model == expected


# --- what the settings make


def test_choices_are_those_of_the_preset_unless_a_part_is_given() -> None:
    for name, preset in ALGORITHMS.items():
        choices = RunConfig(algorithm=name).choices
        assert choices == preset
        assert choices.steps in STEPS
        assert choices.sampler in (*SAMPLERS, *RELEASED_SAMPLERS)
        assert choices.weights in WEIGHTS
    released = RunConfig(algorithm="biased-local-sgd-released").choices
    assert (released.epoch, released.high_loss_to) == ("table", "slow")
    own = {"epoch": "samples", "high_loss_to": "fast"}
    released = RunConfig(algorithm="biased-local-sgd-released", **own).choices  # type: ignore[arg-type]
    assert (released.epoch, released.high_loss_to) == ("samples", "fast")
    choices = RunConfig(algorithm="sync-sgd", sampler="separated", weights="load").choices
    assert (choices.steps, choices.sampler, choices.weights) == ("one", "separated", "load")


def test_learning_rate_schedule_reads_shares_epochs_and_warmup() -> None:
    rate = RunConfig(
        learning_rate=0.5, decay_epochs="50%, 7", warmup_epochs=2.0
    ).learning_rate_schedule
    assert rate.at(1, 0.0) == 0.25
    assert rate.at(3, 0.0) == 0.5
    assert rate.at(3, 0.5) == pytest.approx(0.05)
    assert rate.at(8, 0.9) == pytest.approx(0.005)
    assert (
        RunConfig(learning_rate=0.5, schedule="linear").learning_rate_schedule.at(8, 0.75) == 0.125
    )


def test_write_defaults_replaces_only_its_own_table(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    head = '[project]\nname = "x"  # a comment\n\n[tool.flwr.app.config]\n'
    tail = "\n[tool.ruff]\nline-length = 100\n"
    file.write_text(f"{head}old = 1\n{tail}")
    write_defaults(file)
    written = file.read_text()
    assert written.startswith(head)
    assert written.endswith(tail)
    config = tomllib.loads(written)["tool"]["flwr"]["app"]["config"]
    assert config == RunConfig().to_run_config()
    write_defaults(file)
    assert file.read_text() == written


def test_arguments_of_train_are_those_of_the_run_config(tmp_path: Path) -> None:
    write_settings(tmp_path / "settings.py")
    assert (tmp_path / "settings.py").read_text() == Path(settings.__file__).read_text(), (
        "run make format"
    )


OF_TASKS = {
    **{"task": "images", "data": "x", "model": "x", "validation_share": 0.5, "dropout": 0.5},
    **{"skip_bad": True, "split": "paper", "max_samples": 1, "image_size": 8, "max_tokens": 8},
    **{"lora_rank": 1, "pretrained": False, "micro_batch_size": 1, "loader_workers": 1},
    **{"learning_rate": 1.0, "schedule": "linear", "decay_epochs": "1", "warmup_epochs": 1.0},
    **{"optimizer": "adamw", "momentum": 0.5, "nesterov": True, "weight_decay": 0.0},
    **{"clip_norm": 1.0, "precision": "ieee", "channels_last": True, "compile": True},
    **{"trace": True, "selection": "infobatch"},
}


def test_settings_without_effect_on_a_script_are_refused_unless_a_run_is_resumed() -> None:
    for name, value in OF_TASKS.items():
        key = name.replace("_", "-")
        config = RunConfig(**{name: value})
        assert refusal(config.check_script).startswith(f"{key} = "), name
        dataclasses.replace(config, resume="runs/x").check_script()
    # Of the others, a script gets the effect.
    others = {"workers": "1x cpu", "batch_size": 32, "algorithm": "fednova", "momentum": 0.5}
    RunConfig(task="x.py", selection="active-bias", **others, samples=5, patience=2).check_script()  # type: ignore[arg-type]
