"""The study of docs/study.md: eight methods at ten gaps, five seeds; what they reach, and what collapses.

    python benchmarks/collapse.py [--seeds 0,1,2,3,4] [--folder multirun/collapse] [--docs] [overrides]

Runs ``sweep=collapse``, or goes on with it where it was stopped, then writes into FOLDER/study: ``table.md``,
``cells.csv`` (a line for each gap and method), ``runs.csv``, ``scores.png``, ``curves.png``. ``--no-run`` only does the
latter, with what is there. ``--docs`` puts table and pictures into docs/study.md.

A run's score is the mean of its last three evaluations of the policy. At each gap every method is held against ``none``
seed by seed (t test), p corrected by Holm over the gap's methods. *Fall*: the most that an evaluation lies below an
earlier one. *Collapsed*: `trimtab compare`'s word for a run that rose and fell for good, or a score below the reward
before training. ``CLAIMS`` are the study's conclusions as differences of scores: each is said to hold or not, so that a
study with other seeds tells whether it comes to the same. The last line is one JSON object; ``ratio`` is the share of
the claims that hold.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from trimtab.errors import ConfigError
from trimtab.report.model import Difference, Interval, Run
from trimtab.report.score import collapse, score, tail_mean
from trimtab.report.sources import load
from trimtab.report.statistics import corrected, paired, t_interval, untested

ROOT = Path(__file__).parent.parent
METRIC, LAST, BASELINE = "eval/reward", 3, "none"
POINTS: Mapping[str, Mapping[str, list[str]]] = OmegaConf.to_container(
    OmegaConf.load(ROOT / "sweeps" / "collapse.yaml").hydra.sweeper.points
)  # type: ignore[assignment]
GAPS, METHODS = list(POINTS["gap"]), list(POINTS["method"])
FAMILIES = {"noise": "noise on the logits", "weights": "rounded weights", "stale": "stale weights"}


Place = tuple[str, str]  # gap, method
INJECTED = [gap for gap in GAPS if gap.partition("_")[0] in FAMILIES]


@dataclass(frozen=True)
class Claim:
    """``left`` - ``right`` >= ``least`` of the mean scores, for all of ``pairs``."""

    text: str
    pairs: tuple[tuple[Place, Place], ...]
    least: float


CLAIMS = (
    Claim("nothing to correct: no method loses more than 0.03",
          tuple((("none", m), ("none", BASELINE)) for m in METHODS[1:]), -0.03),
    Claim("nothing to correct: no method gains more than 0.03",
          tuple((("none", BASELINE), ("none", m)) for m in METHODS[1:]), -0.03),
    Claim("bfloat16 and an 8-bit KV cache cost uncorrected training at most 0.08",
          tuple(((gap, BASELINE), ("none", BASELINE)) for gap in ("bf16", "kv_fp8")), -0.08),
    Claim("rejection at 0.999 to 1.001 loses 0.1 and more at every gap",
          tuple(((gap, BASELINE), (gap, "geometric_rs_token_tis")) for gap in GAPS[1:]), 0.1),
    Claim("independent noise, however strong: no correction gains more than 0.04",
          tuple((("noise_3", BASELINE), ("noise_3", m)) for m in METHODS[1:]), -0.04),
    Claim("the same error at each step, strong: sequence weights gain 0.04 and more",
          ((("weights_0.5", "sequence_tis"), ("weights_0.5", BASELINE)),), 0.04),
    Claim("old weights: every correction but the tight rejection gains 0.08 and more",
          tuple((("stale_24", m), ("stale_24", BASELINE)) for m in METHODS[1:] if m != "geometric_rs_token_tis"), 0.08),
    Claim("old weights: uncorrected training loses 0.2 and more",
          ((("none", BASELINE), ("stale_24", BASELINE)),), 0.2),
    Claim("an engine that errs: bypass with a PPO ratio loses 0.08 and more against no correction",
          tuple(((gap, BASELINE), (gap, "bypass")) for gap in ("noise_3", "weights_0.3", "weights_0.5")), 0.08),
    Claim("sequence weights are not below token weights by more than 0.04 at any injected gap",
          tuple(((gap, "sequence_tis"), (gap, "token_tis")) for gap in INJECTED), -0.04),
    Claim("cutting weights is not below dropping what exceeds the bound by more than 0.04 at any injected gap",
          tuple(((gap, cut), (gap, drop)) for gap in INJECTED
                for cut, drop in (("token_tis", "icepop"), ("sequence_tis", "sequence_mask"))), -0.04),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A gap and a method: its runs' scores by seed, and what else the table tells."""

    gap: str
    method: str
    scores: dict[int, float]
    runs: tuple[Run, ...]
    difference: Difference

    @property
    def interval(self) -> Interval:
        """Mean score, 95% t interval over seeds."""
        return t_interval(list(self.scores.values()))

    def mean(self, metric: str) -> float:
        """Mean over runs of the mean over steps; NaN where no run has it."""
        found = [float(np.nanmean(run.columns[metric])) for run in self.runs if metric in run.columns]
        return float(np.mean(found)) if found else float("nan")

    @property
    def fell(self) -> float:
        """Mean over runs of the largest fall of an evaluation below an earlier one."""
        return float(np.mean([_fall(evaluations(run)[1]) for run in self.runs]))

    @property
    def collapsed(self) -> int:
        """Runs that collapsed."""
        return sum(bool(collapse(run, METRIC, LAST) or _sank(run)) for run in self.runs)

    @property
    def alarmed(self) -> int:
        """Runs in which an alarm was raised."""
        return sum(float(np.nansum(run.columns["train/alarms"])) > 0 for run in self.runs)


