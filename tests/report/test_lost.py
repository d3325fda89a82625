"""What is said of settings that lost seeds, of runs of different lengths, and of runs that were done again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report.synthetic import Arm, config_with, rows_of, run_in_memory, write_run, write_sweep

from trimtab.report.compare import compare
from trimtab.report.model import Comparison, Row, Run, RunState, Verdict
from trimtab.report.page import page
from trimtab.report.score import collapse
from trimtab.report.sources import load
from trimtab.report.statistics import holm, two_sided
from trimtab.report.tables import as_json, markdown, settings_csv

STANDARD, OTHER = {"algo.name": "standard"}, {"algo.name": "decoupled"}


def row_of(comparison: Comparison, algo: str = "decoupled") -> Row:
    return next(row for row in comparison.rows if row.setting.values["algo"] == algo)


def arm(name: str, scores: Sequence[float], lost: Sequence[int] = (), state: RunState = RunState.failed) -> list[Run]:
    """A run for each score; those of ``lost`` seeds stand in ``state`` after the first of four steps."""
    made = []
    for seed, value in enumerate(scores):
        gone = seed in lost
        run = run_in_memory({"algo.name": name}, seed, [0.4] if gone else [0.0, value, value, value])
        made.append(replace(run, state=state if gone else run.state, planned=4))
    return made


SIX = (0.50, 0.60, 0.70, 0.80, 0.55, 0.65)
HIGHER = tuple(value + 0.1 + 0.002 * i for i, value in enumerate(SIX))


# -- the rate of wrong verdicts --------------------------------------------------------------------------------------


def null_sweeps(count: int, settings: int, depends: str) -> tuple[int, int, int]:
    """(better, worse, either) over sweeps in which no setting differs and the noise decides which run fails."""
    rng = np.random.default_rng(11)
    names = ("standard", "decoupled", "bypass", "on_policy")[:settings]
    better = worse = either = 0
    for _ in range(count):
        seeds = int(rng.integers(4, 8))
        shared, runs = rng.normal(0.5, 0.02, seeds), list[Run]()
        for name in names:
            noise = rng.normal(0.0, 1.0, seeds)
            hit = rng.random(seeds) < np.where(noise < -0.3, 0.85, 0.02)
            if (depends == "candidates" and name == "standard") or (depends == "baseline" and name != "standard"):
                hit[:] = False
            if depends == "high":  # the runs with the best scores fail: wrong "worse"
                hit = rng.random(seeds) < np.where(noise > 0.3, 0.85, 0.02)
                hit &= name != "standard"
            runs += arm(name, (shared + 0.02 * noise).tolist(), np.flatnonzero(hit).tolist())
        verdicts = {row.difference.verdict for row in compare(runs).rows}
        better += Verdict.better in verdicts
        worse += Verdict.worse in verdicts
        either += bool(verdicts & {Verdict.better, Verdict.worse})
    return better, worse, either


@pytest.mark.parametrize("settings", [2, 4])
@pytest.mark.parametrize("depends", ["candidates", "baseline", "both", "high"])
def test_failures_that_depend_on_the_noise_make_no_setting_better(settings: int, depends: str) -> None:
    better, worse, either = null_sweeps(200, settings, depends)
    print(f"{settings} settings, failures of {depends}: better {better}, worse {worse}, either {either} of 200")
    # At most 5% of the sweeps; 0.9% was measured over 2,000.
    assert either <= 10, (better, worse, either)


# -- one comparison with lost seeds ----------------------------------------------------------------------------------


def test_better_over_the_seeds_that_are_left_is_undecided_when_half_of_them_failed() -> None:
    found = compare([*arm("standard", SIX), *arm("decoupled", HIGHER, lost=(0, 2, 4))])
    row = row_of(found)
    assert row.lost == "3 of its 6 seeds failed"
    assert row.difference.p is not None and row.difference.p < 0.01, "the survivors alone would say better"
    assert row.difference.verdict is Verdict.undecided
    # The lowest score that is known, 0.4, is what the failed runs logged last.
    own = [0.4, HIGHER[1], 0.4, HIGHER[3], 0.4, HIGHER[5]]
    gaps = np.asarray(own) - np.asarray(SIX)
    assert row.difference.p_lost == 1.0 if gaps.mean() <= 0 else two_sided_of(gaps)
    assert "do not decide it" in row.difference.claim
    assert [seed for seed, _ in row.difference.pairs] == [1, 3, 5]


def two_sided_of(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    error = float(gaps.std(ddof=1)) / len(gaps) ** 0.5
    return two_sided(float(gaps.mean()) / error, len(gaps) - 1)


def test_an_effect_that_outweighs_the_lost_seed_is_still_better_and_says_so() -> None:
    base, other = [0.1 + 0.001 * i for i in range(8)], [0.9 + 0.003 * (i % 3) for i in range(8)]
    runs = [*arm("standard", base), *arm("decoupled", other, lost=(3,))]
    row = row_of(compare(runs))
    gaps = np.asarray([o - b for o, b in zip(other, base, strict=True)])
    gaps[3] = 0.1 - base[3]  # the lowest score of all runs
    assert row.difference.p_lost == pytest.approx(two_sided_of(gaps))
    assert row.difference.p_corrected == row.difference.p_lost
    assert row.difference.verdict is Verdict.better
    assert row.difference.claim == "1 of its 8 seeds failed; it is better even with lost seeds counted at the worst"
    swapped = row_of(compare(runs, baseline="algo=decoupled"), "standard")
    assert swapped.difference.verdict is Verdict.worse
    assert "1 of the baseline's 8 seeds failed" in swapped.difference.claim
    lower = row_of(compare(runs, lower=True))
    assert (lower.difference.verdict, lower.difference.p_lost) == (Verdict.worse, row.difference.p_lost)


def test_holm_corrects_the_p_values_that_the_verdicts_go_by() -> None:
    names = ("decoupled", "bypass", "on_policy")
    rng = np.random.default_rng(2)
    runs = arm("standard", SIX)
    for name in names:
        runs += arm(name, (np.asarray(SIX) + rng.normal(0.05, 0.04, 6)).tolist(), lost=(1,) if name == "bypass" else ())
    found = compare(runs)
    used = [row_of(found, name).difference.p_lost for name in names]
    assert [row_of(found, name).difference.p_corrected for name in names] == pytest.approx(
        holm([float(p or 0) for p in used])
    )
    assert used[0] == row_of(found, "decoupled").difference.p, "without lost seeds nothing changes"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (RunState.failed, "2 of its 6 seeds failed"),
        (RunState.running, "2 of its 6 seeds are not finished yet"),
        (RunState.missing, "2 of its 6 seeds are not finished yet"),
        (RunState.preempted, "2 of its 6 seeds are not finished yet"),
    ],
)
def test_every_kind_of_loss_is_told_and_bars_the_survivors_verdict(state: RunState, text: str) -> None:
    row = row_of(compare([*arm("standard", SIX), *arm("decoupled", HIGHER, (0, 4), state)]))
    assert row.lost == text
    assert row.difference.verdict is Verdict.undecided
    assert row.difference.claim.startswith(text)


def test_a_diverged_run_is_a_lost_seed(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"a": Arm(STANDARD), "b": Arm(OTHER, 0.02, nan=(0,))}, tuple(range(6)))
    row = row_of(compare(load([str(tmp_path)])))
    assert row.lost == "1 of its 6 seeds diverged"
    assert row.difference.p is not None and row.difference.p < 0.05 < (row.difference.p_lost or 0)
    assert row.difference.verdict is Verdict.undecided


def test_a_seed_that_nobody_started_is_told_and_bars_nothing() -> None:
    row = row_of(compare([*arm("standard", SIX), *arm("decoupled", HIGHER[:4])]))
    assert row.lost == "2 of its 6 seeds have no run"
    assert row.difference.verdict is Verdict.better
    assert row.difference.claim.startswith("2 of its 6 seeds have no run")


def test_what_was_lost_stands_in_every_output() -> None:
    for lost, verdict in (((0, 2, 4), "undecided"), ((), "better")):
        runs = [*arm("standard", SIX), *arm("decoupled", HIGHER, lost)]
        found = compare(runs)
        html, text, csv = page(found, runs), markdown(found), settings_csv(found)
        content = next(s for s in as_json(found)["settings"] if s["label"] == "algo=decoupled")
        said = "3 of its 6 seeds failed"
        title = re.sub("<[^>]*>", "", html.split("<h1>")[1].split("</h1>")[0])
        assert (said in title, said in text, said in csv, content["seeds_lost"] == said) == (bool(lost),) * 4
        assert content["difference"]["verdict"] == verdict and verdict in csv and verdict in text
        assert (said in content["difference"]["claim"]) == bool(lost)
        sentences = html.split('id="verdict"')[1].split("</section>")[0]
        assert (f"; {said}" in sentences) == bool(lost)
        assert "would have scored within that range" in html, "the assumption, on the Method tab"


# -- lengths ---------------------------------------------------------------------------------------------------------


def ramp(name: str, seed: int, steps: int, effect: float = 0.0, config: Mapping[str, int] | None = None) -> Run:
    """A run whose metric rises by 0.001 a step."""
    values = [0.001 * step + effect + 0.01 * seed for step in range(1, steps + 1)]
    return run_in_memory({"algo.name": name} | dict(config or {}), seed, values)


def test_settings_of_different_lengths_are_scored_at_the_last_step_that_all_reach() -> None:
    rng = np.random.default_rng(0)
    runs = [ramp("standard", seed, 100, float(rng.normal(0, 1e-3))) for seed in range(5)]
    runs += [ramp("decoupled", seed, 200, float(rng.normal(0, 1e-3))) for seed in range(5)]
    found = compare(runs)
    row = row_of(found)
    assert found.at == 100
    assert row.scores == pytest.approx({run.seed: np.mean(run.columns["eval/reward"][97:100]) for run in runs[5:]})
    assert row.difference.verdict is Verdict.undecided, "twice the steps is no merit of the method"
    assert row.warning == "scored at step 100, though its runs go on to 200"
    assert any(p.kind == "longer" and p.run == "algo=decoupled" for p in found.problems)
    assert "at step 100, the last that every setting reaches" in page(found, runs)
    assert "scored at step 100" in markdown(found)
    assert [run["score"] for s in as_json(found)["settings"] for run in s["runs"]] == pytest.approx(
        [score for one in found.rows for score in one.scores.values()]
    )


def test_a_run_that_ended_well_before_its_fellows_is_a_lost_seed() -> None:
    runs = [ramp("standard", seed, 100) for seed in range(4)]
    runs += [ramp("decoupled", seed, 40 if seed == 2 else 99 if seed == 1 else 100) for seed in range(4)]
    found = compare(runs)
    row = row_of(found)
    assert row.lost == "1 of its 4 seeds ended early"
    assert set(row.scores) == {0, 1, 3}, "one step less is no loss"
    assert sorted(p.run for p in found.problems if p.kind == "shorter") == [runs[5].name, runs[6].name]
    assert found.at is None


def test_where_the_length_is_a_setting_each_is_scored_at_its_own_end() -> None:
    rng = np.random.default_rng(0)
    runs = [ramp(name, seed, steps, float(rng.normal(0, 1e-3)), {"steps": steps})
            for name in ("standard", "decoupled") for steps in (100, 200) for seed in range(4)]  # fmt: skip
    found = compare(runs, baseline="algo=standard,steps=100")
    assert (set(found.keys), found.at) == ({"algo", "steps"}, None)
    longer = next(row for row in found.rows if row.setting.values == {"algo": "standard", "steps": "200"})
    assert longer.scores[0] == pytest.approx(0.199, abs=0.01)
    assert any("steps is one of the settings" in note for note in found.notes)
    pooled = compare(runs, by=["algo"])
    assert pooled.at == 100 and len(row_of(pooled).scores) == 4


# -- late collapse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("metric", ["train/reward", "eval/reward"])
def test_a_collapse_in_the_last_steps_is_told(late: int, metric: str) -> None:
    rng = np.random.default_rng(late)
    for count in (60, 300) if metric == "train/reward" else (12, 30):
        values = 0.1 + 0.6 * (1 - np.exp(-4 * np.linspace(0, 1, count))) + 0.02 * rng.normal(size=count)
        width = 10 if metric == "train/reward" else 3
        assert collapse(run_in_memory({}, 0, {metric: values.tolist()}), metric, width) == ""
        values[-late:] = 0.02 * rng.normal(size=late)
        assert f"{metric} fell from" in collapse(run_in_memory({}, 0, {metric: values.tolist()}), metric, width)


def test_the_noise_of_a_last_value_is_hardly_ever_called_a_collapse() -> None:
    rng = np.random.default_rng(9)
    share = 0.1 + 0.6 * (1 - np.exp(-4 * np.linspace(0, 1, 300)))
    runs = [rng.binomial(16, share) / 16 for _ in range(100)]  # mean of 16 rewards of 0 or 1
    assert not any(collapse(run_in_memory({}, 0, {"train/reward": run.tolist()}), "train/reward", 10) for run in runs)


# -- runs done again, and runs that logged nothing -------------------------------------------------------------------


@pytest.mark.parametrize("state", [RunState.failed, RunState.running, RunState.preempted])
def test_a_retry_that_did_not_complete_does_not_displace_a_run_that_did(state: RunState) -> None:
    whole = arm("decoupled", HIGHER)
    retry = replace(arm("decoupled", HIGHER, lost=(1,), state=state)[1], name="retry", attempt=2, updated=9.0)
    for runs in ([*whole, retry], [retry, *whole]):
        found = compare([*arm("standard", SIX), *runs])
        assert row_of(found).scores == pytest.approx(dict(enumerate(HIGHER)))
        (told,) = [p for p in found.problems if p.kind == "superseded"]
        assert told.run == "retry"
        assert told.text.endswith(f"that one completed, this later one did not ({state.value})")


def test_of_two_that_completed_the_longer_counts_and_never_the_better() -> None:
    long, short = ramp("decoupled", 0, 100), replace(ramp("decoupled", 0, 50, effect=9.0), name="short", updated=9.0)
    found = compare([ramp("standard", 0, 100), long, short])
    assert row_of(found).scores[0] == pytest.approx(0.099)
    assert any(p.run == "short" and "more steps" in p.text for p in found.problems)


def test_a_folder_with_a_config_alone_is_a_run_that_logged_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for seed in range(2):
        write_run(tmp_path / str(seed), config_with({}, seed), rows_of(0.5, rng))
    bare = write_run(tmp_path / "2", config_with({}, 2), [])
    for name in ("metrics.jsonl", "status.json", "overrides.yaml"):
        (bare / name).unlink()
    others = {"conf": "defaults:\n  - task: x\nseed: 0\nrun_dir: x\n", "0/.hydra": "seed: 0\n", "notes": "title: x\n",
              ".hydra": "seed: 0\n"}  # fmt: skip
    for name, text in others.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "config.yaml").write_text("seed: 0\n")  # above runs: none itself
    runs = load([str(tmp_path)])
    assert [run.name for run in runs] == ["0", "1", "2"]
    found = compare(runs)
    assert {p.run: p.text for p in found.problems if p.kind == "nothing logged"} == {
        "2": "there is its config, but nothing logged that can be read"
    }
    assert found.rows[0].lost == "1 of its 3 seeds logged nothing"
    assert load([str(bare / "config.yaml")])[0].seed == 2
