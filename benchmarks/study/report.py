"""Writes RESULTS.md and its picture from the rows of the study.

``python -m benchmarks.study.report``. All rows stay; a row counts if it is the last of its run that
did not fail. Those that count although the probe moved are counted.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from .arms import ADD_ONS, TUNED
from .estimator import Curve, Interval, Speedup, Target, interval, speedup
from .runs import Row, Store, counting
from .stages import (
    FULL,
    GAPS,
    TINY,
    WITHOUT_LOSS,
    Choice,
    Rows,
    Scale,
    Screening,
    choice,
    proportional,
    read,
    step_seconds,
)

FOLDER = Path(__file__).parent
PICTURE = "speedup.png"

Lines = Iterable[str]


def page(rows: Rows, scale: Scale) -> str:
    """Return the whole page."""
    made = choice(rows, scale)
    parts = [
        "# Results of the study",
        "Written by `python -m benchmarks.study.report` from the rows in `rows/`. What was asked, "
        "and how it is computed: [PLAN.md](PLAN.md).",
        *_section("Throughput", throughput_lines(rows["throughput"])),
        *_section("Screening", screening_lines(rows["screening"], scale, made)),
    ]
    if made and (confirmed := list(counting(rows["confirmation"]).values())):
        ours = {gap: made.confirmed(gap) for gap in GAPS}
        parts += _section("Confirmation", confirmation_lines(confirmed, made, ours))
    if made and (confirmed := list(counting(rows["confirmation-auto"]).values())):
        ours = dict.fromkeys(GAPS, made.ships)
        lines = confirmation_lines(confirmed, made, ours)
        parts += _section("Confirmation of what ships", lines)
    if made and rows["confirmation"]:
        parts.append(f"![speed-up against the gap]({PICTURE})")
    if made and (paired := list(counting(rows["by-loss"]).values())):
        parts += _section(
            "With and without choosing samples by loss",
            lead_lines(paired, made.ships, [WITHOUT_LOSS]),
        )
    if made and (long := list(counting(rows["long"]).values())):
        rivals = [made.fast_alone, "ddp-proportional"]
        parts += _section("Long runs", lead_lines(long, made.ships, rivals))
    if made and (slow := list(counting(rows["slow-link"]).values())):
        parts += _section("Slow link", slow_link_lines(slow, made))
    for stage, title in (("noise", "Label noise"), ("ag-news", "AG News")):
        if found := list(counting(rows[stage]).values()):
            parts += _section(title, by_task_lines(found))
    parts += _section("Rows", rows_lines(rows))
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Lines) -> list[str]:
    return [f"## {title}", "\n".join(lines) or "No rows yet."]


def _table(*titles: str) -> list[str]:
    return [_line(*titles), "|" + "---|" * len(titles)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def percent(value: float) -> str:
    """Write a share.

    >>> percent(0.6789)
    '67.9'
    """
    return f"{100 * value:.1f}"


def spread(found: Interval, times: float = 1.0, digits: int = 2) -> str:
    """Write a mean and its interval."""
    mean, low, high = (f"{times * v:.{digits}f}" for v in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]" if found.count > 1 else f"{mean} (n = 1)"


# --- throughput


def throughput_lines(rows: Sequence[Row]) -> Lines:
    """Yield each gap's contenders as shares of the ceiling of their own block."""
    done = [row for row in counting(rows).values() if "samples_per_second" in row]
    speeds = {(row["arm"], row["gap"], row["block"]): row["samples_per_second"] for row in done}
    if not done:
        return
    yield from _table("gap", "arm", "samples/s, median", "of the ceiling, [range]", "goal")
    for gap in GAPS:
        for arm in ("bare", "ddp-equal", proportional(gap), "biased"):
            blocks = [b for (a, g, b) in speeds if (a, g) == (arm, gap)]
            own = [speeds[arm, gap, b] for b in blocks]
            shares = [
                speeds[arm, gap, b] / (speeds["bare", gap, b] * (1 + 1 / gap))
                for b in blocks
                if ("bare", gap, b) in speeds
            ]
            if not shares:
                continue
            share = median(shares)
            goal = (f">= 0.95: {_met(share >= 0.95)}") if arm == "biased" else ""
            said = f"{share:.3f} [{min(shares):.3f}, {max(shares):.3f}], n = {len(shares)}"
            yield _line(f"{gap:g}", arm, f"{median(own):.0f}", said, goal)
    both = [
        speeds["biased", 4.0, b] / speeds["ddp-equal", 4.0, b]
        for (arm, gap, b) in speeds
        if (arm, gap) == ("biased", 4.0) and ("ddp-equal", 4.0, b) in speeds
    ]
    yield ""
    if both:
        share = median(both) / 2.5
        yield f"Gap 4, ours over `ddp-equal`: {median(both):.3f} times, {share:.3f} of 2.5 "
        yield f"(goal >= 0.95: {_met(share >= 0.95)})."
    beside = [r["samples_per_second"] for r in done if r["neighbour"]]
    alone = [
        r["samples_per_second"]
        for r in done
        if (r["arm"], r["gap"]) == ("bare", 1.0) and not r["neighbour"]
    ]
    if beside and alone:
        share = median(beside) / median(alone)
        yield f"The fast core beside a computing neighbour: {share:.3f} of the samples per second "
        yield "beside a sleeping one."
    constant, per_sample = step_seconds(rows)
    yield f"Seconds of a step of the bare loop: {constant:.4g} + {per_sample:.4g} x batch."


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


