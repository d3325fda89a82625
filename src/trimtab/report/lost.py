"""Seeds without a score: why they lack it, and what would be said of their setting if they were counted.

Which runs fail may depend on how they do, so the seeds that are left say too much. A verdict over them must therefore
also hold with the lost ones counted: for ``better`` a setting's at the worst value that the comparison knows and the
baseline's at the best, for ``worse`` the other way round. A seed that nobody started is no lost one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from trimtab.report.model import Difference, Run, RunState, Verdict
from trimtab.report.score import Score
from trimtab.report.statistics import ALPHA, paired


class Loss(Enum):
    """Why a seed has no score, the gravest first; the value is how it is told of one seed and of several."""

    failed = ("failed", "failed")
    diverged = ("diverged", "diverged")
    early = ("ended early", "ended early")
    silent = ("logged nothing", "logged nothing")
    without = ("has no score", "have no score")
    unfinished = ("is not finished yet", "are not finished yet")
    absent = ("has no run", "have no run")


def loss_of(run: Run, scored: Score) -> Loss:
    """Why ``run`` has no score."""
    match run.state:
        case RunState.failed:
            return Loss.failed
        case RunState.running | RunState.preempted | RunState.missing:
            return Loss.unfinished
        case RunState.completed | RunState.unknown:
            kinds = {"non-finite": Loss.diverged, "shorter": Loss.early, "nothing logged": Loss.silent}
            return kinds.get(scored.kind, Loss.without)


def gravest(losses: Iterable[Loss]) -> Loss:
    """Of a seed's several runs."""
    order = list(Loss)
    return min(losses, key=order.index)


def told(lost: Iterable[Loss], expected: int, whose: str = "its") -> str:
    """``3 of its 6 seeds failed, 1 is not finished yet``; empty for none."""
    count = Counter(lost)
    parts = [f"{count[loss]}{{of}} {loss.value[count[loss] != 1]}" for loss in Loss if count[loss]]
    of = f" of {whose} {expected} seed{'s' * (expected != 1)}"
    return ", ".join(part.format(of="" if i else of) for i, part in enumerate(parts))


@dataclass(frozen=True)
class Seeds:
    """A setting's seeds: those with a score, and why the others lack one."""

    scores: Mapping[int, float]
    lost: Mapping[int, Loss]

    def counted(self) -> set[int]:
        """Seeds that were started: all but those without a run."""
        return set(self.scores) | {seed for seed, loss in self.lost.items() if loss is not Loss.absent}


def lacking(own: Seeds, base: Seeds) -> list[int]:
    """The seeds that both started and that one of them lacks the score of."""
    both = {seed for seed in own.counted() & base.counted() if seed >= 0}
    return sorted(seed for seed in both if seed not in own.scores or seed not in base.scores)


def bounded(found: Difference, own: Seeds, base: Seeds, span: tuple[float, float]) -> Difference:
    """``found`` with ``p_lost``: its p value, or the larger one with lost seeds counted against its sign.

    ``span``: the lowest and the highest value that the comparison knows. A positive difference is held against the
    setting's lost seeds at the lowest and the baseline's at the highest; p_lost is 1 where the sign turns over.
    """
    lost = lacking(own, base)
    if found.p is None or not lost:
        return replace(found, p_lost=found.p)
    up = found.interval.mean > 0
    mine, theirs = span if up else span[::-1]
    pairs = [*found.pairs, *((seed, own.scores.get(seed, mine) - base.scores.get(seed, theirs)) for seed in lost)]
    again = paired(pairs, max(map(abs, span)))
    same = again.p is not None and (again.interval.mean > 0) is up and again.interval.mean != 0
    return replace(found, p_lost=max(found.p, again.p) if same and again.p is not None else 1.0)


def span_of(values: Iterable[float | None]) -> tuple[float, float]:
    """The lowest and the highest of them; (0, 0) for none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def claim(found: Difference, lost: Sequence[str]) -> str:
    """What lost seeds do to the verdict, to follow it; empty without any. ``lost``: as ``told`` says of the two."""
    said = "; ".join(text for text in lost if text)
    if not said:
        return ""
    match found.verdict:
        case Verdict.better:
            return f"{said}; it is better even with lost seeds counted at the worst"
        case Verdict.worse:
            return f"{said}; it is worse even with lost seeds counted in its favour"
        case Verdict.undecided if found.p is not None and found.p_lost is not None and found.p <= ALPHA < found.p_lost:
            return f"{said}; the seeds that are left do not decide it, as it might turn over with the lost ones counted"
        case Verdict.undecided | Verdict.untested:
            return said
