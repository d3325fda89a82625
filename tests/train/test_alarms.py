"""Alarms: silent on healthy runs, raised by each planted cause, the same after a resume; the proximal probe's sight."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composing import composed
from toy import ToyPolicy, ToyRollout, toy_batch, toy_spec
from train.test_loop import Killed, KilledAt, lines, parts, run

from trimtab.batch import Sample
from trimtab.build import HandOverProbe
from trimtab.rollout.inject import Injected
from trimtab.spec import Mismatch, MismatchSpec, RunSpec
from trimtab.train.alarms import Alarms, Kind, Past, advice, gap_of
from trimtab.train.proximal_probe import ProximalProbe

BATCH = toy_batch(ToyPolicy(), prompts=5, group=4)


def raised(
    spec: RunSpec, rows: list[dict[str, float]], moved: bool = False, alarms: Alarms | None = None
) -> list[set[str]]:
    """The kinds of each step, of a batch without a gap and the given metrics."""
    alarms = alarms or Alarms(spec)
    first_N = BATCH.rollout_logp_N
    told = [alarms(i, BATCH, BATCH.mask_N, first_N, row, moved) for i, row in enumerate(rows, 1)]
    assert all(x["train/alarms"] == sum(key.startswith("alarm/") for key in x) for x in told)
    return [{key.removeprefix("alarm/") for key in x if key.startswith("alarm/")} for x in told]


def gaps(name: str, values: Any) -> list[dict[str, float]]:
    key = {"kl": "mis_k3_kl", "abs_diff": "train_rollout_logprob_abs_diff", "ess": "mis_ess"}[name]
    return [{f"train/{key}": float(value)} for value in values]


# -- single rules ----------------------------------------------------------------------------------------------------


def test_the_gap_of_tokens_against_a_loop() -> None:
    trainer = [-0.1, -1.0, -2.0, -math.inf, -0.5, math.nan, -0.7, -3.0]
    rollout = [-0.3, -1.1, -2.0, -0.9, math.nan, -0.2, -9.0, -3.0]
    valid = [True] * 7 + [False]
    both = [(t, r) for t, r, v in zip(trainer, rollout, valid, strict=True) if v and not math.isnan(t + r)]
    far = sum(abs(math.exp(t) - math.exp(r)) > 0.1 for t, r in both)
    weights = [math.exp(min(max(t - r, -20), 20)) for t, r in both]
    found = gap_of(*(torch.tensor(x, dtype=torch.float64) for x in (trainer, rollout)), torch.tensor(valid))
    assert (found.tokens, found.far) == (5, far) == (5, 3)
    assert found.ess == pytest.approx(sum(weights) ** 2 / (5 * sum(w * w for w in weights)), rel=1e-12)
    assert gap_of(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)).metrics() == {}


@pytest.mark.parametrize(
    ("dtype", "name", "bound"),
    [("float32", "kl", 1e-5), ("float16", "kl", 1e-3), ("bfloat16", "kl", 1e-2),
     ("float32", "abs_diff", 5e-4), ("float16", "abs_diff", 0.01), ("bfloat16", "abs_diff", 0.05)],
)  # fmt: skip
def test_a_level_is_by_dtype_and_needs_three_of_five_steps(dtype: str, name: str, bound: float) -> None:
    spec = composed(f"rollout.dtype={dtype}")
    over, under = 1.01 * bound, 0.99 * bound
    assert raised(spec, gaps(name, [under] * 50)) == [set()] * 50
    assert raised(spec, gaps(name, [over, under, under, over, over, under, over])) == [
        set(), set(), set(), set(), {name}, set(), {name},
    ]  # fmt: skip
    assert raised(spec, gaps(name, [over] * 9), moved=True) == [set()] * 9  # the policy's own steps explain it
    far = {"kl": 0.101, "abs_diff": 0.201}[name]
    assert raised(spec, gaps(name, [far] * 3), moved=True)[-1] == {name}


def test_far_tokens_are_pooled_and_must_exceed_their_bound_clearly() -> None:
    """1 % of 5 x 600 tokens are 30, three standard errors more 46.4: the mean of five counts must be above 9.3."""
    for count, expected in ((9, False), (10, True)):
        past = Past()
        assert [past.far("far", count, 600, 0.01) for _ in range(6)][-1] is expected
    assert [Past().far("far", 600, 600, 0.01)] == [False]  # one batch is none


def test_no_false_alarm_from_the_published_share_of_far_tokens() -> None:
    """0.3 % of the tokens, as in ABEJA's table, in small batches and large ones: 4000 steps each."""
    random = np.random.default_rng(0)
    for tokens in (30, 600, 4000):
        past = Past()
        assert not any(past.far("far", n, tokens, 0.01) for n in random.binomial(tokens, 0.003, 4000))


