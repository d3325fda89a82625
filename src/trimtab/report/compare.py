"""Runs to a Comparison: settings, scores, differences to the baseline, rank, cost, and what a reader must know."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

import numpy as np

from trimtab.errors import ConfigError
from trimtab.report.curves import Axis, axis_of
from trimtab.report.lost import bounded, claim, span_of
from trimtab.report.model import Comparison, Difference, Interval, Row, Run, RunState, Setting
from trimtab.report.problems import longer, of_run, of_setting, short_run, superseded, unequal
from trimtab.report.score import EVALUATION, REWARD, default_last, tail_mean
from trimtab.report.scored import LENGTH, Scored, ends, goals, scored_of, shared
from trimtab.report.settings import FLAT, SHORT, Grouping, canonical, group, text
from trimtab.report.statistics import corrected, interquartile, paired, t_interval, untested

# Beside the score, each as the mean of a run's last values.
BESIDE = (
    EVALUATION, "eval/reward_greedy", "eval/pass_at_k", REWARD, "train/reward_weighted", "train/mis_k3_kl",
    "train/mis_kl", "train/train_rollout_logprob_abs_diff", "train/mis_ess",
    "train/mis_kept_token_fraction", "train/clip_fraction_low",
    "train/clip_fraction_high", "train/tis_clipfrac", "train/mis_rs_catastrophic_seq_fraction", "train/entropy",
    "train/response_length", "train/grad_norm", "perf/tokens_per_second",
)  # fmt: skip
SHOWN = 12  # keys named in a note
NONE_SHARED = "it shares none of the pooled settings with the baseline: there is nothing to pair; add keys to --by"
STANDARD = "standard"  # the algorithm without correction: what others are held against unless told otherwise


def compare(
    runs: Sequence[Run],
    by: Sequence[str] = (),
    metric: str = EVALUATION,
    last: int | None = None,
    baseline: str | None = None,
    lower: bool = False,
) -> Comparison:
    """Hold the settings of ``runs`` against each other.

    ``by``: keys that tell settings apart, instead of all that differ. ``metric``: what is compared; where no run has
    eval/reward, train/reward stands in for it. ``last``: how many of a run's last values its score is the mean of
    (default: 3 evaluations, 10 steps). ``baseline``: ``key=value[,key=value]`` of the setting that the others are held
    against (default: algo=standard, else the first). ``lower``: smaller values are better.

    Raises ConfigError, with what is allowed, for a key, metric or baseline that is not there.
    """
    if last is not None and last < 1:
        raise ConfigError(f"--last {last} must be at least 1: the score is the mean of so many last values")
    metric, notes = _metric(runs, metric)
    width = last if last is not None else default_last(metric)
    grouping = group(runs, by)
    wanted = expected(grouping.settings)
    goal = goals(grouping)
    at, reached = ends(grouping, metric, goal)
    scored = [scored_of(s, metric, width, grouping.variants[s.label], goal, wanted[s.label], at[s.label])
              for s in grouping.settings]  # fmt: skip
    by_worth = sorted(scored, key=lambda s: not s.seeds.scores)  # a default baseline has scores
    base, more = _baseline([s.setting for s in by_worth], baseline)
    against = next((s for s in scored if base is not None and s.setting.label == base.label), None)
    differences = _differences(scored, against, lower)
    beyond = {label: step for label, step in reached.items() if step > (at[label] or step)}
    rows = _ranked([_row(s, d, beyond.get(s.setting.label), against)
                    for s, d in zip(scored, differences, strict=True)], lower)  # fmt: skip
    counted = [run for setting in grouping.settings for run in setting.runs]
    problems = [
        *(p for s in scored for run in s.setting.runs for p in of_run(run, s.of_run[id(run)], metric, width, lower)),
        *(p for s in scored for run in s.setting.runs for p in short_run(run, s.of_run[id(run)], metric, width, s.at)),
        *longer(beyond, at),
        *(p for s in scored if against is not None for p in unequal(s, against)),
        *superseded(grouping.superseded),
        *(p for row in rows for p in of_setting(row, base is not None and row.setting.label == base.label)),
    ]
    notes += more + _about(grouping, counted) + (["smaller values count as better"] if lower else [])
    return Comparison(
        metric=metric,
        last=width,
        baseline=base.label if base is not None else "",
        keys=grouping.keys,
        rows=tuple(rows),
        problems=tuple(problems),
        notes=tuple(notes),
        lower=lower,
        at=min((step for label in beyond if (step := at[label]) is not None), default=None),
    )


# -- what is asked ---------------------------------------------------------------------------------------------------


def _metric(runs: Sequence[Run], metric: str) -> tuple[str, list[str]]:
    """The metric to compare, and a note when it is not the one asked for."""
    there = Counter(name for run in runs for name in run.columns)
    if metric in there:
        return metric, []
    if metric == EVALUATION and REWARD in there:
        return REWARD, [f"no run has {EVALUATION}: compared by {REWARD}, which is measured on the training problems"]
    if not there:
        return metric, ["no run has logged any metric"]
    near = get_close_matches(metric, there, n=5, cutoff=0.3) or [name for name, _ in there.most_common(8)]
    raise ConfigError(f"--metric {metric}: no run has it; closest: {', '.join(near)}")


def matches(setting: Setting, wanted: Mapping[str, str]) -> bool:
    """Whether the setting has all values of ``wanted``: those it is told by, else those of its runs' configs."""
    config = {key: text(value) for key, value in canonical(setting.runs[0].config).items()} if setting.runs else {}
    for key, value in wanted.items():
        full = FLAT.get(key, key)
        ends = [k for k in config if k.endswith(f".{key}")]
        found = setting.values.get(key) or setting.values.get(SHORT.get(key, key)) or config.get(full)
        if found is None and len(ends) == 1:
            found = config[ends[0]]
        if found != text(value):
            return False
    return True


