import ast
import dataclasses
from pathlib import Path

import pytest

import flower_blsgd
from flower_blsgd.algorithm.averaging import NormalizedWeighting
from flower_blsgd.algorithm.catalog import (
    ALGORITHMS,
    SAMPLERS,
    STEPS,
    TRAIN_ON,
    WEIGHTS,
    Choices,
    PartSettings,
)
from flower_blsgd.algorithm.local_steps import (
    Participant,
    SameSteps,
    SystemAwareSteps,
    batch_sizes_of,
)
from flower_blsgd.algorithm.sampling import SeparatedSampler, UnifiedSampler, UniformSampler
from flower_blsgd.config import RunConfig

_WORKERS = [
    Participant(True, 32, speed_ratio=1.0),
    Participant(False, 32, speed_ratio=0.5),
    Participant(False, 32, speed_ratio=0.5, given_steps=5),  # steps= in the specification
]
_SYSTEM_AWARE = [32, 8, 5]
_SAME = [32, 32, 32]
_ONE = [1, 1, 1]

_B = [32, 32, 32]
_BY_THROUGHPUT = [48, 24, 24]  # 96 in the proportion 1 : 0.5 : 0.5

_LOADS = [3.0, 1.0, 0.0]
_BY_LOAD = [0.75, 0.25, 0.0]
_EQUAL = [0.5, 0.5, 0.0]

_ALL, _FAST = [True, True], [True, False]

# ALGORITHM.md, section 4: name, what its steps and its batches are, its sampler, what its weights
# are, who trains, and what becomes of momentum
_ROWS = [
    ("biased-local-sgd", _SYSTEM_AWARE, _B, SeparatedSampler, _BY_LOAD, _ALL, "keep"),
    ("unbiased-local-sgd", _SYSTEM_AWARE, _B, UniformSampler, _EQUAL, _ALL, "keep"),
    ("weighted-local-sgd", _SYSTEM_AWARE, _B, UniformSampler, _BY_LOAD, _ALL, "keep"),
    ("sampled-local-sgd", _SYSTEM_AWARE, _B, SeparatedSampler, _EQUAL, _ALL, "keep"),
    ("balanced-local-sgd", _SAME, _B, UniformSampler, _EQUAL, _ALL, "keep"),
    ("fast-only-local-sgd", _SAME, _B, UniformSampler, _EQUAL, _FAST, "keep"),
    ("sync-sgd", _ONE, _B, UniformSampler, _EQUAL, _ALL, "keep"),
    ("sync-sgd-fast-only", _ONE, _B, UniformSampler, _EQUAL, _FAST, "keep"),
    ("byteps", _ONE, _B, UniformSampler, _EQUAL, _FAST, "keep"),
    ("dlb", _ONE, _BY_THROUGHPUT, UniformSampler, _BY_LOAD, _ALL, "average"),
    ("fednova", _SYSTEM_AWARE, _B, UniformSampler, _EQUAL, _ALL, "reset"),
]

_SETTINGS = PartSettings(32, 8)


@pytest.mark.parametrize(
    ("name", "steps", "batches", "sampler", "weights", "trains", "momentum"),
    _ROWS,
    ids=[row[0] for row in _ROWS],
)
def test_algorithm_row_is_that_of_the_specification(
    name: str,
    steps: list[int],
    batches: list[int],
    sampler: type,
    weights: list[float],
    trains: list[bool],
    momentum: str,
) -> None:
    row = ALGORITHMS[name]
    policy = STEPS[row.steps](_SETTINGS)
    assert policy.local_steps(_WORKERS) == steps
    assert batch_sizes_of(policy, _WORKERS) == batches
    assert type(SAMPLERS[row.sampler](_SETTINGS)) is sampler
    assert WEIGHTS[row.weights](_SETTINGS).weights(_LOADS) == pytest.approx(weights)
    train_on = TRAIN_ON[row.train_on](_SETTINGS)
    assert [train_on.trains(worker) for worker in _WORKERS[:2]] == trains
    assert row.momentum_buffers == momentum


def test_algorithms_are_the_eleven_of_the_specification() -> None:
    assert list(ALGORITHMS) == [row[0] for row in _ROWS]


def test_only_byteps_lets_slow_workers_sum_and_only_fednova_normalizes() -> None:
    summing = [n for n, row in ALGORITHMS.items() if TRAIN_ON[row.train_on](_SETTINGS).slow_sums]
    assert summing == ["byteps"]
    weightings = {n: WEIGHTS[row.weights](_SETTINGS) for n, row in ALGORITHMS.items()}
    normalizing = [n for n, w in weightings.items() if hasattr(w, "update_scales")]
    assert normalizing == ["fednova"]
    following = [
        n
        for n, row in ALGORITHMS.items()
        if getattr(STEPS[row.steps](_SETTINGS), "follows_speeds", False)
    ]
    assert following == ["dlb"]


