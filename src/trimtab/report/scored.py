"""Scores of a setting: of its runs, each at the common step if it came to its planned end, and of its seeds.

The common step is the last that every setting reaches, taken from runs that came to their own planned end: a run that
was cut short is a lost seed, whatever its files say, and must not shorten the comparison of the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trimtab.report.lost import Loss, Seeds, gravest, loss_of, told
from trimtab.report.model import Run, RunState, Setting
from trimtab.report.score import Score, ended_early, score, tail
from trimtab.report.settings import Grouping

LENGTH = "steps"  # the key that says how long a run is


@dataclass(frozen=True)
class Scored:
    """A setting with the scores of its runs (by identity), and of its seeds, at the step ``at``.

    ``variant``: which of the pooled settings a run has, by identity. ``wanted``: seeds that it should have.
    """

    setting: Setting
    of_run: Mapping[int, Score]
    variant: Mapping[int, str]
    wanted: frozenset[int]
    seeds: Seeds
    strata: tuple[tuple[float, ...], ...]
    at: int | None
    metric: str
    last: int

    @property
    def expected(self) -> int:
        """How many seeds should have a score."""
        return len(self.seeds.scores) + len(self.seeds.lost)

    def told(self, whose: str = "its") -> str:
        """``3 of its 6 seeds failed``, or nothing."""
        return told(self.seeds.lost.values(), self.expected, whose)

    @property
    def variants(self) -> frozenset[str]:
        """The pooled settings that it has."""
        return frozenset(self.variant[id(run)] for run in self.setting.runs)

    def over(self, variants: Collection[str]) -> Seeds:
        """Its seeds by their runs of these variants alone."""
        return seeds_of(self.setting, self.of_run, self.variant, self.wanted, variants)


def shared(own: Scored, base: Scored) -> frozenset[str]:
    """The pooled settings that both have: what can be paired."""
    return own.variants & base.variants


def goals(grouping: Grouping) -> dict[int, int | None]:
    """The step that each run (by identity) should end at: as planned, else the last of its setting's longest run."""
    found: dict[int, int | None] = {}
    for setting in grouping.settings:
        variant = grouping.variants[setting.label]
        longest: dict[str, int] = {}
        for run in setting.runs:
            if len(run.step):
                tag = variant[id(run)]
                longest[tag] = max(longest.get(tag, 0), int(run.step[-1]))
        for run in setting.runs:
            found[id(run)] = run.planned if run.planned is not None else longest.get(variant[id(run)])
    return found


def ends(
    grouping: Grouping, metric: str, goal: Mapping[int, int | None]
) -> tuple[dict[str, int | None], dict[str, int]]:
    """(the step to score each setting at, the last step that it has): the last that all settings reach.

    Of runs that came to their own end alone. Where the number of steps is itself a setting, each is scored at its own.
    """
    reached: dict[str, dict[str, int]] = {}
    for setting in grouping.settings:
        for run in setting.runs:
            step = tail(run, metric, 1)[1] if whole(run, goal[id(run)]) else 0
            if step > 0:
                at, variant = reached.setdefault(setting.label, {}), grouping.variants[setting.label][id(run)]
                at[variant] = max(at.get(variant, 0), step)
    common = min((step for own in reached.values() for step in own.values()), default=None)
    apart = LENGTH in grouping.keys
    found = {s.label: min(reached[s.label].values()) if apart and s.label in reached else common
             for s in grouping.settings}  # fmt: skip
    return found, {label: max(own.values()) for label, own in reached.items()}


def whole(run: Run, goal: int | None) -> bool:
    """Whether it ended, and at the step that it should."""
    return run.state in (RunState.completed, RunState.unknown) and not ended_early(run, goal)


def scored_of(
    setting: Setting,
    metric: str,
    last: int,
    variant: Mapping[int, str],
    goal: Mapping[int, int | None],
    wanted: Collection[int],
    at: int | None,
) -> Scored:
    """Scores by run and by seed."""
    of_run = {id(run): score(run, metric, last, at, goal[id(run)]) for run in setting.runs}
    strata: dict[str, list[float]] = {name: [] for name in sorted({variant[id(run)] for run in setting.runs})}
    for run in setting.runs:
        value = of_run[id(run)].value
        if value is not None:
            strata[variant[id(run)]].append(value)
    seeds = seeds_of(setting, of_run, variant, wanted, strata)
    return Scored(setting, of_run, variant, frozenset(wanted), seeds, tuple(map(tuple, strata.values())), at, metric,
                  last)  # fmt: skip


def seeds_of(
    setting: Setting,
    of_run: Mapping[int, Score],
    variant: Mapping[int, str],
    wanted: Collection[int],
    every: Collection[str],
) -> Seeds:
    """Scores by seed: the mean over the variants ``every``. A seed counts when it has a score in each of them."""
    seeds: dict[int, dict[str, float]] = {seed: {} for seed in wanted}
    losses: dict[int, list[Loss]] = {}
    nameless = 0
    for run in setting.runs:
        if run.seed is None:
            nameless -= 1  # counted on its own, and paired with nothing
        if variant[id(run)] not in every:
            continue
        value, seed = of_run[id(run)].value, run.seed if run.seed is not None else nameless
        here = seeds.setdefault(seed, {})
        if value is not None:
            here[variant[id(run)]] = value
        else:
            losses.setdefault(seed, []).append(loss_of(run, of_run[id(run)]))
    whole_ones = {seed: math.fsum(found.values()) / len(found) for seed, found in seeds.items()
                  if found and (len(found) == len(every) or seed < 0)}  # fmt: skip
    lost = {seed: gravest(losses.get(seed, [Loss.absent])) for seed in sorted(seeds) if seed not in whole_ones}
    return Seeds(dict(sorted(whole_ones.items())), lost)
