"""The server's average of the workers' models, against copying them.

Gigabytes per second: every model is read once, and one is written. The copy reads and writes every
model once, in memory of the same kind, with as many threads; its speed with one thread is shown as
well.
"Check and average" is what the server does with each reply before it counts, and then with all;
the bytes are those of the average alone, so what the check reads once more is its cost.
"Average, all weights differ" is the slowest case; elsewhere all workers but one have equal weights.
"Before" is the average as it was: one thread of numpy in float64.

The models lie in shared memory as on the local grid, each in one block: there its tensors are
averaged as one array. "Tensor by tensor" is the same average where they are not, as with models
from a network. The competitors take turns; the first turn is left out.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flower_blsgd.algorithm.averaging import LoadWeighting, weighted_average
from flower_blsgd.algorithm.tensor_sum import first_not_finite, num_threads, share, threads_for
from flower_blsgd.array_records import FlatTensors, Layout, flat_of, flat_record
from flower_blsgd.runtime.devices import format_bytes, free_bytes
from flower_blsgd.runtime.shared_memory import BufferPool
from flower_blsgd.strategy.aggregation import average_models

from .rows import Measured, Row, conditions, main, not_run, row, with_goal

PARAMETERS = {"0.27 M": 270_000, "11 M": 11_000_000, "36 M": 36_000_000, "86 M": 86_000_000}
TENSORS = {"0.27 M": 97, "11 M": 122, "36 M": 150, "86 M": 152}
"""As many floating ones as ResNet20, ResNet18, WRN28-10 and ViT-B/16 have."""
MODELS = (4, 10)
GOAL = 0.5

_COPY_BYTES = 1 << 20
"""That a thread copies at a time."""
_CACHE_BYTES = 1 << 28
_SPARE_BYTES = 1 << 30
_BEFORE_ELEMENTS = 1 << 16

Tensors = Mapping[str, npt.NDArray[Any]]
Whole = npt.NDArray[np.uint8]


class Model(NamedTuple):
    """A model in one block of memory: its tensors, and all of the block as bytes."""

    tensors: Tensors
    whole: Whole


def measure(quick: bool) -> Measured:
    """Measure cell after cell."""
    rows: list[Row] = []
    for name, count in product(list(PARAMETERS)[: 2 if quick else None], MODELS):
        label = f"{count} x {name}"
        needed = (count + 2) * 4 * PARAMETERS[name] + _SPARE_BYTES  # one for `before`
        free = free_bytes()
        if free is not None and needed > free:
            reason = f"needs {format_bytes(needed)}, free are {format_bytes(free)}"
            rows.append(not_run(f"average, {label}", reason, "GB/s"))
            continue
        rows += cell(label, PARAMETERS[name], TENSORS[name], count, 3.0 if quick else 20.0)
    return rows, conditions(threads=num_threads(), models="in shared memory, float32")


def cell(label: str, parameters: int, tensors: int, count: int, seconds: float) -> list[Row]:
    """Return the rows of so many models of a size."""
    sizes = sizes_of(parameters, tensors)
    blocks = [block(sizes, seed) for seed in range(count)]
    # As many as there are models, but for those that leave every cache by their size.
    targets = [
        block(sizes, count) for _ in range(max(1, min(count, _CACHE_BYTES // (4 * parameters))))
    ]
    models, out = [each.tensors for each in blocks], targets[0].tensors
    equal = LoadWeighting().weights([32.0] * (count - 1) + [1.0])
    different = LoadWeighting().weights([32.0 + place for place in range(count)])
    averaged_bytes, copied_bytes = (count + 1) * 4 * parameters, 2 * count * 4 * parameters
    threads = threads_for(averaged_bytes)
    competitors: dict[str, tuple[Callable[[], object], int]] = {
        "copy, 1 thread": (partial(copy, blocks, targets, 1), copied_bytes),
        f"copy, {threads} threads": (partial(copy, blocks, targets, threads), copied_bytes),
        "average": (partial(average_models, models, equal, out), averaged_bytes),
        "average, all weights differ": (
            partial(average_models, models, different, out),
            averaged_bytes,
        ),
        "average, tensor by tensor": (
            partial(weighted_average, models, equal, out),
            averaged_bytes,
        ),
        "check and average": (partial(check_and_average, models, equal, out), averaged_bytes),
        "before": (partial(before, models, equal, out), averaged_bytes),
    }
    if threads == 1:
        del competitors["copy, 1 threads"]
    speeds = turns(competitors, seconds)
    copied = "copy, 1 thread" if threads == 1 else f"copy, {threads} threads"
    rows = []
    for name, values in speeds.items():
        title, is_copy = f"{name}, {label}", name.startswith("copy")
        if is_copy:
            rows.append(row(title, values, "GB/s"))
            continue
        made = row(title, values, "GB/s", speeds[copied], copied)
        rows.append(with_goal(made, at_least=GOAL, of="ratio") if name == "average" else made)
        if name == "average":
            than = f"average, than before, {label}"
            rows.append(row(than, values, "GB/s", speeds["before"], "before"))
    return rows


def turns(
    competitors: Mapping[str, tuple[Callable[[], object], int]], seconds: float
) -> dict[str, list[float]]:
    """Return everybody's gigabytes per second, in turns for about so long."""
    speeds: dict[str, list[float]] = {name: [] for name in competitors}
    ends_at = time.perf_counter() + seconds
    for turn in range(300):
        if turn > 3 and time.perf_counter() > ends_at:
            break
        for name, (run, num_bytes) in competitors.items():
            began = time.perf_counter()
            run()
            speeds[name].append(num_bytes / (time.perf_counter() - began) / 1e9)
    return {name: values[1:] for name, values in speeds.items()}