# --- screening


def screening_lines(rows: Sequence[Row], scale: Scale, made: Choice | None) -> Lines:
    """Yield the grids, the add-ons against their base, and the choice."""
    done = counting(rows)
    accuracies: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(done.values(), key=lambda row: int(row["seed"])):
        if row["gap"] == 2:
            accuracies[row["arm"]][row["rate"]].append(row["accuracy"])
    if not done:
        return
    rates = sorted({rate for name in TUNED for rate in accuracies.get(name, ())})
    yield from _table("arm", *(f"rate {rate:g}" for rate in rates))
    for name in TUNED:
        if name in accuracies:
            own = accuracies[name]
            yield _line(name, *(percent(own[r][0]) if r in own else "" for r in rates))
    yield ""
    added = [name for name in accuracies if "+" in name]
    if added:
        yield from _table("arm", "rate", "accuracy by seed", "against its base, seed 0, points")
    for name in added:
        base, first = name.partition("+")[0], name.split("+")[1]
        for rate, own in sorted(accuracies[name].items()):
            its = accuracies[base].get(rate)
            gain = f"{100 * (own[0] - its[0]):+.1f}" if its else ""
            yield _line(name, f"{rate:g}", ", ".join(map(percent, own)), gain)
        assert first in ADD_ONS
    yield ""
    if made is None:
        missing = len(Screening(rows, scale).runs)
        yield f"Not over: {len(done)} rows of the {missing} or more that are known to be needed."
        return
    yield f"Chosen: ours = `{made.ours}` at rate {made.ours_rate:g} (gap 16: `{made.ours_at_16}`); "
    yield f"fast alone = `{made.fast_alone}` at {made.rates[made.fast_alone]:g}; "
    yield f"the same on the fast device alone = `{made.same}` at {made.same_rate:g}."


# --- confirmation


def _curves(rows: Sequence[Row], arm: str, gap: float, seeds: Sequence[int]) -> list[Curve]:
    curves = []
    for seed in seeds:
        own = [r for r in rows if (r["arm"], r["gap"], r["seed"]) == (arm, gap, seed)]
        own.sort(key=lambda row: row["training_seconds"])
        figures = [(r["training_seconds"], r["accuracy"]) for r in own]
        curves.append(Curve(*zip(*figures, strict=True)))  # type: ignore[arg-type]
    return curves


