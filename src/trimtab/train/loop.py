"""The training loop: sample, reward, correct and train, hand the weights over, probe, log, save."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.batch import Batch, Finish, Sample, pack
from trimtab.errors import CheckpointError, DataError, EngineError, NonFiniteError, Preempted, TrimtabError
from trimtab.protocol import Policy, Probe, Recorder, Rollout, Stateful, Task, Tracker
from trimtab.spec import Engine, InflightCache, MethodSpec, Mismatch, RolloutMode, RunSpec
from trimtab.train import checkpoint
from trimtab.train.advantages import advantages
from trimtab.train.alarms import Alarms
from trimtab.train.clock import Clock
from trimtab.train.data import PromptStream
from trimtab.train.evaluate import Evaluator
from trimtab.train.lag import lag_metrics, pipelinerl
from trimtab.train.optim import Optimizer
from trimtab.train.proximal_probe import ProximalProbe
from trimtab.train.shadow import ShadowMethods, inputs_of
from trimtab.train.signals import StopSignal
from trimtab.train.sources import make_source
from trimtab.train.state import TrainState
from trimtab.train.update import Outcome, Updater

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, made by build.py."""

    policy: Policy
    rollout: Rollout
    task: Task
    tracker: Tracker
    probe: Probe
    record: Recorder
    stop_ids: tuple[int, ...]
    shadows: Mapping[str, MethodSpec] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