def sizes_of(parameters: int, tensors: int) -> list[int]:
    """Return elements of each tensor: half of them small, as BatchNorm's and biases are."""
    small = [64] * (tensors // 2)
    large = tensors - len(small)
    rest = parameters - sum(small)
    bounds = [rest * place // large for place in range(large + 1)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return [size for pair in zip(sizes, [*small, 0], strict=False) for size in pair if size]


def block(sizes: Sequence[int], seed: int) -> Model:
    """Return a model in one block of shared memory."""
    layout = Layout.of((f"tensor-{i}", "float32", (size,)) for i, size in enumerate(sizes))
    record = flat_record(layout, new_memory=BufferPool().new_memory)
    flat = flat_of(record)
    assert flat is not None
    for run in flat.runs().values():
        run[:] = 1.0 + seed / 16
    return Model(FlatTensors(record, flat), flat.bytes)


def copy(models: Sequence[Model], targets: Sequence[Model], threads: int) -> None:
    """Copy every model over one of the targets in turn."""
    pairs = [
        (targets[place % len(targets)].whole, model.whole) for place, model in enumerate(models)
    ]
    if threads == 1:
        for target, source in pairs:
            np.copyto(target, source)
        return

    def work(pair_and_start: tuple[tuple[Whole, Whole], int]) -> None:
        (target, source), start = pair_and_start
        part = slice(start, start + _COPY_BYTES)
        np.copyto(target[part], source[part])

    share(product(pairs, range(0, models[0].whole.size, _COPY_BYTES)), work, threads)


def check_and_average(models: Sequence[Tensors], weights: Sequence[float], out: Tensors) -> None:
    """Do what the server does with the replies of a round."""
    for model in models:
        assert isinstance(model, FlatTensors)
        assert first_not_finite(model.flat.runs()) is None
    average_models(models, weights, out)


def before(models: Sequence[Tensors], weights: Sequence[float], out: Tensors) -> object:
    """Average as the library did: float64, one thread, new arrays."""
    first, *others = models
    found = {}
    for name in out:
        base_of, average = first[name], np.empty_like(first[name])
        difference = np.empty(min(base_of.size, _BEFORE_ELEMENTS))
        for start in range(0, base_of.size, _BEFORE_ELEMENTS):
            chunk = slice(start, start + _BEFORE_ELEMENTS)
            base = base_of[chunk].astype(np.float64)
            total = base.copy()
            part = difference[: base.size]
            for model, weight in zip(others, weights[1:], strict=True):
                np.subtract(model[name][chunk], base, out=part)
                part *= weight
                total += part
            average[chunk] = total
        found[name] = average
    return found


if __name__ == "__main__":
    main(measure, __doc__)
