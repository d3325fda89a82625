"""What a comparison is made of: runs, the settings they belong to, and what can be said of each. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class RunState(Enum):
    """How a run stands; what is not ``completed`` is listed on every page, never dropped."""

    completed = "completed"
    running = "running"
    failed = "failed"
    preempted = "preempted"
    missing = "missing"  # the manifest expects it and there is nothing
    unknown = "unknown"  # a foreign run that says nothing


@dataclass(frozen=True)
class Run:
    """One run: its flat config (dotted keys) and its metrics by step, each step once (the last attempt's).

    ``step``: ascending; ``columns``: as long as ``step``, NaN where a step lacks the metric or it was non-finite
    (``nonfinite`` counts those). ``injected``: the mismatch put in on purpose, such as ``logit_noise 0.1``, or empty.
    """

    name: str
    config: Mapping[str, Any]
    seed: int | None
    state: RunState
    step: NDArray[np.int64]
    columns: Mapping[str, Floats]
    path: Path | None = None
    run_id: str = ""
    error: str = ""
    attempt: int = 1
    injected: str = ""
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the steps that ``nonfinite`` counts
    updated: float = 0.0  # when it was last written, seconds since 1970; 0: unknown
    remarks: tuple[str, ...] = ()  # what is wrong with its files
    planned: int | None = None  # steps asked for


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed (with ``--by``: in what it leaves out too), each counted once.

    ``values``: the settings that differ over the comparison, as typed.
    """

    label: str
    values: Mapping[str, str]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Interval:
    """A mean with a confidence interval; ``low`` and ``high`` are None, and ``why`` says so, where n is too small."""

    mean: float
    low: float | None
    high: float | None
    n: int
    why: str = ""


class Verdict(Enum):
    """What the corrected p value says of a difference to the baseline."""

    better = "better"
    worse = "worse"
    undecided = "undecided"
    untested = "untested"  # the baseline itself, or fewer than two pairs


@dataclass(frozen=True)
class Difference:
    """Differences to the baseline, seed by seed: t interval, p value, and p corrected for the number of comparisons.

    ``p_lost``: p with lost seeds counted against the difference; it is what is corrected. ``claim``: what they do to
    the verdict, in words; empty without any.
    """

    interval: Interval
    p: float | None
    p_corrected: float | None
    verdict: Verdict
    pairs: tuple[tuple[int, float], ...]
    p_lost: float | None = None
    claim: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the table. ``scores``: seed to score (mean of the last k values of the metric).

    ``run_scores``: of each of the setting's runs. ``lost``: seeds without a score, as ``3 of its 6 seeds failed``.
    """

    setting: Setting
    scores: Mapping[int, float]
    interval: Interval
    difference: Difference
    rank: int | None
    other: Mapping[str, Interval]  # metrics beside the score: training reward, weighted training reward, mismatch, …
    cost: Mapping[str, float]  # seconds, tokens, steps: means over the setting's runs
    robust: Interval | None = None  # interquartile mean with a stratified bootstrap interval, from 10 runs on
    expected: int = 0  # seeds that the setting should have a score for; ``interval.n`` is how many it has
    warning: str = ""  # why the row may flatter the setting: seeds without a score, a mismatch put in on purpose
    lost: str = ""
    run_scores: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A run, or a setting, that a reader must know about: failed, missing, non-finite, collapsed, fewer seeds."""

    kind: str
    run: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """Everything that the page, the tables and the W&B report are rendered from."""

    metric: str
    last: int
    baseline: str
    keys: tuple[str, ...]
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    lower: bool = False  # smaller values of the metric are better
    at: int | None = None  # the step that all are scored at, where some runs go on beyond it