@contextmanager
def objects_set_aside() -> Iterator[None]:
    """Keep the garbage collector off what exists already: the libraries' million objects cost 1 % of a small step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Loop:
    """One run, from its first step or from a snapshot to ``spec.steps``."""

    def __init__(self, parts: Parts, spec: RunSpec, run_dir: Path, config_hash: str) -> None:
        self._parts, self._spec, self._run_dir, self._hash = parts, spec, run_dir, config_hash
        tokenizer = parts.policy.tokenizer
        groups = spec.rollout.batch_size // spec.rollout.group_size
        stream = PromptStream(parts.task.train(), tokenizer, spec.seed, groups, spec.rollout)
        self._source = make_source(parts.rollout, stream, spec, parts.stop_ids)
        self._evaluator = Evaluator(parts.task, tokenizer, spec, parts.stop_ids)
        updates = spec.steps * spec.optim.epochs * spec.optim.minibatches
        self._optimizer = Optimizer(parts.policy.parameters(), spec.optim, updates)
        self._updater = Updater(parts.policy, self._optimizer, spec)
        self._shadow = ShadowMethods(parts.shadows, parts.policy, spec)
        self._alarms = Alarms(spec, parts.overrides)
        self._proximal_probe = ProximalProbe(parts.policy, spec)
        self.state = TrainState()

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def _meta(self) -> dict[str, Any]:
        return {
            "state": self.state.to_dict(),
            "data": self._parts.task.fingerprint(),
            "config_hash": self._hash,
            "source": self._source.state(),
            "alarms": self._alarms.state(),
        }

    def save(self) -> Path:
        """Write a checkpoint of the last finished step."""
        snapshot = checkpoint.Snapshot(
            step=self.state.step,
            model=self._parts.policy.state(),
            optimizer=self._optimizer.state(),
            meta=self._meta(),
            randomness=checkpoint.random_state(),
            engine=self._parts.rollout.state() if isinstance(self._parts.rollout, Stateful) else {},
        )
        return checkpoint.save(self._run_dir / "checkpoints", snapshot, self._spec.checkpoint.keep)

    def restore(self, snapshot: checkpoint.Snapshot) -> None:
        """Go on from a snapshot; refuses another task's data or another configuration."""
        meta = snapshot.meta
        if meta["data"] != self._parts.task.fingerprint():
            raise CheckpointError(
                "the checkpoint was written with other training data (its fingerprint differs); "
                "give the same task.* settings, or start anew with resume=no and another run_dir="
            )
        if meta["config_hash"] != self._hash:
            raise CheckpointError(
                f"the checkpoint was written by configuration {meta['config_hash']}, this is {self._hash}; "
                "give the same overrides, or start anew with resume=no and another run_dir="
            )
        self._parts.policy.load_state(snapshot.model)
        self.state = TrainState(**meta["state"])
        self._source.restore(meta["source"])
        self._alarms.restore(meta["alarms"])
        self._optimizer.load_state(snapshot.optimizer, self.state.updates)
        if isinstance(self._parts.rollout, Stateful):
            self._parts.rollout.load_state(snapshot.engine)
        checkpoint.set_random_state(snapshot.randomness)

    # -- the parts of a step -----------------------------------------------------------------------------------------

    def _ahead(self, sample: Sample) -> bool:
        """Whether a live engine claims a version that doesn't exist yet; recordings count another run's versions."""
        live = self._spec.rollout.engine is not Engine.replay
        return live and any(version > self.state.version for version in sample.versions)

    def _samples(self, step: int) -> list[Sample]:
        samples = self._source.take(step, self.state.version)
        for sample in samples:
            sample.check(self._parts.policy.tokenizer.vocabulary)
            if self._ahead(sample):
                raise DataError(
                    f"sample {sample.prompt.problem.id}: a token of policy version {max(sample.versions)} in a batch "
                    f"for version {self.state.version}; a proximal policy older than the rollout's makes no sense"
                )
        return samples

    def _reward(self, samples: Sequence[Sample]) -> tuple[Batch, list[str]]:
        task, tokenizer = self._parts.task, self._parts.policy.tokenizer
        texts = [tokenizer.decode(sample.ids) for sample in samples]
        rewards = [task.reward(sample.prompt.problem, text) for sample, text in zip(samples, texts, strict=True)]
        groups = [i // self._spec.rollout.group_size for i in range(len(samples))]
        return pack(samples, groups, rewards), texts

    def _moved(self, outcome: Outcome, lag_N: Tensor) -> bool:
        """Whether the policy's own steps are part of the batch's gap, beside what the two sides compute differently."""
        optim, rollout = self._spec.optim, self._spec.rollout
        once = outcome.recomputed or optim.epochs * optim.minibatches == 1
        mixed = rollout.inflight_cache is InflightCache.keep  # a prompt's cache may be of older weights
        return rollout.engine is Engine.replay or mixed or bool(lag_N.any()) or not once

    def _check_gap(self, outcome: Outcome, moved: bool) -> None:
        """The whole batch as a probe at no cost: its mismatch, where nothing but rounding may explain one."""
        spec = self._spec
        meant = spec.mismatch.kind is not Mismatch.none or moved
        gap, bound = outcome.metrics.get("train/train_rollout_logprob_abs_diff", 0.0), spec.rollout.probe_bound
        if bound is None or meant or gap <= bound:
            return
        raise EngineError(
            f"step {self.state.step + 1}: the engine's log-probs of this batch differ from the trainer's by {gap:.3g} "
            f"on average, allowed is {bound:.3g}; the engine lacks the last weights, or reports log-probs of another "
            "distribution. If the gap is meant, raise the bound: "
            f"rollout.probe_bound={2 * gap:.2g}, or check nothing with rollout.probe_every=0"
        )

    def _hand_over(self, samples: Sequence[Sample], clock: Clock) -> dict[str, float]:
        """Weights to the engine, then the probe: both sides must give the last rollout's tokens the same log-probs."""
        with clock("hand_over"):
            self._parts.rollout.load(self._parts.policy.weights(), self.state.version)
        every = self._spec.rollout.probe_every
        if not samples or every == 0 or self.state.step % every != 0:
            return {}
        with clock("probe"):
            return self._parts.probe(self._parts.policy, self._parts.rollout, samples)

    def _count(self, outcome: Outcome) -> dict[str, float]:
        """Update the counters."""
        state = self.state
        state.updates += outcome.applied
        state.version += outcome.applied > 0
        state.nonfinite_steps += outcome.nonfinite
        state.all_rejected_steps += outcome.all_rejected
        state.nonfinite_in_a_row = 0 if outcome.applied else state.nonfinite_in_a_row + outcome.nonfinite
        state.all_rejected_in_a_row = 0 if outcome.applied else state.all_rejected_in_a_row + outcome.all_rejected
        return {
            "train/nonfinite_steps": state.nonfinite_steps,
            "train/all_rejected_steps": state.all_rejected_steps,
            "train/skipped_updates": outcome.nonfinite + outcome.all_rejected,
            "train/policy_version": state.version,
        }

    def _stop_if_broken(self) -> None:
        state, optim = self.state, self._spec.optim
        if state.nonfinite_in_a_row >= optim.max_bad_steps:
            raise NonFiniteError(
                f"{state.nonfinite_in_a_row} updates in a row had a non-finite loss or gradient (last: step "
                f"{state.step}); they were left out and the weights are those before them. Lower optim.lr, try "
                "policy.dtype=float32, find the operation with debug=anomaly, or allow more with "
                f"optim.max_bad_steps={2 * optim.max_bad_steps}"
            )
        if 0 < optim.max_rejected_steps <= state.all_rejected_in_a_row:
            raise TrimtabError(
                f"{state.all_rejected_in_a_row} updates in a row were rejected as a whole; widen mis.rs_lower_bound "
                "and mis.rs_upper_bound, or go on for ever with optim.max_rejected_steps=0"
            )

    def _step(self, step: int) -> dict[str, float]:
        clock, spec = Clock(), self._spec
        with clock("generate"):
            samples = self._samples(step)
        with clock("reward"):
            batch, texts = self._reward(samples)
            cut_B = torch.tensor([sample.finish is Finish.length for sample in samples])
            advantage_B, dropped_B, metrics = advantages(batch, cut_B, spec.advantage, spec.rollout.max_tokens)
        lag_N = (self.state.version - batch.version_N).clamp(min=0)  # a recording counts another run's versions
        if self._shadow.due(step):
            with clock("shadow_gradient"):
                metrics |= self._shadow.gradients(batch, advantage_B, dropped_B, lag_N)
        valid_N = batch.mask_N & ~dropped_B[batch.row_N]
        with clock("probe"):
            metrics |= self._proximal_probe(step, batch, valid_N)
        outcome = self._updater(batch, advantage_B, dropped_B, lag_N, step, clock)
        with clock("shadow"):
            metrics |= self._shadow.figures(inputs_of(batch, advantage_B, dropped_B, lag_N, outcome.first_N))
        moved = self._moved(outcome, lag_N)
        self._check_gap(outcome, moved)
        self.state.step = step
        self.state.tokens += batch.tokens
        metrics |= self._count(outcome) | outcome.metrics | self._hand_over(samples, clock)
        if spec.rollout.record_every and step % spec.rollout.record_every == 0:
            with clock("record"):
                self._parts.record(step, samples, texts, batch, advantage_B, outcome.first_N)
        metrics |= {
            "train/step": step,
            "train/reward": float(batch.reward_B.double().mean()),
            "train/reward_std": float(batch.reward_B.double().std()),
            "train/response_length": float(batch.length_B.double().mean()),
            "train/empty_response_fraction": float((batch.length_B == 0).double().mean()),
            "train/truncated_fraction": float(cut_B.double().mean()),
            "train/tokens": self.state.tokens,
        }
        metrics |= lag_metrics(lag_N) | self._source.metrics()
        if spec.rollout.mode is not RolloutMode["sync"]:
            metrics |= pipelinerl(batch, valid_N, outcome.first_N, lag_N, spec.loss)
            metrics["pipelinerl/entropy"] = metrics.get("train/entropy", math.nan)
        metrics |= self._alarms(step, batch, valid_N, outcome.first_N, metrics, moved)
        if spec.evaluation.every and (step % spec.evaluation.every == 0 or step == spec.steps):
            with clock("evaluate"):
                metrics |= self._evaluator(self._parts.rollout)
        timing = clock.metrics()
        timing |= self._proximal_probe.saved(batch, valid_N, timing)
        return metrics | timing | {"perf/tokens_per_second": batch.tokens / timing["time/step"]}

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first hand-over, and the evaluation before training."""
        clock = Clock()
        self._hand_over((), clock)
        if self.state.step == 0 and self._spec.evaluation.every:
            with clock("evaluate"):
                metrics = self._evaluator(self._parts.rollout)
            self._parts.tracker.log(0, {"train/step": 0} | metrics | clock.metrics())

    def __call__(self, watched: StopSignal | None = None) -> None:
        """Train to ``spec.steps``; raises Preempted after saving when a signal asks to stop.

        ``watched``: a StopSignal already entered, so that none is missed between the set-up and here.
        """
        saved = self.state.step
        with StopSignal() if watched is None else nullcontext(watched) as stop, objects_set_aside():
            if not stop.name:
                self._begin()
            while self.state.step < self._spec.steps:
                if stop.name:
                    break
                step = self.state.step + 1
                self._parts.tracker.log(step, self._step(step))
                self._stop_if_broken()
                if self._spec.checkpoint.every and step % self._spec.checkpoint.every == 0:
                    self.save()
                    saved = step
            if saved != self.state.step:
                self.save()
            if stop.name and self.state.step < self._spec.steps:
                raise Preempted(f"{stop.name} after step {self.state.step}; go on with resume=auto")