def _fall(values: np.ndarray) -> float:
    return float(np.max(np.maximum.accumulate(values) - values, initial=0.0))


def _sank(run: Run) -> bool:
    end = tail_mean(run, METRIC, LAST)
    return end is not None and end < float(evaluations(run)[1][0])


def evaluations(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, the one before training included."""
    values = run.columns[METRIC]
    there = np.isfinite(values)
    return run.step[there], values[there]


# -- run and read ----------------------------------------------------------------------------------------------------


def carry_out(folder: Path, seeds: str, overrides: Sequence[str]) -> int:
    """The sweep, or what is missing of it."""
    command = [sys.executable, "-m", "run", "-m", "sweep=collapse", f"seed={seeds}", f"hydra.sweep.dir={folder}"]
    return subprocess.run([*command, *overrides], cwd=ROOT, check=False).returncode


def place(overrides: Sequence[str]) -> tuple[str, str]:
    """Gap and method of a run, by the overrides that the sweep gave it."""
    given = set(overrides)
    return tuple(
        max((name for name, texts in named.items() if given >= set(texts)), key=lambda name: len(named[name]))
        for named in (POINTS["gap"], POINTS["method"])
    )  # type: ignore[return-value]


def cells(folder: Path) -> list[Cell]:
    """Every gap and method that has a run with a score."""
    planned = json.loads((folder / "sweep.json").read_text())["runs"]
    where = {(folder / one["dir"]).resolve(): place(one["overrides"]) for one in planned}
    members: dict[tuple[str, str], list[tuple[Run, float]]] = defaultdict(list)
    for run in load([str(folder)]):
        value = score(run, METRIC, LAST, goal=run.planned).value
        if run.path is not None and run.path.resolve() in where and value is not None:
            members[where[run.path.resolve()]].append((run, value))
    found = []
    for gap in GAPS:
        base = {run.seed: value for run, value in members[gap, BASELINE]}
        for method in METHODS:
            scores = {run.seed: value for run, value in members[gap, method] if run.seed is not None}
            both = sorted(scores.keys() & base.keys())
            pairs = [(seed, scores[seed] - base[seed]) for seed in both]
            apart = paired(pairs, scale=1.0) if method != BASELINE and len(both) > 1 else untested("the baseline")
            if scores:
                found.append(Cell(gap, method, scores, tuple(run for run, _ in members[gap, method]), apart))
        here = [cell for cell in found if cell.gap == gap]
        told = corrected([cell.difference for cell in here])
        found[len(found) - len(here) :] = [replace(cell, difference=one) for cell, one in zip(here, told, strict=True)]
    return found


# -- write -----------------------------------------------------------------------------------------------------------


def line(cell: Cell) -> dict[str, Any]:
    """The cell's line of cells.csv."""
    at, apart = cell.interval, cell.difference
    return {
        "gap": cell.gap, "method": cell.method, "seeds": len(cell.scores), "score": at.mean, "low": at.low,
        "high": at.high, "difference": apart.interval.mean if apart.pairs else None, "p": apart.p,
        "p_corrected": apart.p_corrected, "verdict": apart.verdict.value, "fall": cell.fell,
        "collapsed": cell.collapsed, "alarmed": cell.alarmed, "mismatch_k3": cell.mean("train/mis_k3_kl"),
        "kept_tokens": cell.mean("train/mis_kept_token_fraction"), "ess": cell.mean("train/mis_ess"),
        "entropy": cell.mean("train/entropy"),
    }  # fmt: skip


def text(cell: Cell | None) -> str:
    """A cell of the table: mean and half width, + or - where it is better or worse than none, collapsed runs."""
    if cell is None:
        return ""
    at = cell.interval
    half = f" ± {(at.high - at.low) / 2:.2f}" if at.low is not None and at.high is not None else ""
    sign = {"better": " **+**", "worse": " **−**"}.get(cell.difference.verdict.value, "")
    fallen = f" ({cell.collapsed} of {len(cell.runs)})" if cell.collapsed else ""
    return f"{at.mean:.2f}{half}{sign}{fallen}"


def table(found: Sequence[Cell]) -> str:
    """Markdown: a line for each gap, a column for each method."""
    by = {(cell.gap, cell.method): cell for cell in found}
    lines = ["| gap | mismatch k3 | " + " | ".join(METHODS) + " |", "|---|---|" + "---|" * len(METHODS)]
    for gap in [gap for gap in GAPS if (gap, BASELINE) in by]:
        size = by[gap, BASELINE].mean("train/mis_k3_kl")
        lines.append(f"| {gap} | {size:.2g} | " + " | ".join(text(by.get((gap, m))) for m in METHODS) + " |")
    return "\n".join(lines) + "\n"


def held(claim: Claim, by: Mapping[Place, Cell]) -> tuple[bool | None, str]:
    """Whether the claim holds, None where a cell is missing; the pair with the least margin."""
    if any(place not in by for pair in claim.pairs for place in pair):
        return None, ""
    margins = []
    for left, right in claim.pairs:
        both = by[left].scores.keys() & by[right].scores.keys()
        margins.append((t_interval([by[left].scores[seed] - by[right].scores[seed] for seed in both]), left, right))
    least, left, right = min(margins, key=lambda one: one[0].mean)
    half = f" ± {(least.high - least.low) / 2:.2f}" if least.low is not None and least.high is not None else ""
    return least.mean >= claim.least, f"{' '.join(left)} − {' '.join(right)}: {least.mean:+.2f}{half}"


def claims(found: Sequence[Cell]) -> tuple[str, int, int]:
    """Markdown: a line for each claim; how many hold, how many could be looked at."""
    by = {(cell.gap, cell.method): cell for cell in found}
    lines, results = ["| claim | holds | closest case |", "|---|---|---|"], [held(claim, by) for claim in CLAIMS]
    for claim, (holds, case) in zip(CLAIMS, results, strict=True):
        lines.append(f"| {claim.text} | {'–' if holds is None else 'yes' if holds else 'no'} | {case} |")
    looked = [holds for holds, _ in results if holds is not None]
    return "\n".join(lines) + "\n", sum(looked), len(looked)


def pictures(found: Sequence[Cell], folder: Path) -> None:
    """scores.png: what each method reaches as the gap grows. curves.png: evaluations at each gap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    by = {(cell.gap, cell.method): cell for cell in found}
    colours = dict(zip(METHODS, plt.colormaps["tab10"].colors, strict=False))
    figure, axes = plt.subplots(1, len(FAMILIES), figsize=(12, 3.8), sharey=True, layout="constrained")
    for axis, (family, title) in zip(axes, FAMILIES.items(), strict=True):
        gaps = ["none", *(gap for gap in GAPS if gap.startswith(family))]
        for i, method in enumerate(METHODS):
            at = [(x, by[gap, method].interval) for x, gap in enumerate(gaps) if (gap, method) in by]
            off = (i - len(METHODS) / 2) * 0.06
            xs, means = [x + off for x, _ in at], [one.mean for _, one in at]
            halves = [(one.high - one.low) / 2 if one.low is not None and one.high is not None else 0 for _, one in at]
            axis.errorbar(xs, means, halves, color=colours[method], marker="o", markersize=3, linewidth=1, label=method)
        axis.set(title=title, xticks=range(len(gaps)), xticklabels=[g.removeprefix(f"{family}_") for g in gaps])
    axes[0].set(ylabel="evaluation reward, last three", ylim=(0, 1))
    axes[-1].legend(fontsize=7, frameon=False, loc="lower left")
    figure.savefig(folder / "scores.png", dpi=140)
    gaps = [gap for gap in GAPS if (gap, BASELINE) in by]
    figure, grid = plt.subplots(-(-len(gaps) // 4), 4, figsize=(12, 2.3 * -(-len(gaps) // 4)), sharex=True, sharey=True,
                                layout="constrained", squeeze=False)  # fmt: skip
    for axis, gap in zip(grid.flat, gaps, strict=False):
        for method in [m for m in METHODS if (gap, m) in by]:
            steps, _ = evaluations(by[gap, method].runs[0])
            values = np.array([evaluations(run)[1] for run in by[gap, method].runs])
            axis.plot(steps, values.mean(0), color=colours[method], linewidth=1.2, label=method)
        axis.set(title=gap, ylim=(0, 1))
    for axis in grid.flat[len(gaps) :]:
        axis.set_axis_off()
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), fontsize=8, frameon=False)
    figure.savefig(folder / "curves.png", dpi=140)
    plt.close("all")


def write(found: Sequence[Cell], folder: Path) -> None:
    """Table, CSV and pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table(found))
    (folder / "claims.md").write_text(claims(found)[0])
    runs = [
        {"gap": cell.gap, "method": cell.method, "seed": run.seed, "score": cell.scores.get(run.seed or 0),
         "fall": _fall(evaluations(run)[1]), "run": run.name}
        for cell in found for run in cell.runs
    ]  # fmt: skip
    for name, rows in (("cells.csv", [line(cell) for cell in found]), ("runs.csv", runs)):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    pictures(found, folder)