def _baseline(settings: Sequence[Setting], given: str | None) -> tuple[Setting | None, list[str]]:
    """The setting that the others are held against, and a note when it was chosen for lack of a word."""
    known = "; the settings are:\n  " + "\n  ".join(setting.label for setting in settings)
    if given is None:
        if len(settings) < 2:
            return None, ["one setting: there is nothing to compare it with"]
        standard = [setting for setting in settings if matches(setting, {"algo": STANDARD})]
        if len(standard) == 1:
            return standard[0], []
        chosen = (standard or list(settings))[0]
        return chosen, [f"the baseline is {chosen.label}, the first of {len(standard or settings)} that could be; "
                        "choose with --baseline key=value"]  # fmt: skip
    exact = [setting for setting in settings if setting.label == given]
    if len(exact) == 1:
        return exact[0], []
    parts = [part for part in given.replace(" ", ",").split(",") if part]
    if not parts or not all("=" in part for part in parts):
        raise ConfigError(f"--baseline {given} must be key=value, or several between commas{known}")
    found = [setting for setting in settings if matches(setting, dict(part.split("=", 1) for part in parts))]
    if len(found) == 1:
        return found[0], []
    if not found:
        raise ConfigError(f"--baseline {given} is none of them{known}")
    several = "; it could be:\n  " + "\n  ".join(setting.label for setting in found)
    raise ConfigError(f"--baseline {given} is {len(found)} settings: add a key{several}")