def test_algorithms_every_choice_of_every_row_can_be_built() -> None:
    for row in ALGORITHMS.values():
        assert row.steps in STEPS
        assert row.sampler in SAMPLERS
        assert row.weights in WEIGHTS
        assert row.train_on in TRAIN_ON


def test_algorithms_no_two_rows_are_the_same() -> None:
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_part_of_every_row_can_be_overridden(name: str) -> None:
    parts = {
        "steps": STEPS,
        "sampler": SAMPLERS,
        "weights": WEIGHTS,
        "train_on": TRAIN_ON,
        "momentum_buffers": ("keep", "reset", "average"),
    }
    assert set(parts) == {field.name for field in dataclasses.fields(Choices)}
    for part, known in parts.items():
        for value in known:
            chosen = RunConfig(algorithm=name, **{part: value}).choices
            assert chosen == dataclasses.replace(ALGORITHMS[name], **{part: value})


def test_samplers_take_the_high_loss_ratio_and_the_tier() -> None:
    settings = PartSettings(high_loss_ratio=0.25, high_loss_to="slow")
    assert SAMPLERS["separated"](settings) == SeparatedSampler(0.25, "slow")
    assert SAMPLERS["unified"](settings) == UnifiedSampler(0.25, "slow")
    assert SAMPLERS["separated"](PartSettings()) == SeparatedSampler(0.5, "fast")


@pytest.mark.parametrize("sampler", ["separated", "unified"])
def test_samplers_high_loss_ratio_out_of_range_refused(sampler: str) -> None:
    with pytest.raises(ValueError, match="high_loss_ratio"):
        SAMPLERS[sampler](PartSettings(high_loss_ratio=1.5))
    with pytest.raises(ValueError, match="high_loss_to"):
        SAMPLERS[sampler](PartSettings(high_loss_to="both"))  # type: ignore[arg-type]


def test_weights_normalized_takes_the_optimizer_of_the_local_steps() -> None:
    settings = PartSettings(momentum=0.5, nesterov=True)
    assert WEIGHTS["normalized"](settings) == NormalizedWeighting(0.5, True)


def test_steps_slow_from_the_speed_when_no_number_is_given() -> None:
    workers = [Participant(True, 32), Participant(False, 32, speed_ratio=0.5)]
    assert STEPS["system-aware"](PartSettings(32, None)).local_steps(workers) == [32, 16]


def test_steps_are_built_from_the_settings() -> None:
    settings = PartSettings(16, None, shrink_slow_batch=False)
    assert STEPS["system-aware"](settings) == SystemAwareSteps(16, None, False)
    assert STEPS["same"](settings) == SameSteps(16)
    assert STEPS["one"](settings) == SameSteps(1)
    # gamma tau_fast = 0.16 is too slow for a step: a batch of 0.16 x 32 = 5.12 only if allowed
    slow = [Participant(True, 32, 1.0), Participant(False, 32, 0.01)]
    for policy in ("system-aware", "by-speed"):
        for shrink, batch in ((False, 32), (True, 5)):
            built = STEPS[policy](dataclasses.replace(settings, shrink_slow_batch=shrink))
            assert batch_sizes_of(built, slow) == [32, batch]


PACKAGE = Path(flower_blsgd.__file__).parent


def _comparisons_with_a_name(tree: ast.AST) -> list[int]:
    """Return the lines where code asks which algorithm it is."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        else:
            continue
        for side in asked:
            for part in ast.walk(side):
                if isinstance(part, ast.Constant) and part.value in ALGORITHMS:
                    lines.append(part.lineno)
    return lines


def test_names_of_algorithms_are_asked_for_nowhere_in_the_package() -> None:
    folders = [PACKAGE, *(PACKAGE.parent / app for app in ("clients", "server"))]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 50
    for file in files:
        assert not _comparisons_with_a_name(ast.parse(file.read_text())), file
    # A reader that finds nothing would hold the rule.
    for code in ('x.algorithm == "dlb"', 'x in ("byteps", "sync-sgd")'):
        assert _comparisons_with_a_name(ast.parse(code))


def test_names_of_algorithms_stand_in_code_in_the_catalog_and_as_defaults_only() -> None:
    """As whole texts, and outside docstrings: a table by name would be an `if` in disguise."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        names = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in ALGORITHMS
        }
        if names:
            found[file.relative_to(PACKAGE).as_posix()] = names
    assert found.pop("algorithm/catalog.py") == set(ALGORITHMS)
    assert found.pop("config.py") == {"biased-local-sgd"}
    # What is compared by default, which algorithms are the paper's: lists, in experiments only.
    assert all(name.startswith("experiments/") for name in found), found