def compared(
    rows: Sequence[Row], arm: str, gap: float, rival: str, rival_gap: float
) -> tuple[Speedup, Interval] | None:
    """Return how much sooner an arm is, and its lead in accuracy at equal time; None without rows.

    Only seeds that have all budgets of the arm, and the rival, count.
    """
    budgets = {r["seconds"] for r in rows if (r["arm"], r["gap"]) == (arm, gap)}
    longest: dict[int, float] = {}
    targets: dict[int, Target] = {}
    for row in rows:
        if (row["arm"], row["gap"]) == (rival, rival_gap):
            targets[row["seed"]] = Target(row["training_seconds"], row["accuracy"])
    for seed in sorted(targets):
        own = {
            row["seconds"]: row["accuracy"]
            for row in rows
            if (row["arm"], row["gap"], row["seed"]) == (arm, gap, seed)
        }
        if set(own) == budgets and len(budgets) > 1:
            longest[seed] = own[max(budgets)]
    if not longest:
        return None
    curves = _curves(rows, arm, gap, list(longest))
    faster = speedup(curves, [targets[seed] for seed in longest])
    leads = [accuracy - targets[seed].accuracy for seed, accuracy in longest.items()]
    return faster, interval(leads)


def rivals_of(made: Choice, gap: float) -> Mapping[str, tuple[str, float]]:
    """Return the rivals at a gap, by what they are called: arm and gap of their rows."""
    rivals = {"(a) tuned fast alone": (made.fast_alone, 1.0)}
    rivals["(b) fast alone, the same add-ons"] = (made.same, 1.0)
    if gap <= 8:
        rivals["DDP proportional"] = ("ddp-proportional", gap)
    if gap == 4:
        rivals["DDP equal"] = ("ddp-equal", gap)
    return rivals


def confirmation_lines(rows: Sequence[Row], made: Choice, ours: Mapping[float, str]) -> Lines:
    """Yield speed-ups and leads of ours, by gap, then the accuracies."""
    yield from _table(
        "gap",
        "against",
        "times sooner [95 %]",
        "by seed",
        "marked",
        "lead at equal time, points [95 %]",
    )
    for gap in GAPS:
        for title, (rival, rival_gap) in rivals_of(made, gap).items():
            if (found := compared(rows, ours[gap], gap, rival, rival_gap)) is None:
                continue
            faster, lead = found
            by_seed = ", ".join(f"{one:.2f}" for one in faster.by_seed)
            marked = f"{faster.at_shortest} at the shortest, {faster.beyond_longest} not reached"
            sooner, points = spread(faster.factor), spread(lead, 100)
            yield _line(f"{gap:g}", title, sooner, by_seed, marked, points)
    yield ""
    for gap in (1.0, *GAPS):
        yield from accuracy_lines([row for row in rows if row["gap"] == gap], gap)
        yield ""


def accuracy_lines(rows: Sequence[Row], gap: float) -> Lines:
    """Yield the accuracies of each arm and budget, over seeds."""
    found: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["arm"], row["seconds"]].append(row)
    if not found:
        return
    yield from _table(
        f"arm (gap {gap:g})", "seconds", "accuracy [95 %]", "samples", "fast waits, %"
    )
    for (arm, seconds), own in sorted(found.items()):
        accuracy = spread(interval([row["accuracy"] for row in own]), 100, 1)
        waits = [row["fast_waiting_share"] for row in own if "fast_waiting_share" in row]
        waiting = percent(fmean(waits)) if waits else ""
        samples = f"{fmean(row['samples'] for row in own):,.0f}"
        yield _line(arm, f"{seconds:g}", accuracy, samples, waiting)


def slow_link_lines(rows: Sequence[Row], made: Choice) -> Lines:
    """Yield the link as measured, and the comparison over it."""
    trips, rates = zip(*((r["round_trip_ms"], r["megabits_per_second"]) for r in rows), strict=True)
    yield f"Round trip {median(trips):.1f} ms, {median(rates):.0f} Mbit/s in a transfer of 32 MiB."
    yield ""
    if found := compared(rows, made.ships, 2.0, "ddp-proportional", 2.0):
        faster, lead = found
        yield f"Times sooner than DDP proportional: {spread(faster.factor)} "
        yield f"({faster.at_shortest} at the shortest budget); "
        yield f"lead at equal time {spread(lead, 100)} points."
        yield ""
    yield from accuracy_lines(rows, 2.0)