def into_docs(folder: Path) -> None:
    """Table and pictures of docs/study.md."""
    page = ROOT / "docs" / "study.md"
    block = re.compile(r"(<!-- (table|claims) -->\n).*?(<!-- end -->)", re.DOTALL)
    page.write_text(block.sub(lambda m: m[1] + (folder / f"{m[2]}.md").read_text() + m[3], page.read_text()))
    for name in ("scores.png", "curves.png"):
        (ROOT / "docs" / f"study_{name}").write_bytes((folder / name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--folder", type=Path, default=ROOT / "multirun" / "collapse")
    parser.add_argument("--no-run", action="store_true", help="only read what is there")
    parser.add_argument("--docs", action="store_true", help="write table and pictures of docs/study.md")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    folder = args.folder.resolve()
    code = 0 if args.no_run else carry_out(folder, args.seeds, args.overrides)
    if not (folder / "sweep.json").exists():
        raise ConfigError(f"{folder} holds no sweep; leave --no-run out")
    found = cells(folder)
    if not found:
        raise ConfigError(f"no run in {folder} has come to its end")
    write(found, folder / "study")
    if args.docs:
        into_docs(folder / "study")
    told, holding, looked = claims(found)
    print(table(found), told, sep="\n")
    figures = {"runs": sum(len(cell.runs) for cell in found), "collapsed": sum(cell.collapsed for cell in found)}
    print(json.dumps({"name": "collapse", **figures, "claims": looked, "holding": holding,
                      "ratio": round(holding / max(looked, 1), 3)}))  # fmt: skip
    raise SystemExit(code)


if __name__ == "__main__":
    main()