def _about(grouping: Grouping, runs: Sequence[Run]) -> list[str]:
    """Notes on how settings were told apart, and on mismatch put in on purpose."""
    notes = []
    if grouping.implied:
        more = len(grouping.implied) - SHOWN
        shown = ", ".join(grouping.implied[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        notes.append(f"differ too, but tell no more settings apart: {shown}")
    if grouping.pooled:
        notes.append(f"pooled over {', '.join(grouping.pooled)}: a seed's score is the mean over them")
    if LENGTH in grouping.keys:
        notes.append("the number of steps is one of the settings: each is scored at its own end")
    injected = Counter(run.injected for run in runs if run.injected)
    if injected:
        kinds = ", ".join(sorted(injected))
        notes.append(f"mismatch injected on purpose ({kinds}) in {sum(injected.values())} of {len(runs)} runs: "
                     "their gap between engine and trainer is not a natural one")  # fmt: skip
    return notes


# -- scores and differences ------------------------------------------------------------------------------------------


def expected(settings: Sequence[Setting]) -> dict[str, set[int]]:
    """The seeds each setting should have: its own, and with one of them those that half of the others have."""
    seeds = {setting.label: {run.seed for run in setting.runs if run.seed is not None} for setting in settings}
    found = {}
    for label, own in seeds.items():
        others = Counter(seed for other, theirs in seeds.items() if other != label for seed in theirs)
        usual = {seed for seed, count in others.items() if 2 * count >= len(settings) - 1}
        found[label] = own | usual if own & usual else own
    return found


def _differences(scored: Sequence[Scored], against: Scored | None, lower: bool) -> list[Difference]:
    """Differences to the baseline over the seeds that both have, p corrected over all settings that are tested.

    Where ``--by`` pools, each is taken over the variants that both have: others have nothing to be held against.
    """
    if against is None:
        return [untested("there is no other setting")] * len(scored)
    span = _span(scored)
    found = []
    for s in scored:
        if s is against:
            found.append(untested("the baseline"))
            continue
        both = shared(s, against)
        if not both:
            found.append(untested(NONE_SHARED))
            continue
        mine, theirs = s.over(both), against.over(both)
        own, other = mine.scores, theirs.scores
        common = [seed for seed in own if seed >= 0 and seed in other]
        pairs = [(seed, own[seed] - other[seed]) for seed in common]
        scale = max((abs(value) for seed in common for value in (own[seed], other[seed])), default=0.0)
        difference = paired(pairs, scale)
        if len(pairs) < 2:
            why = f"seeds in common with the baseline: {len(pairs)}, at least two are needed"
            difference = replace(difference, interval=replace(difference.interval, why=why))
        found.append(bounded(difference, mine, theirs, span))
    told = against.told("the baseline's")
    return [d if s is against else replace(d, claim=claim(d, (s.told(), told)))
            for s, d in zip(scored, corrected(found, lower), strict=True)]  # fmt: skip


def _span(scored: Sequence[Scored]) -> tuple[float, float]:
    """The lowest and highest score of a run; for runs without one, what they logged last stands in."""
    values: list[float | None] = []
    for s in scored:
        for run in s.setting.runs:
            value = s.of_run[id(run)].value
            values.append(tail_mean(run, s.metric, s.last, s.at) if value is None else value)
    return span_of(values)


def mean_over(values: Iterable[float | None]) -> Interval | None:
    """t interval of what is there; None for nothing."""
    there = [value for value in values if value is not None and math.isfinite(value)]
    return t_interval(there) if there else None


def _row(s: Scored, difference: Difference, beyond: int | None, against: Scored | None) -> Row:
    """A setting's line, but for its rank. ``beyond``: the last step of its runs, where it is scored before that."""
    beside = {}
    for name in BESIDE:
        interval = mean_over(_by_seed(s, name))
        if name != s.metric and interval is not None:
            beside[name] = interval
    cost = {name: value for name, axis in (("seconds", Axis.wall), ("tokens", Axis.tokens), ("steps", Axis.step))
            if (value := _cost(s, axis)) is not None}  # fmt: skip
    scores = s.seeds.scores
    warnings = []
    if s.seeds.lost:
        warnings.append(f"{len(scores)} of {s.expected} seeds: {s.told()}")
    if beyond is not None:
        warnings.append(f"scored at step {s.at}, though its runs go on to {beyond}")
    if against is not None:
        warnings += [problem.text for problem in unequal(s, against)]
    injected = sorted({run.injected for run in s.setting.runs if run.injected})
    if injected:
        warnings.append(f"injected mismatch: {', '.join(injected)}")
    return Row(
        setting=s.setting,
        scores=scores,
        interval=t_interval(list(scores.values())),
        difference=difference,
        rank=None,
        other=beside,
        cost=cost,
        robust=interquartile(s.strata),
        expected=s.expected,
        warning="; ".join(warnings),
        lost=s.told(),
        run_scores=tuple(s.of_run[id(run)].value for run in s.setting.runs),
    )


def _by_seed(s: Scored, name: str) -> list[float | None]:
    """A value for each seed of the runs that count; those that ended early would speak of another step."""
    found: dict[object, list[float]] = {}
    for i, run in enumerate(s.setting.runs):
        ended = run.state in (RunState.completed, RunState.unknown) and s.of_run[id(run)].kind != "shorter"
        if ended and (value := tail_mean(run, name, default_last(name), s.at)) is not None:
            found.setdefault(("none", i) if run.seed is None else run.seed, []).append(value)
    return [math.fsum(values) / len(values) for values in found.values()]


def _cost(s: Scored, axis: Axis) -> float | None:
    """Mean of what the runs that came to their end used up."""
    ended = [run for run in s.setting.runs if run.state in (RunState.completed, RunState.unknown) and len(run.step)
             and s.of_run[id(run)].kind != "shorter"]  # fmt: skip
    used = [float(along[-1]) for run in ended if (along := axis_of(run, axis)) is not None]
    return float(np.mean(used)) if used else None


def _ranked(rows: Sequence[Row], lower: bool) -> list[Row]:
    """Rows by mean score, best first, ties with one rank; rows without a score come last and have none."""
    sign = 1.0 if lower else -1.0
    with_score = sorted((row for row in rows if row.scores), key=lambda row: sign * row.interval.mean)
    better = [sum(sign * other.interval.mean < sign * row.interval.mean for other in with_score) for row in with_score]
    ranked = [replace(row, rank=1 + n) for row, n in zip(with_score, better, strict=True)]
    return ranked + [row for row in rows if not row.scores]