def test_the_slope_of_the_field_case_is_told_and_noise_is_not() -> None:
    """|d| rose from 0.011 to 0.036 over 30 steps in one engine and stood still in another."""
    spec, random = composed("rollout.dtype=bfloat16"), np.random.default_rng(1)
    noise = np.exp(0.1 * random.standard_normal(2000))
    rising = [0.011] * 30 + [0.011 + 0.025 * i / 29 for i in range(30)]
    told = raised(spec, gaps("abs_diff", np.array(rising) * noise[:60]))
    assert {"abs_diff_slope"} in told[50:] and set().union(*told[:45]) == set()
    assert set().union(*raised(spec, gaps("abs_diff", 0.02 * noise))) == set()
    assert {"kl_slope"} in raised(spec, gaps("kl", (np.array(rising) * noise[:60]) ** 2 * 2))[50:]
    heavy = np.exp(0.5 * random.standard_normal(2000))
    assert set().union(*raised(spec, gaps("kl", 0.001 * heavy))) == set()
    assert set().union(*raised(spec, gaps("abs_diff", [1e-6 * 1.1**i for i in range(60)]))) == set()  # below the floor


def test_a_sudden_drop_of_the_sample_size() -> None:
    told = raised(composed(), gaps("ess", [0.9] * 9 + [0.3] + [0.9] * 5 + [0.44, 0.46, 0.1, 0.1, 0.1]))
    assert told == [set()] * 15 + [{"ess_drop"}, set(), {"ess_drop"}, {"ess_drop"}, {"ess_drop", "ess"}]


@pytest.mark.parametrize(
    ("mode", "lags", "step"),
    [("sync", [0, 1, 0, 1], 4), ("one_step_off", [1] * 9, None), ("one_step_off", [2, 2], 2),
     ("async", [3, 3, 3], None), ("async", [4, 4], 2)],
)  # fmt: skip
def test_tokens_older_than_the_mode_allows(mode: str, lags: list[int], step: int | None) -> None:
    spec = composed()
    spec = replace(spec, rollout=replace(spec.rollout, mode=type(spec.rollout.mode)[mode], max_lag=3))
    told = raised(spec, [{"train/lag_max": float(lag)} for lag in lags])
    assert next((i for i, kinds in enumerate(told, 1) if kinds == {"stale"}), None) == step


def test_the_probe_tells_an_engine_that_a_hand_over_left_as_it_was() -> None:
    def told(gap: float, moved: float) -> set[str]:
        return raised(composed(), [{"train/probe_mean_abs": gap, "train/probe_engine_moved": moved}])[0]

    assert told(0.01, 0.0) == {"stale"}
    assert told(1e-5, 0.0) == told(0.01, 0.02) == set()  # nothing to take over; taken over, but something else is off


def test_the_command_has_the_runs_own_overrides_for_a_shell() -> None:
    given = ["algo=bypass", "run_dir=/x", "task.stop='a b'", "tracker.tags=[a]", "steps=3", "+launcher=x", "seed=1"]
    assert advice(Kind.kl, given) == "trimtab parity algo=bypass 'task.stop='\"'\"'a b'\"'\"'' seed=1"
    assert {advice(kind, ()) for kind in Kind} == {"trimtab parity", "trimtab probe"}
    assert advice(Kind.kl, ["seed=1"], "runs/a b") == "trimtab parity seed=1 --weights 'runs/a b'"


# -- saying it -------------------------------------------------------------------------------------------------------


