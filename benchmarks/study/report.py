"""Write RESULTS3.md and its picture from the rows of the third study.

``python -m benchmarks.study.report``. All rows stay in the files. A row counts if it is the last of
its run that did not fail. Stages that are not complete are marked.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from .arms import Setting
from .estimator import Interval, Speedup, Values, interval, speedup
from .runs import Row, Store, counting
from .stages import COMPARISONS, FULL, TINY, Key, Rows, Scale, Tuning, due_runs, read, value_of

FOLDER = Path(__file__).parent
PICTURE = "speedup3.png"
TITLES = {
    "images": "Images",
    "throughput": "Throughput",
    "python": "A language model, fine-tuned, batch 4",
    "slow-link": "A slow link",
    "auto": "Steps that `auto` chooses",
    "batch-16": "A language model, fine-tuned, batch 16",
    "lora": "A LoRA adapter",
    "scratch": "A language model from scratch",
    "outer": "An outer optimizer",
}
ALONE: Key = ("alone", 1)
PAIRS = (
    *((arm, "ddp") for arm in ("blocking", "overlapped", "models", "gradients")),
    *(("overlapped", "blocking"), ("gradients", "blocking"), ("gradients", "models")),
    ("blocking-outer", "blocking"),
)
"""An arm and the rival that it is compared with, at the same gap."""

Lines = Iterable[str]


def page(rows: Rows, scale: Scale, picture: bool) -> str:
    """Return the whole page."""
    parts = [
        "# Results of the third study",
        "Written by `python -m benchmarks.study.report` from the rows in `rows3/`. The questions, "
        "rules and estimators: [PLAN3.md](PLAN3.md). All times are on the wall clock.",
    ]
    if picture:
        parts.append(f"![how many times sooner a second device is]({PICTURE})")
    for name, title in TITLES.items():
        own = {"throughput": throughput_lines, "auto": auto_lines}.get(name)
        lines = list(own(rows[name]) if own else comparison_lines(name, rows))
        if lines and (due := len(due_runs(name, rows, scale))):
            decides = "Until then, these figures decide nothing."
            lines.insert(0, f"**Not complete: {due} runs are due. {decides}**\n")
        parts += [f"## {title}", "\n".join(lines) or "No rows yet."]
    parts += ["## Tuning", "\n".join(tuning_lines(rows, scale))]
    parts += ["## Rows", "\n".join(rows_lines(rows, scale))]
    return "\n\n".join(parts) + "\n"


def _table(*titles: str) -> list[str]:
    return [_line(*titles), "|" + "---|" * len(titles)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def spread(found: Interval, times: float = 1.0, digits: int = 2) -> str:
    """Write a mean and its interval."""
    mean, low, high = (f"{times * v:.{digits}f}" for v in (found.mean, found.low, found.high))
    return f"{mean} (n = {found.count})" if math.isnan(found.low) else f"{mean} [{low}, {high}]"


def sooner(found: Speedup) -> str:
    """Write a speed-up, and how many of its seeds are extrapolated."""
    count = len(found.by_seed)
    mark = f" ({found.extrapolated} of {count} extrapolated)" if found.extrapolated else ""
    return spread(found.factor) + mark


# --- comparisons


class Results:
    """What the arms of a comparison reached, by seed."""

    def __init__(self, name: str, rows: Rows) -> None:
        self.plan = COMPARISONS[name]
        self.rows: dict[Key, list[Row]] = defaultdict(list)
        for row in counting(rows[name]).values():
            self.rows[row["arm"], row["gap"]].append(row)
        self.budgets: dict[float, dict[int, float]] = defaultdict(dict)
        for row in self.rows[ALONE]:
            self.budgets[row["seconds"]][row["seed"]] = value_of(row)

    def values(self, key: Key) -> Values:
        """Return what an arm reached; of the fast device alone in the time of the arms, if any."""
        seconds = next((r["seconds"] for k, own in self.rows.items() if k != ALONE for r in own), 0)
        if key == ALONE and self.budgets:
            nearest = min(self.budgets, key=lambda one: abs(one - seconds))
            return self.budgets[nearest] if abs(nearest - seconds) <= 0.05 * seconds else {}
        return {row["seed"]: value_of(row) for row in self.rows[key]}

    def speedup(self, key: Key, rival: Key) -> Speedup | None:
        """Return how many times sooner an arm is; None without pairs."""
        arm, other = (
            (self.values(one), {row["seed"]: row["training_seconds"] for row in self.rows[one]})
            for one in (key, rival)
        )
        if len(self.budgets) < len(self.plan.alone_seconds):
            return None
        try:
            return speedup(self.budgets, arm, None if rival == ALONE else other)
        except ValueError:
            return None

    def difference(self, key: Key, rival: Key) -> str:
        """Write the paired difference at equal time; empty without pairs."""
        own, other = self.values(key), self.values(rival)
        pairs = [own[seed] - other[seed] for seed in own if seed in other]
        return self.figure(pairs, 2, 4) if pairs else ""

    def figure(self, values: Sequence[float], digits: int, digits_of_texts: int) -> str:
        """Write values in the unit of the task."""
        if self.plan.task == "images":
            return spread(interval(values), 100, digits)
        return spread(interval(values), 1, digits_of_texts)


def comparison_lines(name: str, rows: Rows) -> Lines:
    """Yield the speed-ups of a comparison, and what each arm reached."""
    if not counting(rows[name]):
        return
    results = Results(name, rows)
    arms = results.plan.arms
    is_images = results.plan.task == "images"
    unit = "points of accuracy" if is_images else "nats less"
    keys = [(arm.name, arm.gap) for arm in arms if arm.name != "alone"]
    pairs = [(key, ALONE) for key in keys]
    pairs += [((a, gap), (b, gap)) for a, b in PAIRS for own, gap in keys if own == a]
    yield from _table("arm", "gap", "against", "times sooner [95 %]", "by seed", f"{unit} [95 %]")
    for key, rival in pairs:
        if found := results.speedup(key, rival):
            by_seed = ", ".join(f"{one:.2f}" for one in found.by_seed)
            said = by_seed, results.difference(key, rival)
            yield _line(f"`{key[0]}`", f"{key[1]:g}", f"`{rival[0]}`", sooner(found), *said)
    yield ""
    what = "accuracy" if is_images else "nats"
    yield from _table("arm", "gap", "seconds", f"{what} [95 %]", "samples", "fast waits", "rounds")
    for (arm, gap), every in sorted(results.rows.items()):
        for seconds in sorted({row["seconds"] for row in every}):
            own = [row for row in every if row["seconds"] == seconds]
            values = [value_of(row) * (1 if is_images else -1) for row in own]
            waits = [row["fast_waiting_share"] or 0.0 for row in own if "rounds" in row]
            yield _line(
                *(f"`{arm}`", f"{gap:g}", f"{seconds:g}", results.figure(values, 1, 4)),
                f"{fmean(row['samples'] for row in own):,.0f}",
                f"{100 * fmean(waits):.1f} %" if waits else "",
                f"{fmean(row['rounds'] for row in own):,.0f}" if waits else "",
            )


def tuning_lines(rows: Rows, scale: Scale) -> Lines:
    """Yield the setting that was found for each arm."""
    yield from _table("comparison", "runs of its tuning", "arm", "gap", "setting")
    for name in COMPARISONS:
        count = len(counting(rows[f"{name}-tuning"]))
        for (arm, gap), setting in Tuning(name, rows, scale).found.items() if count else ():
            said = f"`{setting}`" if setting else "not found yet"
            yield _line(name, str(count), f"`{arm}`", f"{gap:g}", said)


# --- throughput and steps


def throughput_lines(rows: Sequence[Row]) -> Lines:
    """Yield the samples per second as shares of two ceilings of the same block."""
    done = [row for row in counting(rows).values() if "samples_per_second" in row]
    loops = {
        (row["seed"], row["setting"]["batch"], row["neighbor"]): row["samples_per_second"]
        for row in done
        if row["kind"] == "loop"
    }
    shares: dict[tuple[str, float, int, bool], list[float]] = defaultdict(list)
    for row in done:
        for neighbor in (True, False):
            batch = row["setting"]["batch"]
            alone = loops.get((row["seed"], batch, neighbor))
            if alone and (row["kind"] != "loop" or (row["neighbor"] and not neighbor)):
                times = 1 + 1 / row["gap"] if row["kind"] != "loop" else 1
                found = shares[row["arm"], row["gap"], batch, neighbor]
                found.append(row["samples_per_second"] / (alone * times))
    if shares:
        yield "Samples per second of the ceiling, median [range]; `loop`: next to a computing core."
        yield ""
        yield from _table("arm", "gap", "batch", "ceiling", "share", "blocks")
    for (arm, gap, batch, neighbor), own in sorted(shares.items()):
        ceiling = "next to a computing core" if neighbor else "next to an idle core"
        said = f"{median(own):.3f} [{min(own):.3f}, {max(own):.3f}]"
        yield _line(f"`{arm}`", f"{gap:g}", str(batch), ceiling, said, str(len(own)))


def auto_lines(rows: Sequence[Row]) -> Lines:
    """Yield the regret of `auto`, by gap and link."""
    places: dict[tuple[bool, float], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in counting(rows).values():
        if "samples_per_second" in row:
            places[row["link"], row["gap"]][row["setting"]["steps"]].append(row)
    if places:
        yield from _table(
            *("link", "gap", "steps that it chose", "best steps of the grid"),
            *("regret, samples per second", "regret, points", "fast waits", "seeds"),
        )
    for (link, gap), by_steps in sorted(places.items()):
        own, grid = by_steps[0], [steps for steps in by_steps if steps]
        if not own or not grid:
            continue
        rates, points = (
            {steps: fmean(row[key] for row in found) for steps, found in by_steps.items()}
            for key in ("samples_per_second", "accuracy")
        )
        best = max(grid, key=lambda steps: rates[steps])
        chosen = ", ".join("/".join(map(str, row["local_steps"])) for row in own)
        behind = max(points[steps] for steps in grid) - points[0]
        waits = fmean(row["fast_waiting_share"] or 0.0 for row in own)
        yield _line(
            *("slow" if link else "", f"{gap:g}", chosen, str(best)),
            *(f"{100 * (1 - rates[0] / rates[best]):.1f} %", f"{100 * behind:.1f}"),
            *(f"{100 * waits:.1f} %", str(len(own))),
        )


def rows_lines(rows: Rows, scale: Scale) -> Lines:
    """Yield the number of rows, and which of them failed or were repeated."""
    yield from _table("stage", "rows", "failed", "repeated", "due", "commits")
    for stage, own in rows.items():
        failed = sum("error" in row for row in own)
        again = len(own) - failed - len(counting(own))
        due = len(due_runs(stage, rows, scale))
        commits = ", ".join(sorted({str(row["commit"]) for row in own}))
        yield _line(stage, *(str(n) for n in (len(own), failed, again, due)), commits)
    yield "\nThe conditions of each call: [conditions.jsonl](rows3/conditions.jsonl)."


# --- the picture

COLORS = {"averaged models": "tab:blue", "averaged gradients": "tab:cyan", "DDP": "tab:gray"}


def bars(rows: Rows, scale: Scale) -> list[tuple[str, str, Interval, float]]:
    """Return the bars of the picture, of complete stages: place, who, times sooner, ceiling."""
    found = []
    for name, task in (("images", "images"), ("python", "language model")):
        if due_runs(name, rows, scale):
            continue
        results = Results(name, rows)
        for gap, pace in ((2, "half"), (4, "a quarter")):
            best = better_models(name, gap, rows, scale)
            for arm, who in zip((best, "gradients", "ddp"), COLORS, strict=True):
                if known := results.speedup((arm, gap), ALONE):
                    place = f"{task},\n{pace} as fast"
                    found.append((place, who, known.factor, 1 + 1 / gap))
    return found


def better_models(name: str, gap: float, rows: Rows, scale: Scale) -> str:
    """Return the arm of models with the better mean in tuning; empty while it is not known."""
    tuning = Tuning(name, rows, scale)
    done = counting(rows[f"{name}-tuning"])
    means: dict[str, float] = {}
    for arm in tuning.plan.arms:
        if arm.kind == "models" and arm.gap == gap:
            setting: Setting | None = tuning.found[arm.name, gap]
            own = (run for run in tuning.runs if run.kind == "models")
            runs = [run for run in own if (run.setting, run.gap) == (setting, gap)]
            values = [value_of(done[run.key]) for run in runs if run.key in done]
            means |= {arm.name: fmean(values)} if values else {}
    return max(means, key=lambda arm: means[arm], default="")


def draw(rows: Rows, scale: Scale, path: Path) -> bool:
    """Draw how many times sooner a second device is; return whether there is any figure."""
    from matplotlib.figure import Figure

    found = bars(rows, scale)
    if not found:
        return False
    places = list(dict.fromkeys(place for place, *_ in found))
    figure = Figure(figsize=(7, 1.5 + len(places)))
    axes = figure.subplots()
    for who, color in COLORS.items():
        axes.barh([0], [0], color=color, label=who)
    for place, who, factor, ceiling in found:
        at = len(places) - 1 - places.index(place) + 0.25 * (1 - list(COLORS).index(who))
        error = [[factor.mean - factor.low], [factor.high - factor.mean]]
        shown = None if math.isnan(factor.low) else error
        axes.barh(at, factor.mean - 1, 0.22, 1, color=COLORS[who], xerr=shown)
        end = max(1.0, factor.mean if shown is None else factor.high)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # over the dotted line
        axes.text(end + 0.01, at, f"{factor.mean:.2f}", va="center", fontsize="small", bbox=box)
        axes.plot([ceiling] * 2, [at - 0.12, at + 0.12], "k:")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(places)), places[::-1])
    axes.set(
        xlim=(0.4, 1.6),
        xlabel="times sooner than the fast device alone (dotted: the most that is possible)",
    )
    axes.set_title("What does a second, slower device bring?", fontsize="medium")
    axes.legend(fontsize="small", loc="center left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the picture."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.study.report", description=__doc__)
    line.add_argument("--rows", type=Path, default=FOLDER / "rows3", help="folder of the rows")
    line.add_argument("--tiny", action="store_true", help="for rows that --tiny took")
    line.add_argument("--out", type=Path, default=FOLDER, help="where the page goes")
    given = line.parse_args(arguments)
    scale, rows = TINY if given.tiny else FULL, read(Store(given.rows))
    given.out.mkdir(parents=True, exist_ok=True)
    drawn = draw(rows, scale, given.out / PICTURE)
    (given.out / "RESULTS3.md").write_text(page(rows, scale, drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
