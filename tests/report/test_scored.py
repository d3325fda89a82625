"""At which step runs are scored, which ended early, and what is paired where ``--by`` pools unequal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from report.synthetic import run_in_memory

from trimtab.report.compare import compare
from trimtab.report.model import Comparison, Row, Run, RunState, Verdict
from trimtab.report.page import page
from trimtab.report.score import collapse, ended_early
from trimtab.report.tables import markdown

SHIFTS = (0.0, 0.03, -0.04, 0.05, 0.01, -0.02)


def row_of(comparison: Comparison, algo: str) -> Row:
    return next(row for row in comparison.rows if row.setting.values["algo"] == algo)


def runs_of(algo: str, scores: Sequence[float], config: Mapping[str, Any] | None = None) -> list[Run]:
    return [run_in_memory({"algo.name": algo} | dict(config or {}), seed, [0.0, s, s, s])
            for seed, s in enumerate(scores)]  # fmt: skip


def arm(algo: str, steps: int, planned: int | None, state: RunState = RunState.completed, count: int = 5) -> list[Run]:
    rng = np.random.default_rng(len(algo))
    return [replace(run_in_memory({"algo.name": algo}, seed, (0.5 + 0.02 * rng.normal(size=steps)).tolist(), state),
                    planned=planned) for seed in range(count)]  # fmt: skip


# -- unequal pools ---------------------------------------------------------------------------------------------------


def unequal_runs() -> list[Run]:
    """lr=0.001 is worth 0.1 to whoever has it, the algorithm nothing; the baseline has lr=0.0003 alone."""
    rng = np.random.default_rng(3)
    base = [0.6 + shift for shift in SHIFTS]
    same = [score + float(rng.normal(0, 0.01)) for score in base]
    return [*runs_of("standard", base), *runs_of("decoupled", same),
            *runs_of("decoupled", [score + 0.1 for score in same], {"optim.lr": 0.001})]  # fmt: skip


def test_a_difference_is_taken_over_the_pooled_settings_that_both_have() -> None:
    runs = unequal_runs()
    found = compare(runs, by=["algo"])
    row = row_of(found, "decoupled")
    expected = {seed: float(runs[6 + seed].columns["eval/reward"][-1]) - (0.6 + SHIFTS[seed]) for seed in range(6)}
    assert dict(row.difference.pairs) == pytest.approx(expected)
    assert row.difference.verdict is Verdict.undecided
    (told,) = [p for p in found.problems if p.kind == "unequal"]
    assert told.run == "algo=decoupled"
    assert "only it has: lr=0.001" in told.text and "the difference is over lr=0.0003" in told.text
    assert told.text in row.warning
    assert "only it has: lr=0.001" in markdown(found) and "only it has: lr=0.001" in page(found, runs)
    other = compare(runs, by=["algo"], baseline="algo=decoupled")
    assert dict(row_of(other, "standard").difference.pairs) == pytest.approx({k: -v for k, v in expected.items()})
    assert any("only the baseline has: lr=0.001" in p.text for p in other.problems)


def test_without_a_pooled_setting_in_common_nothing_is_tested() -> None:
    runs = unequal_runs()
    found = compare(
        [*runs[:6], *runs[12:], *runs_of("bypass", [0.9] * 6), *runs_of("bypass", [0.8] * 6, {"optim.lr": 0.001})],
        by=["algo"],
    )
    row = row_of(found, "decoupled")
    assert row.difference.verdict is Verdict.untested and row.difference.pairs == ()
    assert "shares none of the pooled settings" in row.difference.interval.why
    assert any(p.kind == "unequal" and "untested" in p.text for p in found.problems)


def test_equal_pools_are_no_problem() -> None:
    runs = [run for lr in (0.001, 0.003) for algo in ("standard", "decoupled")
            for run in runs_of(algo, [0.6 + s for s in SHIFTS], {"optim.lr": lr})]  # fmt: skip
    assert "unequal" not in {p.kind for p in compare(runs, by=["algo"]).problems}


# -- runs that ended early -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [RunState.completed, RunState.unknown])
@pytest.mark.parametrize("count", [5, 1])
def test_a_setting_that_ended_early_does_not_shorten_the_others(state: RunState, count: int) -> None:
    whole = [*arm("standard", 120, 120), *arm("decoupled", 120, 120)]
    alone = compare(whole)
    found = compare([*whole, *arm("bypass", 36, 120, state, count)])
    assert found.at is None
    for algo in ("standard", "decoupled"):
        assert row_of(found, algo).scores == row_of(alone, algo).scores
    row = row_of(found, "bypass")
    assert row.scores == {} and row.rank is None and row.difference.verdict is Verdict.untested
    assert f"{count} of its 5 seeds ended early" in row.warning
    told = [p.text for p in found.problems if p.kind == "shorter"]
    assert told == ["it ended at step 36 of 120: it has no score"] * count


def test_runs_that_ended_early_are_lost_seeds_of_a_setting_that_others_finished() -> None:
    runs = [*arm("standard", 120, 120), *arm("decoupled", 120, 120)[:3], *arm("decoupled", 60, 120)[3:]]
    row = row_of(compare(runs), "decoupled")
    assert set(row.scores) == {0, 1, 2} and row.lost == "2 of its 5 seeds ended early"
    assert row.difference.verdict is Verdict.undecided and row.difference.p_lost is not None
    assert row.cost["steps"] == 120, "what early ones used up is no cost of a run"


def test_runs_that_were_planned_shorter_do_shorten_it() -> None:
    found = compare([*arm("standard", 120, 120), *arm("decoupled", 60, 60)])
    assert found.at == 60 and len(row_of(found, "decoupled").scores) == 5


def test_without_a_plan_the_longest_run_of_the_setting_tells_it() -> None:
    found = compare([*arm("standard", 120, None), *arm("decoupled", 60, None)[:4], *arm("decoupled", 30, None)[4:]])
    assert found.at == 60 and row_of(found, "decoupled").lost == "1 of its 5 seeds ended early"


@pytest.mark.parametrize(
    ("steps", "goal", "early"),
    [([1, 2, 3], 4, False), ([0, 1, 2], 4, True), (range(118), 120, True), (range(119), 120, False),
     (range(0, 101, 10), 105, False), (range(0, 81, 10), 105, True), (range(201), 120, False), ([], 9, False)],
)  # fmt: skip
def test_which_run_ended_early(steps: Sequence[int], goal: int, early: bool) -> None:
    run = replace(run_in_memory({}, 0, []), step=np.asarray(list(steps), dtype=np.int64))
    assert ended_early(run, goal) is early
    assert not ended_early(run, None)


def test_a_collapse_tells_the_last_value() -> None:
    values = [*np.linspace(0.1, 0.6, 12), 0.58, 0.02]
    told = collapse(run_in_memory({}, 0, {"eval/reward": values}), "eval/reward", 3)
    assert "to 0.02 (step 14)" in told