def test_an_alarm_is_said_when_it_begins_and_every_hundred_steps(caplog: pytest.LogCaptureFixture) -> None:
    spoilt_N = torch.where((BATCH.row_N == 3) | (BATCH.row_N == 7), math.nan, BATCH.rollout_logp_N)
    spoilt = replace(BATCH, rollout_logp_N=spoilt_N)
    alarms = Alarms(composed(), ["seed=1"])
    metrics = {"train/mis_missing_logprob_count": 5.0}
    with caplog.at_level(logging.WARNING):
        alarms(1, BATCH, BATCH.mask_N, BATCH.rollout_logp_N, {}, False)
        assert caplog.text == ""
        told = [alarms(step, spoilt, BATCH.mask_N, spoilt_N, metrics, False) for step in range(2, 150)]
    assert [r.message.split(" of")[0] for r in caplog.records] == [f"step {n}: alarm missing: 10%" for n in (2, 102)]
    assert all(r.message.endswith("Run: trimtab parity seed=1") for r in caplog.records)
    assert all(x["alarm/missing"] == x["train/alarms"] == 1 for x in told)


@pytest.mark.parametrize(
    ("level", "kl", "said"), [("sequence", 0.011, True), ("sequence", 0.009, False), ("token", 9.0, False)]
)
def test_sequence_weights_about_to_saturate(level: str, kl: float, said: bool) -> None:
    row = {"train/mis_k3_kl": kl, "train/response_length": 1000.0}
    assert (raised(composed(f"level={level}"), [row]) == [{"saturation"}]) is said


# -- in the loop -----------------------------------------------------------------------------------------------------


class FarFrom(ToyRollout):
    """An engine whose reported log-probs are noisy from some training step on, for ``count`` steps."""

    def __init__(self, first: int, count: int, size: float) -> None:
        super().__init__()
        self.span, self.size = range(first, first + count), size

    def generate(self, prompts: Any, sampling: Any) -> list[Sample]:
        samples = super().generate(prompts, sampling)
        if sampling.step not in self.span:
            return samples
        random = np.random.default_rng(sampling.step)
        return [
            replace(s, logps=tuple(x - self.size * abs(float(random.standard_normal())) for x in s.logps))
            for s in samples
        ]


def kinds(folder: Path) -> Iterator[set[str]]:
    for row in lines(folder):
        yield {key.removeprefix("alarm/") for key in row if key.startswith("alarm/")}


HEALTHY = ["algo=decoupled", "algo=bypass", "algo=on_policy", "algo=reinforce"]
MORE = ["optim.epochs=2", "optim.minibatches=2"]


@pytest.mark.parametrize("overrides", [[algo, *more] for algo in HEALTHY for more in ([], MORE)])
def test_healthy_runs_raise_nothing(tmp_path: Path, overrides: list[str]) -> None:
    spec = toy_spec(*overrides, "rollout.probe_every=5", "optim.lr=1e-2", steps=40)
    given = replace(parts(ToyRollout()), probe=HandOverProbe(4, 1e-3))
    run(given, spec, tmp_path)
    assert set().union(*kinds(tmp_path)) == set()
    assert {row["train/alarms"] for row in lines(tmp_path)[1:] if "train/alarms" in row} == {0}


@pytest.mark.parametrize(
    ("mismatch", "expected"),
    [(MismatchSpec(Mismatch.temperature, 0.5), {"kl", "abs_diff"}),
     (MismatchSpec(Mismatch.shift, 1.0), {"kl", "abs_diff"}),
     (MismatchSpec(Mismatch.quantised_weights, 0.3), {"kl", "abs_diff"}), (MismatchSpec(Mismatch.stale, 2), {"stale"}),
     (MismatchSpec(Mismatch.stale, 99), {"stale"})],
)  # fmt: skip
@pytest.mark.parametrize("algo", ["decoupled", "bypass"])
def test_planted_gaps_are_told(tmp_path: Path, mismatch: MismatchSpec, expected: set[str], algo: str) -> None:
    spec = replace(toy_spec(f"algo={algo}", "rollout.probe_every=3", "optim.lr=1e-2", steps=10), mismatch=mismatch)
    given = replace(parts(Injected(ToyRollout(), mismatch)), probe=HandOverProbe(4, None))
    run(given, spec, tmp_path)
    assert set().union(*kinds(tmp_path)) >= expected


def test_a_spike_is_a_drop_of_the_sample_size_and_no_level(tmp_path: Path) -> None:
    run(parts(FarFrom(15, 1, 4.0)), toy_spec(steps=20), tmp_path)
    assert [(i, k) for i, k in enumerate(kinds(tmp_path)) if k] == [(15, {"ess_drop"})]


