"""The whole loop on the toy: resuming, faults, probes, order of the data."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import END, ToyPolicy, ToyRollout, ToyTask, ToyTokenizer, toy_spec

from trimtab.batch import Problem, Sample
from trimtab.build import HandOverProbe
from trimtab.errors import CheckpointError, DataError, EngineError, NonFiniteError, Preempted, TrimtabError
from trimtab.spec import RolloutSpec, RunSpec
from trimtab.track import JsonlTracker, read_metrics, truncate_after
from trimtab.train import checkpoint
from trimtab.train.data import PromptStream
from trimtab.train.loop import Loop, Parts


def parts(rollout: ToyRollout | None = None, policy: ToyPolicy | None = None) -> Parts:
    return Parts(
        policy=policy or ToyPolicy(),
        rollout=rollout or ToyRollout(0.1),
        task=ToyTask(),
        tracker=JsonlTracker(),
        probe=lambda policy, rollout, samples: {},
        record=lambda *a: None,
        stop_ids=(END,),
    )


def run(given: Parts, spec: RunSpec, folder: Path, resume: bool = False, name: str = "hash") -> Loop:
    loop = Loop(given, spec, folder, name)
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
    """metrics.jsonl without what a clock says."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class KilledAt(ToyRollout):
    def __init__(self, call: int) -> None:
        super().__init__(0.1)
        self.left = call

    def generate(self, *arguments: Any) -> list[Sample]:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().generate(*arguments)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RunSpec], Path]:
    """The folder of a whole run, made once a spec."""
    made: dict[str, Path] = {}

    def of(spec: RunSpec) -> Path:
        if (key := repr(spec)) not in made:
            made[key] = tmp_path_factory.mktemp("whole")
            run(parts(), spec, made[key])
        return made[key]

    return of


