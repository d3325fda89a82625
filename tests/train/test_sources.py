"""Where samples come from: step by step, one step off, all the time; what is held back, dropped and resumed."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import END, ToyPolicy, ToyRollout, ToyStreaming, ToyTask, ToyTokenizer, toy_batch, toy_spec

from trimtab.batch import Prompt, Sample
from trimtab.errors import EngineError
from trimtab.spec import LossSpec, RatioLevel, RolloutMode, RunSpec, TooOld
from trimtab.track import JsonlTracker, read_metrics, truncate_after
from trimtab.train import checkpoint
from trimtab.train.data import PromptStream
from trimtab.train.lag import lag_metrics, pipelinerl
from trimtab.train.loop import Loop, Parts
from trimtab.train.sources import AllTheTime, make_source

OFF = "rollout.mode=one_step_off"
FLYING = "rollout.mode=async"


def parts(rollout: ToyRollout) -> Parts:
    return Parts(ToyPolicy(), rollout, ToyTask(), JsonlTracker(), lambda *a: {}, lambda *a: None, (END,))


def run(rollout: ToyRollout, spec: RunSpec, folder: Path, resume: bool = False) -> Loop:
    given = parts(rollout)
    loop = Loop(given, spec, folder, "hash")
    if resume:
        snapshot = checkpoint.load_last(folder / "checkpoints")
        assert snapshot is not None
        loop.restore(snapshot)
        truncate_after(folder / "metrics.jsonl", loop.state.step)
    given.tracker.start({}, "id", "name", folder)
    try:
        loop()
    finally:
        given.tracker.finish("completed", {})
    return loop


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def series(folder: Path, name: str) -> list[float]:
    return [row[name] for row in lines(folder) if row["step"]]


def source(rollout: ToyRollout, *overrides: str, steps: int = 8) -> Any:
    spec = toy_spec(*overrides, steps=steps)
    stream = PromptStream(ToyTask().train(), ToyTokenizer(), spec.seed, 3, spec.rollout)
    rollout.load(ToyPolicy().weights(), 0)
    return make_source(rollout, stream, spec, (END,))


# -- one step off ----------------------------------------------------------------------------------------------------


def test_one_step_off_samples_each_step_by_the_weights_before_the_update(tmp_path: Path) -> None:
    taken: list[tuple[int, set[int]]] = []

    class Noted(ToyRollout):
        def generate(self, prompts: Any, sampling: Any) -> list[Sample]:
            samples = super().generate(prompts, sampling)
            if sampling.samples_per_prompt == 4:
                taken.append((sampling.step, {v for s in samples for v in s.versions}))
            return samples

    run(Noted(), toy_spec(OFF, steps=6), tmp_path)
    assert taken == [(1, {0}), (2, {0}), (3, {1}), (4, {2}), (5, {3}), (6, {4})]
    assert series(tmp_path, "train/lag") == [0, 1, 1, 1, 1, 1]
    assert series(tmp_path, "train/lag_share") == [0, 1, 1, 1, 1, 1]


def test_one_step_off_and_sync_differ_by_the_weights_alone() -> None:
    """Same prompts, same seeds: with weights that never change both give the same samples."""
    off, sync = source(ToyRollout(), OFF), source(ToyRollout())
    assert [off.take(step, 0) for step in (1, 2, 3)] == [sync.take(step, 0) for step in (1, 2, 3)]


class Killed(BaseException):
    """Stands for kill -9."""


class KilledAt(ToyRollout):
    def __init__(self, call: int) -> None:
        super().__init__(0.1)
        self.left = call

    def generate(self, *arguments: Any) -> list[Sample]:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().generate(*arguments)


@pytest.mark.parametrize("call", [6, 7, 9, 11])
def test_one_step_off_killed_and_resumed_equals_never_killed(tmp_path: Path, call: int) -> None:
    """The step after a checkpoint trains on samples of weights that no longer exist: they are in the checkpoint."""
    spec = toy_spec(OFF, "optim.epochs=2", "optim.minibatches=3")
    run(ToyRollout(0.1), spec, tmp_path / "whole")
    with pytest.raises(Killed):
        run(KilledAt(call), spec, tmp_path / "cut")
    run(ToyRollout(0.1), spec, tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    whole, cut = (checkpoint.load_last(tmp_path / d / "checkpoints") for d in ("whole", "cut"))
    assert whole is not None and cut is not None
    assert torch.equal(whole.model["table"], cut.model["table"])


def test_samples_survive_a_checkpoint_bit_by_bit_missing_log_probs_and_tool_tokens_too() -> None:
    rollout = ToyRollout()
    first = source(rollout, OFF)
    first.take(1, 0)
    step, samples = first._next
    odd = replace(samples[0], logps=(math.nan, *samples[0].logps[1:]), own=(False, *[True] * (len(samples[0].ids) - 1)))
    first._next = (step, [odd, *samples[1:]])
    second = source(rollout, OFF)
    second.restore(first.state())
    back = second._next[1]
    assert math.isnan(back[0].logps[0]) and back[0].own == odd.own and back[0].ids == odd.ids
    assert back[1:] == samples[1:]


# -- all the time ----------------------------------------------------------------------------------------------------


def oldest(samples: list[Sample]) -> int:
    return min(v for sample in samples for v in sample.versions)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("too_old", ["drop", "correct"])
def test_no_token_is_older_than_max_lag_when_groups_finish_in_turn(tmp_path: Path, max_lag: int, too_old: str) -> None:
    spec = toy_spec(FLYING, f"rollout.max_lag={max_lag}", f"rollout.too_old={too_old}")
    rollout = ToyStreaming(0.1)
    run(rollout, spec, tmp_path)
    assert max(series(tmp_path, "train/lag_max")) == max_lag
    assert series(tmp_path, "train/too_old_dropped")[-1] == 0
    assert rollout.most_open <= 3 * (max_lag + 1)
    assert len(rollout.submitted) == 8 * 3, "no group is sampled that nobody will train on"
    assert rollout.submitted == sorted(set(rollout.submitted))


class Overtaken(ToyStreaming):
    """Group 2 is finished only when five versions have passed it by."""

    def _ready(self) -> list[int]:
        return [key for key in super()._ready() if key != 2 or self.version >= 5]


def test_a_group_that_was_overtaken_is_dropped_and_counted_or_left_to_the_correction(tmp_path: Path) -> None:
    spec = toy_spec(FLYING, "rollout.max_lag=2")
    run(Overtaken(0.1), spec, tmp_path / "drop")
    assert series(tmp_path / "drop", "train/too_old_dropped") == [0, 0, 0, 0, 0, 1, 1, 1]
    assert max(series(tmp_path / "drop", "train/lag_max")) <= 2
    correct = replace(spec, rollout=replace(spec.rollout, too_old=TooOld.correct))
    run(Overtaken(0.1), correct, tmp_path / "correct")
    assert series(tmp_path / "correct", "train/too_old_corrected") == [0, 0, 0, 0, 0, 1, 1, 1]
    assert series(tmp_path / "correct", "train/lag_max")[5] == 5
    assert series(tmp_path / "correct", "train/too_old_dropped")[-1] == 0


def test_a_hand_over_reaches_responses_in_flight_and_every_token_has_its_own_version(tmp_path: Path) -> None:
    spec = toy_spec(FLYING, "rollout.max_lag=1")
    rollout = ToyStreaming(0.1)
    run(rollout, spec, tmp_path)
    mixed = [sample for group in rollout.given for sample in group if len(set(sample.versions)) > 1]
    assert mixed and all(a <= b for sample in mixed for a, b in pairwise(sample.versions))
    for sample in mixed:  # the toy keeps every table it was handed: each token's own one gives its log-prob
        before = sample.prompt.ids[-1]
        for token, logp, version in zip(sample.ids, sample.logps, sample.versions, strict=True):
            logits = rollout.tables[version][before] + rollout.gap[before]
            assert logp == pytest.approx(logits[token] - math.log(sum(math.exp(x) for x in logits)), abs=1e-12)
            before = token


def test_a_resumed_run_keeps_finished_groups_and_samples_the_others_anew() -> None:
    rollout = ToyStreaming()
    first = source(rollout, FLYING, "rollout.max_lag=2")
    first.take(1, 0)
    rollout.finish_some(4)
    state = first.state()
    ready, flying = [group["position"] for group in state["ready"]], state["flying"]
    assert sorted([*ready, *flying]) == [3, 4, 5, 6, 7, 8] and len(ready) >= 4 and flying
    fresh = ToyStreaming()
    second = source(fresh, FLYING, "rollout.max_lag=2")
    second.restore(state)
    samples = second.take(2, 1)
    assert samples == [sample for p in ready[:3] for sample in first._ready[p]]
    assert fresh.submitted == [*flying, 9, 10, 11]


def test_an_engine_that_cannot_sample_meanwhile_is_refused() -> None:
    with pytest.raises(EngineError, match=r"rollout.mode=one_step_off"):
        source(ToyRollout(), FLYING)


def test_an_engine_that_loses_groups_ends_the_run() -> None:
    class Forgetful(ToyStreaming):
        def finished(self, wait: bool = True) -> tuple[int, list[Sample]] | None:
            return None

    with pytest.raises(EngineError, match="lost the groups"):
        source(Forgetful(), FLYING).take(1, 0)


def test_modes_have_names() -> None:
    assert isinstance(source(ToyStreaming(), FLYING), AllTheTime)
    assert [mode.value for mode in RolloutMode] == ["sync", "one_step_off", "async"]


# -- figures ---------------------------------------------------------------------------------------------------------


def test_lag_figures() -> None:
    assert lag_metrics(torch.tensor([0, 0, 1, 3])) == {"train/lag": 1.0, "train/lag_max": 3.0, "train/lag_share": 0.5}
    assert lag_metrics(torch.zeros(0, dtype=torch.int64)) == dict.fromkeys(
        ("train/lag", "train/lag_max", "train/lag_share"), 0.0
    )


@pytest.mark.parametrize("level", [RatioLevel.token, RatioLevel.sequence])
def test_figures_by_the_names_of_pipelinerl(level: RatioLevel) -> None:
    """Against loops over tokens: means of rows' means, ESS over tokens, lag in samples of each row's oldest token."""
    batch = toy_batch(ToyPolicy())
    generator = torch.Generator().manual_seed(1)
    current_N = batch.rollout_logp_N + 0.4 * torch.randn(batch.tokens, generator=generator)
    current_N[3], valid_N = torch.nan, torch.rand(batch.tokens, generator=generator) < 0.9
    lag_N = torch.randint(0, 4, (batch.tokens,), generator=generator)
    found = pipelinerl(batch, valid_N, current_N, lag_N, LossSpec(ratio_level=level, clip_low=0.1, clip_high=0.3))
    ratios: list[list[float]] = [[] for _ in range(batch.rows)]
    for i, row in enumerate(batch.row_N.tolist()):
        if valid_N[i] and i != 3:
            ratios[row].append(math.exp(float(current_N[i]) - float(batch.rollout_logp_N[i])))
    flat = [r for row in ratios for r in row]

    def mean(rows: list[list[float]]) -> float:
        return sum(sum(row) / len(row) for row in rows if row) / batch.rows

    def bites(row: list[float], r: float) -> float:
        value = r if level is RatioLevel.token else math.exp(sum(map(math.log, row)) / len(row))
        return float(not 0.9 <= value <= 1.3)

    assert found["pipelinerl/ratio_new_old"] == pytest.approx(mean(ratios), rel=1e-6)
    kl = [[r - 1 - math.log(r) for r in row] for row in ratios]
    assert found["pipelinerl/kl_new_old"] == pytest.approx(mean(kl), rel=1e-5)
    clamped = [[bites(row, r) for r in row] for row in ratios]
    assert found["pipelinerl/clamp_log_ratio_new_old_indicator"] == pytest.approx(mean(clamped), rel=1e-9)
    assert found["pipelinerl/ess"] == pytest.approx(sum(flat) ** 2 / sum(r * r for r in flat) / len(flat), rel=1e-6)
    lags = [max(lag for lag, r in zip(lag_N.tolist(), batch.row_N.tolist(), strict=True) if r == row) for row in
            range(batch.rows)]  # fmt: skip
    assert found["pipelinerl/lag"] == pytest.approx(sum(lags) / batch.rows * batch.rows)
    assert pipelinerl(batch, torch.zeros_like(valid_N), current_N, lag_N, LossSpec()) == {}


def test_the_prompts_of_a_stream_of_groups_are_those_of_the_steps() -> None:
    stream = PromptStream(ToyTask().train(), ToyTokenizer(), 5, 3, toy_spec().rollout)
    in_steps: list[Prompt] = [prompt for step in range(1, 8) for prompt in stream.step(step)]
    assert [stream.at(i) for i in range(21)] == in_steps