def lead_lines(rows: Sequence[Row], ours: str, rivals: Sequence[str]) -> Lines:
    """Yield the lead of an arm over others, seed by seed, then the accuracies of all."""
    by_seed = {(row["arm"], row["seed"]): row["accuracy"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    for rival in rivals:
        pairs = [(by_seed.get((ours, seed)), by_seed.get((rival, seed))) for seed in seeds]
        leads = [own - its for own, its in pairs if own is not None and its is not None]
        if leads:
            yield f"Lead of `{ours}` over `{rival}`: {spread(interval(leads), 100)} points"
            yield f"(by seed {', '.join(f'{100 * lead:+.2f}' for lead in leads)})."
            yield ""
    yield from accuracy_lines(rows, 2.0)


def by_task_lines(rows: Sequence[Row]) -> Lines:
    """Yield the accuracies of each task and arm."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        found[row["task"], row["arm"]].append(row["accuracy"])
    yield from _table("task", "arm", "accuracy [95 %]", "by seed")
    for (task, arm), own in sorted(found.items()):
        yield _line(task, arm, spread(interval(own), 100, 1), ", ".join(map(percent, own)))


def rows_lines(rows: Rows) -> Lines:
    """Yield how many rows there are, and which do not count or are marked."""
    yield from _table("stage", "rows", "failed", "taken again", "unsteady but counting", "commits")
    for stage, own in rows.items():
        counted = counting(own).values()
        failed = sum("error" in row for row in own)
        unsteady = sum(not row.get("steady", True) for row in counted)
        commits = ", ".join(sorted({str(row["commit"]) for row in own}))
        again = len(own) - failed - len(counted)
        yield _line(stage, *(str(n) for n in (len(own), failed, again, unsteady)), commits)
    yield ""
    yield "The conditions of each call: [conditions.jsonl](rows/conditions.jsonl)."


# --- the picture


def draw(rows: Rows, made: Choice, path: Path) -> None:
    """Draw the speed-up over the fast device alone against the gap, with the ceiling.

    Of what ships; at a gap that its confirmation does not have, of what was confirmed.
    """
    from matplotlib.figure import Figure

    shipped, confirmed = (
        list(counting(rows[stage]).values()) for stage in ("confirmation-auto", "confirmation")
    )
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    gaps = [1.5 + i / 10 for i in range(170)]
    axes.plot(gaps, [1 + 1 / gap for gap in gaps], "k--", label="ceiling: 1 + 1/gap")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.text(gaps[0], 0.99, "no gain", ha="left", va="top", color="dimgrey")
    series = {
        "(a) tuned fast alone": ("tuned fast device alone (a)", 0.97),
        "(b) fast alone, the same add-ons": ("fast device alone, same recipe (b)", 1.03),
    }
    for title, (label, beside) in series.items():
        points = []
        for gap in GAPS:
            rival = rivals_of(made, gap)[title]
            found = compared(shipped, made.ships, gap, *rival)
            if found := found or compared(confirmed, made.confirmed(gap), gap, *rival):
                points.append((gap, found[0].factor))
        if points:
            x, y = [gap * beside for gap, _ in points], [one.mean for _, one in points]
            # A single seed has no interval.
            low = [0.0 if one.count == 1 else one.mean - one.low for _, one in points]
            high = [0.0 if one.count == 1 else one.high - one.mean for _, one in points]
            axes.errorbar(x, y, (low, high), fmt="o", capsize=4, label=f"against the {label}")
    axes.set(xscale="log", xlabel="how many times slower the slow device is")
    axes.set(ylabel="times sooner at the same accuracy")
    axes.set_title("A fast and a slow device, against the fast one alone", fontsize="medium")
    axes.set_xticks(GAPS, [f"{gap:g}" for gap in GAPS])
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the picture."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.study.report", description=__doc__)
    line.add_argument("--rows", type=Path, default=FOLDER / "rows", help="folder of the rows")
    line.add_argument("--tiny", action="store_true", help="of rows that --tiny took")
    line.add_argument("--out", type=Path, default=FOLDER, help="where the page goes")
    given = line.parse_args(arguments)
    scale = TINY if given.tiny else FULL
    rows = read(Store(given.rows))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "RESULTS.md").write_text(page(rows, scale))
    if rows["confirmation"] and (made := choice(rows, scale)):
        draw(rows, made, given.out / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