@pytest.mark.parametrize("algo", ["decoupled", "bypass", "reinforce"])
@pytest.mark.parametrize("call", [5, 6, 7, 9, 10])
def test_killed_and_resumed_equals_never_killed(
    tmp_path: Path, algo: str, call: int, never_killed: Callable[[RunSpec], Path]
) -> None:
    more = ["optim.epochs=2", "optim.minibatches=3", "optim.schedule=linear", "loss.kl_coef=0.01"]
    spec = toy_spec(f"algo={algo}", *more)
    with pytest.raises(Killed):
        run(parts(KilledAt(call)), spec, tmp_path / "cut")
    run(parts(), spec, tmp_path / "cut", resume=True)
    never = never_killed(spec)
    assert lines(tmp_path / "cut") == lines(never)
    whole, cut = (checkpoint.load_last(folder / "checkpoints") for folder in (never, tmp_path / "cut"))
    assert whole is not None and cut is not None
    assert torch.equal(whole.model["table"], cut.model["table"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_where_it_was(
    tmp_path: Path, number: signal.Signals, never_killed: Callable[[RunSpec], Path]
) -> None:
    spec = toy_spec()
    given = parts()

    class Signalled(ToyTask):
        calls = 0

        def reward(self, problem: Any, response: str) -> float:
            self.calls += 1
            if self.calls == 60:
                os.kill(os.getpid(), number)
            return super().reward(problem, response)

    with pytest.raises(Preempted, match=number.name):
        run(replace(given, task=Signalled()), spec, tmp_path / "cut")
    assert checkpoint.load_last(tmp_path / "cut" / "checkpoints").step == len(lines(tmp_path / "cut")) - 1
    run(parts(), spec, tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(never_killed(spec))


def test_other_data_or_another_configuration_is_refused(tmp_path: Path) -> None:
    spec = toy_spec(steps=3)
    run(parts(), spec, tmp_path)

    class Other(ToyTask):
        def fingerprint(self) -> str:
            return "other"

    with pytest.raises(CheckpointError, match="other training data"):
        run(replace(parts(), task=Other()), spec, tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="configuration hash, this is changed"):
        run(parts(), spec, tmp_path, resume=True, name="changed")


class PoisonedFrom(ToyPolicy):
    """Scores are NaN in training steps ``first``..``last``, counted by training forwards."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last, self.trained = first, last, 0

    def score(self, *arguments: Any, grad: bool = False, **options: Any) -> Any:
        self.trained += grad
        self.poison = math.nan if grad and self.first <= self.trained <= self.last else None
        return super().score(*arguments, grad=grad, **options)


def test_a_nan_step_is_skipped_marked_and_counted(tmp_path: Path) -> None:
    run(parts(policy=PoisonedFrom(3, 3)), toy_spec(steps=5), tmp_path)
    rows = {row["step"]: row for row in lines(tmp_path)}
    assert [rows[s]["train/nonfinite_steps"] for s in range(1, 6)] == [0, 0, 1, 1, 1]
    assert math.isnan(rows[3]["train/loss"]) and rows[3]["train/policy_version"] == rows[2]["train/policy_version"] == 2
    raw = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert raw[3]["nonfinite"] == ["train/loss"]


def test_too_many_nan_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"3 updates in a row.*optim\.max_bad_steps=6"):
        run(parts(policy=PoisonedFrom(3, 99)), toy_spec(steps=20), tmp_path)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 5


class Far(ToyRollout):
    """An engine whose log-probs are far off from some step on."""

    def generate(self, prompts: Any, sampling: Any) -> list[Sample]:
        off = 9.0 if sampling.step in (3, 4) else 0.0
        return [replace(s, logps=tuple(x - off for x in s.logps)) for s in super().generate(prompts, sampling)]


def test_an_all_rejected_batch_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    spec = toy_spec("rs=sequence", "mis.rs_lower_bound=0.01", "mis.rs_upper_bound=100", steps=6)
    run(parts(Far()), spec, tmp_path / "on")
    rows = lines(tmp_path / "on")
    assert [row["train/all_rejected_steps"] for row in rows[1:]] == [0, 0, 1, 2, 2, 2]
    assert rows[3]["train/loss"] == 0.0 and rows[3]["train/mis_ess"] == 0.0
    stop = replace(spec, optim=replace(spec.optim, max_rejected_steps=2))
    with pytest.raises(TrimtabError, match="2 updates in a row were rejected"):
        run(parts(Far()), stop, tmp_path / "stop")


class Broken(ToyRollout):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def generate(self, prompts: Any, sampling: Any) -> list[Sample]:
        first, *rest = super().generate(prompts, sampling)
        match self.how:
            case "short":
                first = replace(first, logps=first.logps[:-1])
            case "none":
                first = replace(first, logps=())
            case "logit":
                first = replace(first, logps=(3.0, *first.logps[1:]))
            case "future":
                first = replace(first, versions=tuple(v + 1 for v in first.versions))
            case "alien":
                first = replace(first, ids=(99, *first.ids[1:]))
        return [first, *rest]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", r"sample t\d: \d log-probs for \d response tokens"),
        ("none", r"sample t\d: 0 log-probs for \d response tokens"),
        ("logit", "above 0.*rollout.logprobs_mode"),
        ("future", "policy version 1 in a batch for version 0"),
        ("alien", "token id 99 is outside the vocabulary of 6"),
    ],
)
def test_a_broken_sample_is_an_error_that_names_it(tmp_path: Path, how: str, message: str) -> None:
    spec = toy_spec("evaluation.every=0")
    with pytest.raises(DataError, match=message):
        run(parts(Broken(how)), spec, tmp_path)


class Stale(ToyRollout):
    """Takes the first weights and none after."""

    def load(self, weights: Any, version: int) -> None:
        if self.version < 0:
            super().load(weights, version)
        self.version = version


@pytest.mark.parametrize("algo", ["decoupled", "bypass"])
def test_a_run_stops_whose_engine_keeps_old_weights(tmp_path: Path, algo: str) -> None:
    probe = HandOverProbe(sequences=4, bound=1e-3)
    common = [f"algo={algo}", "optim.lr=0.1"]
    spec = toy_spec(*common, "rollout.probe_every=1")
    run(replace(parts(ToyRollout()), probe=probe), spec, tmp_path / "fresh")
    assert all(row["train/probe_max_abs"] < 1e-5 for row in lines(tmp_path / "fresh")[1:])
    with pytest.raises(EngineError, match="no longer samples from the trainer's policy"):
        run(replace(parts(Stale()), probe=probe), spec, tmp_path / "stale")
    assert [row["step"] for row in lines(tmp_path / "stale")] == [0]
    # Between two probes the batch itself is one: the first step on old weights ends the run.
    with pytest.raises(EngineError, match=r"step 2: the engine's log-probs of this batch differ.*rollout.probe_bound="):
        run(replace(parts(Stale()), probe=probe), toy_spec(*common, "rollout.probe_every=100"), tmp_path / "later")


def test_every_pass_over_the_data_visits_each_problem_once_in_a_new_order() -> None:
    stream = PromptStream(ToyTask().train(), ToyTokenizer(), 0, 7, RolloutSpec())
    first, second = ([p.problem.id for p in stream.step(s)] for s in (1, 2))
    assert sorted(first) == sorted(second) == sorted(p.id for p in ToyTask().train())
    assert first != second
    assert [p.problem.id for p in stream.step(1)] == first


def test_training_learns_the_toy_task(tmp_path: Path) -> None:
    size = ["rollout.batch_size=48", "rollout.group_size=8", "optim.lr=0.1", "optim.schedule=constant"]
    run(parts(), toy_spec(*size, steps=150), tmp_path)
    rewards = [row["train/reward"] for row in lines(tmp_path)[1:]]
    assert sum(rewards[:10]) / 10 < 0.25
    assert sum(rewards[-10:]) / 10 > 0.5


@pytest.mark.parametrize("prompt", ["", "1" * 300])
@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_a_prompt_without_room_ends_the_run_before_it_begins(tmp_path: Path, prompt: str, split: str) -> None:
    class Long(ToyTask):
        def problems(self, mine: str) -> list[Problem]:
            return [Problem("odd", prompt if mine == split else "1", "1")] * 2

        def train(self) -> list[Problem]:
            return self.problems("train")

        def evaluation(self) -> list[Problem]:
            return self.problems("evaluation")

    message = rf"2 of 2 prompts are empty or longer than 249 tokens, the longest being odd with {len(prompt)}"
    with pytest.raises(DataError, match=message):
        Loop(replace(parts(), task=Long()), toy_spec(), tmp_path, "hash")