def test_a_bypass_run_with_several_updates_still_sees_a_small_gap(tmp_path: Path) -> None:
    """The policy's own steps cover the gap in the step's figures; the probe before the first update shows it."""
    spec = toy_spec("algo=bypass", *MORE, "rollout.probe_every=2", "rollout.probe_bound=1", "optim.lr=1e-2", steps=8)
    run(parts(FarFrom(1, 99, 0.02)), spec, tmp_path)
    assert [sorted(k) for k in kinds(tmp_path)][4:9] == [["abs_diff", "kl"] if i % 2 == 0 else [] for i in range(4, 9)]
    blind = replace(spec, rollout=replace(spec.rollout, probe_every=0))
    run(parts(FarFrom(1, 99, 0.02)), blind, tmp_path / "blind")
    assert set().union(*kinds(tmp_path / "blind")) == set()


def test_what_alarms_remember_survives_a_resume(tmp_path: Path) -> None:
    class Both(FarFrom, KilledAt):  # samples as the first, is killed as the second
        def __init__(self, calls: int) -> None:
            KilledAt.__init__(self, calls)
            self.span, self.size = range(4, 99), 0.1
            self.gap *= 0

    spec = toy_spec(steps=9)
    run(parts(Both(99)), spec, tmp_path / "whole")
    with pytest.raises(Killed):
        run(parts(Both(9)), spec, tmp_path / "cut")
    run(parts(Both(99)), spec, tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert [bool(k) for k in kinds(tmp_path / "whole")] == [False] * 6 + [True] * 4


# -- the proximal probe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_proximal_probe_against_a_loop(temperature: float) -> None:
    policy = ToyPolicy()
    batch = toy_batch(policy, prompts=6, group=4)
    spec = toy_spec("algo=bypass", "rollout.probe_every=4", "rollout.probe_sequences=5", *MORE,
                    f"rollout.temperature={temperature}", "optim.microbatch_tokens=20")  # fmt: skip
    probe = ProximalProbe(policy, spec)
    assert probe.saved(batch, batch.mask_N, {}) == {}
    found = probe(4, batch, batch.mask_N)
    rows = [0, 4, 9, 14, 19]  # spread over 24 rows
    logp_N = policy.score(batch, temperature).logp_N.tolist()
    pairs = [(t, r) for t, r, row in zip(logp_N, batch.rollout_logp_N.tolist(), batch.row_N.tolist(), strict=True)
             if row in rows]  # fmt: skip
    d = [t - r for t, r in pairs]
    assert found == {
        "train/probe_proximal_k3_kl": pytest.approx(sum(math.exp(x) - 1 - x for x in d) / len(d), rel=1e-5),
        "train/probe_proximal_abs_diff": pytest.approx(sum(map(abs, d)) / len(d), rel=1e-5),
        "train/probe_proximal_prob_diff_share": sum(abs(math.exp(t) - math.exp(r)) > 0.1 for t, r in pairs) / len(d),
        "train/probe_proximal_tokens": len(d),
    }
    assert probe(5, batch, batch.mask_N) == {} != probe(1, batch, batch.mask_N)


def test_the_time_saved_is_that_of_the_probe_and_no_more_than_a_training_pass() -> None:
    policy, clock = ToyPolicy(), {"time/forward": 1e9}
    batch = toy_batch(policy)
    spec = toy_spec("algo=bypass", "rollout.probe_every=4", *MORE)
    probe = ProximalProbe(policy, spec)
    probe(4, batch, batch.mask_N)
    assert 0 < probe.saved(batch, batch.mask_N, clock)["time/proximal_saved"] < 100
    assert probe.saved(batch, batch.mask_N, {"time/forward": 2e-9})["time/proximal_saved"] == 1e-9
    once = ProximalProbe(policy, toy_spec("algo=bypass", "rollout.probe_every=4"))
    once(4, batch, batch.mask_N)
    assert once.saved(batch, batch.mask_N, clock) == {"time/proximal_saved": 0.0}  # its forward would have served both
    recomputing = ProximalProbe(policy, toy_spec("algo=decoupled", "rollout.probe_every=4"))
    assert recomputing(4, batch, batch.mask_N) == recomputing.saved(batch, batch.mask_N, clock) == {}
