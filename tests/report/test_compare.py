"""Comparisons of made-up sweeps with a known truth."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import mpmath
import numpy as np
import pytest
from report.synthetic import Arm, config_with, rows_of, run_in_memory, write_run, write_sweep

from trimtab.errors import ConfigError
from trimtab.report.compare import compare
from trimtab.report.model import Comparison, Row, Run, RunState, Verdict
from trimtab.report.score import collapse, score
from trimtab.report.sources import load

STANDARD, OTHER = {"algo.name": "standard"}, {"algo.name": "decoupled"}


def row_of(comparison: Comparison, label: str) -> Row:
    return next(row for row in comparison.rows if row.setting.label == label)


def kinds(comparison: Comparison) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for problem in comparison.problems:
        found.setdefault(problem.kind, set()).add(problem.run)
    return found


def final(*scores: float | None, arm: dict[str, str] | None = None, metric: str = "eval/reward") -> list[Run]:
    """One run for each seed whose last three values are the given score."""
    return [run_in_memory(arm or STANDARD, seed, {metric: [0.0, value, value, value]})
            for seed, value in enumerate(scores) if value is not None]  # fmt: skip


# -- against independent calculations --------------------------------------------------------------------------------


def test_a_method_that_is_better_by_a_known_amount_under_paired_noise(tmp_path: Path) -> None:
    seeds = tuple(range(6))
    arms = {"a": Arm(STANDARD), "b": Arm(OTHER, 0.05), "c": Arm({"algo.name": "bypass"}, -0.05)}
    truth = write_sweep(tmp_path / "s", arms, seeds, shared=0.2, noise=0.01)
    found = compare(load([str(tmp_path / "s")]))
    assert found.baseline == "algo=standard"
    better, worse = row_of(found, "algo=decoupled"), row_of(found, "algo=bypass")
    assert better.scores == pytest.approx(truth.scores["b"])
    differences = [truth.scores["b"][seed] - truth.scores["a"][seed] for seed in seeds]
    mean, s = float(np.mean(differences)), float(np.std(differences, ddof=1))
    t = mean / (s / math.sqrt(6))
    p = float(mpmath.betainc(2.5, 0.5, 0, 5 / (5 + t * t), regularized=True))
    assert better.difference.interval.mean == pytest.approx(mean)
    assert better.difference.p == pytest.approx(p, rel=1e-8)
    assert better.difference.interval.low == pytest.approx(mean - 2.5705818366147395 * s / math.sqrt(6))
    assert abs(mean - 0.05) < 0.02
    assert (better.difference.verdict, worse.difference.verdict) == (Verdict.better, Verdict.worse)
    assert [row.rank for row in found.rows] == [1, 2, 3]
    assert [row.setting.values["algo"] for row in found.rows] == ["decoupled", "standard", "bypass"]
    # The seeds differ by four times the effect: without pairs nothing could be told.
    assert better.interval.low is not None and row_of(found, "algo=standard").interval.high is not None
    assert better.interval.low < row_of(found, "algo=standard").interval.high


def test_better_is_said_of_null_sweeps_at_most_as_often_as_it_may_be() -> None:
    rng = np.random.default_rng(5)
    sweeps, wrong, better = 200, 0, 0
    names = ("standard", "decoupled", "bypass", "on_policy", "reinforce")
    for _ in range(sweeps):
        seeds = int(rng.integers(3, 7))
        shared = rng.normal(0.5, 0.1, seeds)
        runs = [run for name in names for run in
                final(*(float(v) for v in shared + rng.normal(0, 0.02, seeds)), arm={"algo.name": name})]  # fmt: skip
        verdicts = [row.difference.verdict for row in compare(runs).rows]
        better += Verdict.better in verdicts
        wrong += Verdict.better in verdicts or Verdict.worse in verdicts
    # Binomial: 200 sweeps at 0.05 give more than 19 with probability 0.002, at 0.025 more than 12 with 0.001.
    assert wrong <= 19
    assert better <= 12


def test_an_effect_well_above_the_noise_is_found_nearly_always() -> None:
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(50):
        shared = rng.normal(0.5, 0.1, 5)
        other = shared + 0.1 + rng.normal(0, 0.02, 5)
        found = compare([*final(*map(float, shared)), *final(*map(float, other), arm=OTHER)])
        hits += row_of(found, "algo=decoupled").difference.verdict is Verdict.better
    assert hits >= 48


# -- runs that are not as they should be -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, dict[str, dict[int, float]]]:
    folder = tmp_path_factory.mktemp("troubled") / "s"
    arms = {"a": Arm(STANDARD, twice=(1,)), "b": Arm(OTHER, 0.05, failed=(1,)),
            "c": Arm({"algo.name": "bypass"}, collapsed=(2,), missing=(0,)),
            "d": Arm({"algo.name": "on_policy"}, nan=(0,))}  # fmt: skip
    truth = write_sweep(folder, arms)
    return compare(load([str(folder)])), {name: dict(scores) for name, scores in truth.scores.items()}


def test_every_trouble_is_listed(troubled: tuple[Comparison, dict[str, dict[int, float]]]) -> None:
    found, _ = troubled
    listed = kinds(found)
    assert listed["failed"] == {"4"}
    assert listed["missing"] == {"6"}
    assert listed["collapsed"] == {"8"}
    assert listed["non-finite"] == {"9"}
    assert listed["incomplete"] == {"algo=decoupled", "algo=bypass", "algo=on_policy"}
    assert "superseded" not in listed


def test_what_a_troubled_run_counts_as(troubled: tuple[Comparison, dict[str, dict[int, float]]]) -> None:
    found, scores = troubled
    assert row_of(found, "algo=standard").scores == pytest.approx(scores["a"]), (
        "steps that stand twice: the last counts"
    )
    assert set(row_of(found, "algo=decoupled").scores) == {0, 2}
    assert row_of(found, "algo=bypass").scores == pytest.approx(scores["c"]), "a collapsed run counts with its score"
    assert row_of(found, "algo=bypass").scores[2] == pytest.approx(0.0, abs=0.05)
    assert set(row_of(found, "algo=on_policy").scores) == {1, 2}
    assert [seed for seed, _ in row_of(found, "algo=bypass").difference.pairs] == [1, 2]
    assert row_of(found, "algo=decoupled").warning == "2 of 3 seeds: 1 of its 3 seeds failed"
    assert row_of(found, "algo=decoupled").expected == 3


@pytest.mark.parametrize("state", [RunState.failed, RunState.running, RunState.preempted, RunState.missing])
def test_only_a_run_that_came_to_its_end_has_a_score(state: RunState) -> None:
    run = replace(final(0.5)[0], state=state)
    assert score(run, "eval/reward", 3).value is None
    assert score(run, "eval/reward", 3).kind == state.value
    foreign = score(replace(run, state=RunState.unknown), "eval/reward", 3)
    assert foreign.value == 0.5


def test_a_seed_without_any_run_is_missed_even_without_a_manifest() -> None:
    found = compare([*final(0.5, 0.6, 0.7), *final(0.5, 0.6, arm=OTHER)])
    assert row_of(found, "algo=decoupled").expected == 3
    assert kinds(found)["incomplete"] == {"algo=decoupled"}
    assert "1 of its 3 seeds has no run" in next(p.text for p in found.problems if p.kind == "incomplete")


def test_without_common_seeds_nothing_is_tested() -> None:
    other = [replace(run, seed=seed) for run, seed in zip(final(0.9, 0.8, 0.7, arm=OTHER), (7, 8, 9), strict=True)]
    row = row_of(compare([*final(0.5, 0.6, 0.7), *other]), "algo=decoupled")
    assert row.difference.verdict is Verdict.untested
    assert "seeds in common with the baseline: 0" in row.difference.interval.why
    assert row.rank == 1
    assert row.expected == 3, "other seeds on purpose are none that lack"


def test_one_seed_has_no_interval_and_no_test() -> None:
    row = row_of(compare([*final(0.5), *final(0.9, arm=OTHER)]), "algo=decoupled")
    assert (row.interval.low, row.difference.p, row.difference.verdict) == (None, None, Verdict.untested)
    assert row.interval.why and row.difference.interval.why


def test_runs_without_a_seed_count_but_are_paired_with_nothing() -> None:
    runs = [run_in_memory(arm, None, [0.0, v, v, v], name=f"{arm} {v}")
            for arm in (STANDARD, OTHER) for v in (0.5, 0.6, 0.8)]  # fmt: skip
    found = compare(runs)
    row = row_of(found, "algo=decoupled")
    assert row.interval.n == 3
    assert row.difference.verdict is Verdict.untested
    assert len(kinds(found)["no seed"]) == 6


def test_the_last_attempt_counts_and_the_other_is_listed() -> None:
    first = final(0.9, arm=OTHER)[0]
    again = replace(final(0.4, arm=OTHER)[0], name="again", updated=2.0)
    resumed = replace(final(0.6, arm=OTHER)[0], name="resumed", attempt=2, updated=1.0)
    for runs, expected, lost in (
        ([first, again], 0.4, {first.name}),
        ([again, first], 0.4, {first.name}),
        ([resumed, again, first], 0.6, {first.name, "again"}),
        ([first, replace(again, state=RunState.missing)], 0.9, {"again"}),
    ):
        found = compare([*final(0.5), *runs])
        row = row_of(found, "algo=decoupled")
        assert row.scores == pytest.approx({0: expected})
        assert kinds(found)["superseded"] == lost
        assert len(row.setting.runs) == 1


def test_non_finite_values_before_the_last_ones_are_told_and_do_not_bar_the_score(tmp_path: Path) -> None:
    rows = rows_of(0.5, np.random.default_rng(0))
    rows[10]["eval/reward"], rows[30]["train/grad_norm"], rows[31]["train/grad_norm"] = math.nan, math.inf, math.nan
    write_run(tmp_path / "r", config_with({}), rows)
    found = compare(load([str(tmp_path)]))
    assert found.rows[0].interval.n == 1
    texts = [p.text for p in found.problems if p.kind == "non-finite"]
    assert len(texts) == 1
    assert "train/grad_norm at 2 steps, first 30" in texts[0] and "eval/reward at 1 steps, first 10" in texts[0]


def test_a_run_that_ended_before_the_others_is_told() -> None:
    short = run_in_memory(STANDARD, 1, [0.1, 0.2])
    found = compare([*final(0.5), short])
    assert kinds(found)["shorter"] == {short.name}
    assert found.rows[0].scores == {0: 0.5}
    assert kinds(compare([short]))["few values"] == {short.name}


# -- collapse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_runs_that_learn_are_hardly_ever_called_collapsed(noise: float) -> None:
    rng = np.random.default_rng(3)
    called = 0
    for i in range(100):
        x = np.linspace(0, 1, 300)
        level = (0.1 + 0.6 * (1 - np.exp(-4 * x)), np.full(300, 0.3), 0.1 + 0.5 * x)[i % 3]
        run = run_in_memory({}, 0, {"train/reward": (level + noise * rng.normal(size=300)).tolist()})
        called += bool(collapse(run, "train/reward", 10))
    assert called <= 1


@pytest.mark.parametrize(
    ("peak", "end", "expected"),
    [(0.8, 0.0, True), (0.8, 0.4, True), (0.8, 0.6, False), (0.8, 0.78, False), (0.2, 0.0, True)],
)
def test_losing_more_than_half_of_what_was_gained_is_a_collapse(peak: float, end: float, expected: bool) -> None:
    rng = np.random.default_rng(4)
    level = np.concatenate([np.linspace(0.2, peak, 100), np.linspace(peak, end, 50), np.full(50, end)])
    run = run_in_memory({}, 0, {"train/reward": (level + 0.02 * rng.normal(size=200)).tolist()})
    assert bool(collapse(run, "train/reward", 10)) is expected


def test_a_loss_that_is_noise_is_no_collapse_and_a_rising_loss_is_one_when_lower_is_better() -> None:
    rng = np.random.default_rng(5)
    noise = run_in_memory({}, 0, {"m": rng.normal(0, 1, 300).tolist()})
    assert collapse(noise, "m", 10) == ""
    falling = run_in_memory({}, 0, {"m": np.linspace(1, 0.1, 100).tolist()})
    assert collapse(falling, "m", 10, lower=True) == ""
    assert "fell" in collapse(falling, "m", 10)


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_the_score_is_the_mean_of_the_last_values_and_never_of_the_best_or_of_step_zero() -> None:
    run = run_in_memory({}, 0, [9.0, 0.1, 0.2, 0.3])
    assert score(run, "eval/reward", 3).value == pytest.approx(0.2)
    assert score(run, "eval/reward", 1).value == pytest.approx(0.3)
    begun = replace(run, step=np.asarray([0, 1, 2, 3]))
    assert score(begun, "eval/reward", 4).value == pytest.approx(0.2)


def test_without_evaluation_the_training_reward_stands_in_and_that_is_said() -> None:
    runs = [*final(0.5, 0.6, metric="train/reward"), *final(0.7, 0.7, arm=OTHER, metric="train/reward")]
    found = compare(runs)
    assert (found.metric, found.last) == ("train/reward", 10)
    assert any("no run has eval/reward" in note for note in found.notes)


def test_lower_turns_rank_and_verdict() -> None:
    runs = [*final(0.5, 0.6, 0.7, 0.8), *final(0.41, 0.5, 0.61, 0.7, arm=OTHER)]
    assert row_of(compare(runs), "algo=decoupled").difference.verdict is Verdict.worse
    row = row_of(compare(runs, lower=True), "algo=decoupled")
    assert (row.difference.verdict, row.rank) == (Verdict.better, 1)


def test_wrong_questions_are_answered_with_what_is_allowed() -> None:
    runs = [*final(0.5, 0.6), *final(0.5, 0.6, arm=OTHER), *final(0.1, arm={**OTHER, "mis.tis_level": "sequence"})]
    with pytest.raises(ConfigError, match="closest: eval/reward"):
        compare(runs, metric="eval/rewrad")
    with pytest.raises(ConfigError, match=r"is 2 settings: add a key[\s\S]*level=sequence"):
        compare(runs, baseline="algo=decoupled")
    with pytest.raises(ConfigError, match=r"none of them; the settings are:\n  algo=standard level=token"):
        compare(runs, baseline="algo=bypass")
    with pytest.raises(ConfigError, match="must be key=value"):
        compare(runs, baseline="decoupled")
    with pytest.raises(ConfigError, match="must be at least 1"):
        compare(runs, last=0)
    assert compare(runs, baseline="algo=decoupled,level=sequence").baseline == "algo=decoupled level=sequence"
    assert compare(runs, baseline="algo=standard level=token").baseline == "algo=standard level=token"


def test_the_injected_mismatch_is_labelled() -> None:
    runs = [replace(run, injected="logit_noise 0.1") for run in final(0.5, 0.6)]
    found = compare([*runs, *final(0.7, 0.7, arm=OTHER)])
    assert row_of(found, "algo=standard").warning == "injected mismatch: logit_noise 0.1"
    assert any("injected on purpose (logit_noise 0.1) in 2 of 4 runs" in note for note in found.notes)


def test_pooling_averages_over_what_is_left_out_and_pairs_by_seed() -> None:
    runs = []
    for level, shift in (("token", 0.0), ("sequence", 0.2)):
        for algo, effect in ((STANDARD, 0.0), (OTHER, 0.1)):
            runs += final(*(0.5 + shift + effect + d for d in (0.0, 0.05, 0.11)), arm={**algo, "mis.tis_level": level})
    runs[-1] = replace(runs[-1], columns={"eval/reward": runs[-1].columns["eval/reward"] + 0.02})
    found = compare(runs, by=["algo"])
    assert found.keys == ("algo",)
    assert row_of(found, "algo=standard").scores == pytest.approx({0: 0.6, 1: 0.65, 2: 0.71})
    row = row_of(found, "algo=decoupled")
    assert [value for _, value in row.difference.pairs] == pytest.approx([0.1, 0.1, 0.11])
    assert any("pooled over level" in note for note in found.notes)
    assert "superseded" not in kinds(found)
    lacking = compare(runs[:-1], by=["algo"])
    assert set(row_of(lacking, "algo=decoupled").scores) == {0, 1}, "a seed that lacks one of the levels does not count"


def test_the_interquartile_mean_comes_from_ten_runs_on() -> None:
    nine, ten = final(*np.linspace(0.1, 0.9, 9)), final(*np.linspace(0.1, 1.0, 10), arm=OTHER)
    found = compare([*nine, *ten])
    assert row_of(found, "algo=standard").robust is None
    robust = row_of(found, "algo=decoupled").robust
    assert robust is not None
    assert robust.mean == pytest.approx(0.55)


def test_cost_is_the_mean_of_what_runs_used_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    every = [rows_of(0.5, rng) for _ in range(2)]
    for seed, rows in enumerate(every):
        write_run(tmp_path / str(seed), config_with({}, seed), rows)
    row = compare(load([str(tmp_path)])).rows[0]
    assert row.cost["seconds"] == pytest.approx(np.mean([sum(r.get("time/step", 0.0) for r in rows) for rows in every]))
    assert row.cost["tokens"] == np.mean([rows[-1]["train/tokens"] for rows in every])
    assert row.cost["steps"] == 60
    last = [np.mean([r["train/reward_weighted"] for r in rows[-10:]]) for rows in every]
    assert row.other["train/reward_weighted"].mean == pytest.approx(np.mean(last))


def test_five_hundred_runs_take_seconds(tmp_path: Path) -> None:
    arms = {str(i): Arm({"optim.lr": 1e-4 * (i + 1)}, 0.01 * i) for i in range(50)}
    write_sweep(tmp_path / "s", arms, tuple(range(10)))
    begin = time.perf_counter()
    runs = load([str(tmp_path / "s")])
    loaded = time.perf_counter()
    found = compare(runs)
    ended = time.perf_counter()
    print(f"500 runs of 61 steps: {loaded - begin:.2f} s to load, {ended - loaded:.2f} s to compare")
    assert len(found.rows) == 50
    assert all(row.interval.n == 10 for row in found.rows)
    assert ended - begin < 30
