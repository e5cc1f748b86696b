"""Write RESULTS2.md and its picture from the rows of the second study.

``python -m benchmarks.study.report``. All rows stay in the files. A row counts if it is the last of
its run that did not fail.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from .arms import FAST_ALONE, SHAPES
from .estimator import Curve, Interval, Speedup, Target, interval, speedup, total
from .runs import STEP_SECONDS, Row, Store, counting, is_due
from .stages import (
    FULL,
    GAPS,
    SCREENING_SEEDS,
    STAGES,
    TINY,
    TWO_DEVICES,
    Rows,
    Scale,
    fast_alone,
    read,
    screened,
    settings_found,
)

FOLDER = Path(__file__).parent
PICTURE = "speedup2.png"
IDEAS = (
    *("averaged-momentum", "short-rounds", "long-rounds", "one-round-late", "outer-rate"),
    *("small-batches", "shared-momentum"),
)

Lines = Iterable[str]


def page(rows: Rows, scale: Scale) -> str:
    """Return the whole page."""
    parts = [
        "# Results of the second study",
        "Written by `python -m benchmarks.study.report` from the rows in `rows2/`. The questions, "
        "rules and estimators: [PLAN2.md](PLAN2.md).",
        *_section("Screening", screening_lines(rows, scale)),
        *_section("Weights and sampling", pair_lines(rows["weights"])),
        *_section("Next ideas", idea_lines(rows)),
        *_section("Throughput", throughput_lines(rows["throughput"])),
        *_section("Confirmation", confirmation_lines(rows, scale)),
        *_section("Confirmation on the wall clock, computed", wall_lines(rows, scale)),
        *_section("Near convergence", near_lines(rows, scale)),
        *_section("Slow link", slow_link_lines(rows["slow-link"])),
        *_section("Rows", rows_lines(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Lines) -> list[str]:
    return [f"## {title}", "\n".join(lines) or "No rows yet."]


def _table(*titles: str) -> list[str]:
    return [_line(*titles), "|" + "---|" * len(titles)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def spread(found: Interval, times: float = 1.0, digits: int = 2) -> str:
    """Write a mean and its interval."""
    mean, low, high = (f"{times * v:.{digits}f}" for v in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if found.count > 1 else f"{mean} (n = 1)"


def sooner(found: Speedup) -> str:
    """Write a speed-up with its marks."""
    count = len(found.by_seed)
    if found.at_shortest == count:
        return f">= {min(found.by_seed):.2f} (all {count} seeds at the shortest budget)"
    marks = [
        f"{marked} of {count} {what}"
        for marked, what in (
            (found.at_shortest, "at the shortest budget"),
            (found.beyond_longest, "extrapolated"),
        )
        if marked
    ]
    return spread(found.factor) + (f" ({'; '.join(marks)})" if marks else "")


# --- screening


def screening_lines(rows: Rows, scale: Scale) -> Lines:
    """Yield the mean accuracy of each arm and setting, and the settings that were chosen."""
    done = counting(rows["screening"]).values()
    if not done:
        return
    accuracies: dict[tuple[str, str, str], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in done:
        accuracies[row["arm"], row["shape"], row["decay"]][row["rate"]].append(row["accuracy"])
    rates = sorted({row["rate"] for row in done})
    yield "Mean validation accuracy in %, over seeds; fewer than three seeds are marked with n."
    yield ""
    yield from _table("arm", "devices", "decay", *(f"rate {rate:g}" for rate in rates))
    for (arm, shape, decay), own in sorted(accuracies.items()):
        cells = []
        for rate in rates:
            few = f" (n = {len(own[rate])})" if len(own[rate]) < len(SCREENING_SEEDS) else ""
            cells.append(f"{100 * fmean(own[rate]):.2f}{few}" if own[rate] else "")
        yield _line(f"`{arm}`", shape or "fast alone", decay, *cells)
    yield ""
    found = settings_found(rows, scale)
    if len(found) < len(FAST_ALONE) + len(GAPS) * (len(TWO_DEVICES) + 1):
        yield "Screening is not complete."
        return
    named = [
        f"`{arm}`{' at ' + shape if shape else ''}: rate {rate:g}, {decay}"
        for (arm, shape), (rate, decay) in found.items()
    ]
    alone = fast_alone(rows, scale)
    yield f"Chosen: {'; '.join(named)}. Tuned fast device: `{alone[0] if alone else ''}`."
    yield from _screening_leads(rows, scale)


def _screening_leads(rows: Rows, scale: Scale) -> Lines:
    """Yield the lead of each arm over the tuned fast device in screening, as three seeds show."""
    found, done, alone = (
        settings_found(rows, scale),
        counting(rows["screening"]),
        fast_alone(rows, scale),
    )
    assert alone is not None
    yield ""
    yield "Lead over the tuned fast device, points, three seeds that also chose the settings:"
    for (arm, shape), (rate, decay) in found.items():
        if not shape:
            continue
        leads = []
        for seed in SCREENING_SEEDS:
            keys = [
                screened(arm, shape, scale)(rate, decay, seed).key,
                screened(alone[0], "", scale)(*alone[1], seed).key,
            ]
            if all(key in done for key in keys):
                leads.append(done[keys[0]]["accuracy"] - done[keys[1]]["accuracy"])
        if leads:
            yield f"`{arm}` at {shape} {100 * fmean(leads):+.2f};"


# --- pairs


def paired(rows: Sequence[Row], shape: str, arm: str, rival: str) -> dict[str, list[float]]:
    """Return the differences of the pairs, by outcome: accuracy, and test loss."""
    by_seed: dict[tuple[str, int], Row] = {
        (row["arm"], row["seed"]): row for row in rows if row["shape"] == shape
    }
    seeds = sorted(seed for name, seed in by_seed if name == arm and (rival, seed) in by_seed)
    return {
        key: [by_seed[arm, seed][key] - by_seed[rival, seed][key] for seed in seeds]
        for key in ("accuracy", "loss")
    }


def pair_lines(
    rows: Sequence[Row],
    pairs: Sequence[tuple[str, str]] = (("per-sample", "load"), ("separated", "per-sample")),
) -> Lines:
    """Yield the paired differences between arms."""
    done = [row for row in counting(rows).values() if row["seed"] not in SCREENING_SEEDS]
    if not done:
        return
    yield from _table(
        "devices", "arm", "against", "pairs", "accuracy, points [95 %]", "loss [95 %]", "ahead"
    )
    for shape in GAPS:
        for arm, rival in pairs:
            found = paired(done, shape, arm, rival)
            if not found["accuracy"]:
                continue
            ahead = sum(one > 0 for one in found["accuracy"])
            yield _line(
                shape,
                f"`{arm}`",
                f"`{rival}`",
                str(len(found["accuracy"])),
                spread(interval(found["accuracy"]), 100),
                spread(interval(found["loss"]), 1, 4),
                f"{ahead} of {len(found['accuracy'])}",
            )


def idea_lines(rows: Rows) -> Lines:
    """Yield the paired differences of the next ideas from per-sample weights."""
    if rows["ideas"]:
        both = [*rows["weights"], *rows["ideas"]]
        yield from pair_lines(both, [(name, "per-sample") for name in IDEAS])
        yield ""
        yield "`shared-momentum` was given up after two pairs at each gap."


# --- time to an accuracy


def compared(
    rows: Sequence[Row], arm: str, shape: str, rival: str, rival_shape: str
) -> tuple[Speedup, Interval] | None:
    """Return how much sooner an arm is, and its lead at its longest budget; None without rows."""
    ours: dict[int, list[tuple[float, float]]] = defaultdict(list)
    targets: dict[int, Target] = {}
    for row in rows:
        figures = row["training_seconds"], row["accuracy"]
        if (row["arm"], row["shape"]) == (arm, shape):
            ours[row["seed"]].append(figures)
        elif (row["arm"], row["shape"]) == (rival, rival_shape):
            targets[row["seed"]] = Target(*figures)
    longest = max((len(own) for own in ours.values()), default=0)
    seeds = [seed for seed, own in sorted(ours.items()) if len(own) == longest and seed in targets]
    if longest < 2 or not seeds:
        return None
    curves = [Curve(*map(tuple, zip(*sorted(ours[seed]), strict=True))) for seed in seeds]
    found = speedup(curves, [targets[seed] for seed in seeds])
    leads = [max(ours[seed])[1] - targets[seed].accuracy for seed in seeds]
    return found, interval(leads)


def confirmation_lines(rows: Rows, scale: Scale) -> Lines:
    """Yield the speed-ups and leads of per-sample weights, then all accuracies."""
    done, alone = list(counting(rows["confirmation"]).values()), fast_alone(rows, scale)
    if not done or alone is None:
        return
    if due := runs_due(rows, scale, "confirmation"):
        yield f"**Not complete: {due} runs are due. Until then, these figures decide nothing.**"
        yield ""
    yield from _table("gap", "against", "times sooner [95 %]", "by seed", "lead, points [95 %]")
    for shape in GAPS:
        for title, rival, rival_shape in (
            ("(a) tuned fast device", alone[0], ""),
            ("DDP in proportion", "ddp", shape),
        ):
            if found := compared(done, "per-sample", shape, rival, rival_shape):
                by_seed = ", ".join(f"{one:.2f}" for one in found[0].by_seed)
                gap = f"{SHAPES[shape].gap:g}"
                yield _line(gap, title, sooner(found[0]), by_seed, spread(found[1], 100))
    yield ""
    yield from accuracy_lines(done)


def runs_due(rows: Rows, scale: Scale, stage: str) -> int:
    """Return the number of runs of a stage that are still to be done."""
    return sum(is_due(run, rows[stage]) for run in STAGES[stage](rows, scale))


def accuracy_lines(rows: Sequence[Row]) -> Lines:
    """Yield the accuracy of each arm, rate and budget, over seeds."""
    found: dict[tuple[str, str, float, float], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["shape"], row["arm"], row["rate"], row["seconds"]].append(row)
    yield from _table(
        "devices", "arm", "rate", "seconds", "accuracy [95 %]", "samples", "fast waits"
    )
    for (shape, arm, rate, seconds), own in sorted(found.items()):
        accuracy = spread(interval([row["accuracy"] for row in own]), 100, 1)
        waits = [row["fast_waiting_share"] for row in own if "fast_waiting_share" in row]
        waiting = f"{100 * fmean(waits):.1f} %" if waits else ""
        samples = f"{fmean(row['samples'] for row in own):,.0f}"
        named = shape or "fast alone", f"`{arm}`", f"{rate:g}", f"{seconds:g}"
        yield _line(*named, accuracy, samples, waiting)


def near_lines(rows: Rows, scale: Scale) -> Lines:
    """Yield the comparison near convergence."""
    done, alone = list(counting(rows["near"]).values()), fast_alone(rows, scale)
    if not done or alone is None:
        return
    if found := compared(done, "per-sample", "gap-2", alone[0], ""):
        yield f"Times sooner than the tuned fast device: {sooner(found[0])}."
        yield ""
    yield from accuracy_lines(done)


def slow_link_lines(rows: Sequence[Row]) -> Lines:
    """Yield the link as measured, and the comparisons over it."""
    done = list(counting(rows).values())
    if not done:
        return
    trip = median(row["round_trip_ms"] for row in done)
    rate = median(row["megabits_per_second"] for row in done)
    yield f"Round trip {trip:.1f} ms, {rate:.0f} Mbit/s in a transfer of 32 MiB."
    for arm in ("ddp", "ddp-accumulate-4"):
        for each in sorted({row["rate"] for row in done if row["arm"] == arm}):
            own = [
                r for r in done if r["arm"] == "per-sample" or (r["arm"], r["rate"]) == (arm, each)
            ]
            if found := compared(own, "per-sample", "gap-2", arm, "gap-2"):
                yield f"Times sooner than `{arm}` at rate {each:g}: {sooner(found[0])}."
    yield ""
    yield from accuracy_lines(done)


# --- throughput


def throughput_shares(rows: Sequence[Row]) -> dict[tuple[str, str, bool], dict[int, float]]:
    """Return the samples per second, relative to the plain loop of the same block.

    The keys are devices, arm, and whether the slow core repeats its work. The plain loop next to a
    computing core has no devices.
    """
    done = [row for row in counting(rows).values() if "samples_per_second" in row]
    alone = {
        row["block"]: row["samples_per_second"]
        for row in done
        if row["arm"] == "fast-32" and not row["neighbor"]
    }
    found: dict[tuple[str, str, bool], dict[int, float]] = defaultdict(dict)
    for row in done:
        if row["block"] in alone and (row["shape"] or row["neighbor"]):
            key = row["shape"], row["arm"], row.get("repeat", False)
            found[key][row["block"]] = row["samples_per_second"] / alone[row["block"]]
    return found


def throughput_lines(rows: Sequence[Row]) -> Lines:
    """Yield the samples per second as shares of two ceilings."""
    shares = throughput_shares(rows)
    kept = median(found.values()) if (found := shares.pop(("", "fast-32", False), {})) else math.nan
    if shares:
        yield from _table(
            *("devices", "arm", "slow device", "of the ceiling, median [range]"),
            *("of the ceiling next to a computing core, median", "blocks"),
        )
    for (shape, arm, repeat), by_block in sorted(shares.items()):
        own = [share / (1 + 1 / SHAPES[shape].gap) for share in by_block.values()]
        said = f"{median(own):.3f} [{min(own):.3f}, {max(own):.3f}]"
        way = "repeats its work" if repeat else "waits"
        yield _line(shape, f"`{arm}`", way, said, f"{median(own) / kept:.2f}", str(len(own)))
    if not math.isnan(kept):
        if shares:
            yield ""
        yield f"The fast core next to a computing core keeps {kept:.3f} of its samples per second."


# --- the wall clock


def clock_ratios(rows: Rows, arm: str, shape: str) -> list[float]:
    """Return the logarithm of wall-clock over counted samples per second, for each block.

    Both are relative to the plain loop with batches of 32 on the same clock.
    """
    done = counting(rows["confirmation"]).values()
    own = [row for row in done if (row["arm"], row["shape"]) == (arm, shape)]
    longest = max((row["seconds"] for row in own), default=0.0)
    counted = [row["samples"] / row["training_seconds"] for row in own if row["seconds"] == longest]
    if not counted:
        return []
    alone = 32 / (STEP_SECONDS[0] + 32 * STEP_SECONDS[1])
    wall = throughput_shares(rows["throughput"]).get((shape, arm, True), {})
    return [math.log(share * alone / fmean(counted)) for share in wall.values()]


def converted(counted: Speedup, ratios: Sequence[float]) -> str:
    """Write a counted speed-up times these ratios, with its marks."""
    return sooner(replace(counted, factor=total(counted.logs, ratios).times))


def wall_lines(rows: Rows, scale: Scale) -> Lines:
    """Yield what the counted speed-ups are at the samples per second of the wall clock."""
    done, alone = list(counting(rows["confirmation"]).values()), fast_alone(rows, scale)
    lines = []
    for shape in GAPS:
        ours, ddp = (clock_ratios(rows, arm, shape) for arm in ("per-sample", "ddp"))
        over_fast = alone and compared(done, "per-sample", shape, alone[0], "")
        over_ddp = compared(done, "per-sample", shape, "ddp", shape)
        if not (over_fast and over_ddp and len(ours) > 1 and len(ddp) == len(ours)):
            continue
        to_ddp = [mine - theirs for mine, theirs in zip(ours, ddp, strict=True)]
        lines.append(
            _line(
                f"{SHAPES[shape].gap:g}",
                *(f"{math.exp(fmean(ratios)):.3f}" for ratios in (ours, ddp)),
                converted(over_fast[0], ours),
                sooner(over_fast[0]),
                converted(over_ddp[0], to_ddp),
            )
        )
    if not lines:
        return
    yield "The second and third columns are samples per second in `throughput` (where the slow"
    yield "core repeats its work) over those in `confirmation`, each relative to the plain loop"
    yield "with batches of 32. `throughput` has no plain loop with batches of 16, the tuned"
    yield "fast device: (a) is at its lower end if such batches cost that loop nothing on the"
    yield "wall clock, and at its upper end if they cost it as much as `per-sample`. No rule"
    yield "asked for this table."
    yield ""
    yield from _table(
        *("gap", "`per-sample`, wall over counted", "DDP, wall over counted"),
        *("(a), lower end [95 %]", "(a), upper end [95 %]", "times sooner than DDP [95 %]"),
    )
    yield from lines


def rows_lines(rows: Rows) -> Lines:
    """Yield the number of rows, and which of them failed or were repeated."""
    yield from _table("stage", "rows", "failed", "repeated", "commits")
    for stage, own in rows.items():
        counted = counting(own).values()
        failed = sum("error" in row for row in own)
        commits = ", ".join(sorted({str(row["commit"]) for row in own}))
        again = len(own) - failed - len(counted)
        yield _line(stage, *(str(n) for n in (len(own), failed, again)), commits)
    yield ""
    yield "The conditions of each call: [conditions.jsonl](rows2/conditions.jsonl)."


# --- the picture


def load_ceiling(gap: float) -> float:
    """Return the best speed-up with load weights, one fast and one slow device.

    >>> round(load_ceiling(2), 2)
    1.39
    """
    share = 1 / gap
    return float((1 + share**2) ** 2 / (1 + share**3))


def draw(rows: Rows, scale: Scale, path: Path) -> bool:
    """Draw the speed-up over the tuned fast device against the gap; return whether there is any."""
    from matplotlib.figure import Figure

    done, alone = list(counting(rows["confirmation"]).values()), fast_alone(rows, scale)
    points = []
    for shape in GAPS:
        if alone and (found := compared(done, "per-sample", shape, alone[0], "")):
            points.append((SHAPES[shape].gap, found[0].factor))
    if not points:
        return False
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    gaps = [1.5 + i / 10 for i in range(50)]
    axes.plot(gaps, [1 + 1 / gap for gap in gaps], "k--", label="ceiling, per-sample weights")
    axes.plot(gaps, [load_ceiling(gap) for gap in gaps], "k:", label="ceiling, load weights")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    x, y = [gap for gap, _ in points], [one.mean for _, one in points]
    low = [0.0 if math.isnan(one.low) else one.mean - one.low for _, one in points]
    high = [0.0 if math.isnan(one.high) else one.high - one.mean for _, one in points]
    axes.errorbar(x, y, (low, high), fmt="o", capsize=4, label="runs, per-sample weights")
    axes.set(xlabel="how many times slower the slow device is")
    axes.set(ylabel="times sooner at the same accuracy")
    axes.set_title(
        "A fast and a slow device, against the tuned fast one alone, counted clock",
        fontsize="medium",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the picture."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.study.report", description=__doc__)
    line.add_argument("--rows", type=Path, default=FOLDER / "rows2", help="folder of the rows")
    line.add_argument("--tiny", action="store_true", help="for rows that --tiny took")
    line.add_argument("--out", type=Path, default=FOLDER, help="where the page goes")
    given = line.parse_args(arguments)
    scale, rows = TINY if given.tiny else FULL, read(Store(given.rows))
    given.out.mkdir(parents=True, exist_ok=True)
    text = page(rows, scale)
    complete = not runs_due(rows, scale, "confirmation")
    if complete and draw(rows, scale, given.out / PICTURE):
        text = text.replace(
            "## Confirmation\n", f"## Confirmation\n\n![speed-up against the gap]({PICTURE})\n"
        )
    (given.out / "RESULTS2.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
