"""The one module that knows every concrete class: from a RunSpec to the parts of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trimtab.batch import Batch, Sample, pack
from trimtab.config.methods import methods
from trimtab.folder import RunFolder, StatusTracker
from trimtab.method import needs_reference
from trimtab.policy import load as policies
from trimtab.protocol import Policy, Rollout, Task, Tokenizer, Tracker
from trimtab.recording import write_rollouts
from trimtab.rollout.inject import engine_spec, inject, label, moves_scores
from trimtab.rollout.probe import probe, verdict
from trimtab.spec import Engine, RolloutMode, RunSpec, TaskName, TaskSpec, TrackerName
from trimtab.task import make_task
from trimtab.task.arithmetic import ArithmeticTask
from trimtab.track import ConsoleTracker, JsonlTracker, Trackers, alarms_of, read_metrics, setup_progress
from trimtab.train.loop import Parts


def warmup_examples(spec: RunSpec) -> Callable[[random.Random], tuple[str, str]]:
    """Draws (prompt, answer) pairs for the tiny model's warm-up: of the run's task if it is arithmetic, else sums."""
    task = spec.task if spec.task.name is TaskName.arithmetic else TaskSpec()
    pairs = cache(ArithmeticTask(task).examples)  # when they are drawn from: other models need no warm-up
    return lambda draw: draw.choice(pairs())


def make_rollout(spec: RunSpec, folder: Path, device: torch.device) -> Rollout:
    """The engine, with the initial weights and the gap that ``mismatch`` puts around it."""
    return inject(_engine(spec, folder, device), spec.mismatch)


def _engine(spec: RunSpec, folder: Path, device: torch.device) -> Rollout:
    options = engine_spec(spec.rollout, spec.mismatch)
    match options.engine:
        case Engine.vllm if options.mode is RolloutMode["async"]:
            from trimtab.rollout.async_vllm import AsyncVllmEngine

            return AsyncVllmEngine(folder, options)
        case Engine.vllm:
            from trimtab.rollout.vllm import VllmEngine

            return VllmEngine(folder, options)
        case Engine.transformers:
            from trimtab.rollout.transformers import TransformersEngine

            return TransformersEngine(folder, options, spec.mismatch, device)
        case Engine.replay:
            from trimtab.rollout.replay import ReplayEngine

            return ReplayEngine(Path(str(options.path)))


def raised(folder: RunFolder) -> dict[str, int]:
    """In how many steps of metrics.jsonl each alarm held."""
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    return {kind: told["steps"] for kind, told in alarms_of(rows).items()}


def make_tracker(spec: RunSpec, folder: RunFolder) -> Tracker:
    """metrics.jsonl first: it is the truth; what comes after may fail."""
    status = StatusTracker(folder, spec.steps, lambda: raised(folder))
    trackers: list[Tracker] = [JsonlTracker(), status, ConsoleTracker(spec.steps)]
    gap = label(spec.mismatch)
    options = replace(spec.tracker, tags=[*spec.tracker.tags, f"mismatch {gap}"]) if gap else spec.tracker
    match options.name:
        case TrackerName.file:
            pass
        case TrackerName.wandb:
            from trimtab.track.wandb import WandbTracker

            trackers.append(WandbTracker(options))
        case TrackerName.tensorboard:
            from trimtab.track.tensorboard import TensorboardTracker

            trackers.append(TensorboardTracker())
        case TrackerName.trackio:
            from trimtab.track.trackio import TrackioTracker

            trackers.append(TrackioTracker(options))
    return Trackers(trackers)


def stop_ids(spec: RunSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response: the model's own, and those whose text holds the task's stop text."""
    text = spec.task.stop
    return tuple(sorted({*tokenizer.end_ids, *(tokenizer.ids_containing(text) if text else ())}))


@dataclass(frozen=True)
class HandOverProbe:
    """Scores a few responses of the last rollout in both engines at T=1 (``protocol.Probe``).

    ``bound`` None measures without judging: the gap is meant (``mismatch``). ``reported``: the responses' own log-probs
    are the engine's at T=1, so that the probe can tell by how much the hand-over moved them.
    """

    sequences: int
    bound: float | None
    reported: bool = True

    def __call__(self, policy: Policy, rollout: Rollout, samples: Sequence[Sample]) -> dict[str, float]:
        chosen = [sample for sample in samples if sample.ids][: self.sequences]
        engine = rollout.score([(*sample.prompt.ids, *sample.ids) for sample in chosen]) if chosen else None
        if engine is None:
            return {}
        batch = pack(chosen, [0] * len(chosen), [0.0] * len(chosen))
        with torch.no_grad():
            logp_N = policy.score(batch).logp_N.cpu()
        trainer = [row.tolist() for row in logp_N.split(batch.length_B.tolist())]
        responses = [row[-len(sample.ids) :] for row, sample in zip(engine, chosen, strict=True)]
        result = probe(responses, trainer)
        if self.bound is not None:
            verdict(result, self.bound)
        found = {"train/probe_mean_abs": result.mean_abs, "train/probe_max_abs": result.max_abs}
        moves = [abs(new - old) for row, sample in zip(responses, chosen, strict=True)
                 for new, old in zip(row, sample.logps, strict=True)]  # fmt: skip
        moves = [move for move in moves if math.isfinite(move)]
        if self.reported and moves:
            found["train/probe_engine_moved"] = math.fsum(moves) / len(moves)
        return found


def probe_bound(spec: RunSpec) -> float | None:
    """What a probe allows; None where the injected gap shows in the engine's scores."""
    return None if moves_scores(spec.mismatch.kind) else spec.rollout.probe_bound or 0.0


class Pieces:
    """Texts of single tokens. Each is decoded behind an anchor, as decoders drop the space before a first token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._anchor = tokenizer.encode("1")[-1:]
        self._before = self._decode(self._anchor)
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each id; a special token's is empty, part of a character is U+FFFD."""
        return tuple(self._known[token] if token in self._known else self._learn(token) for token in ids)

    def _learn(self, token: int) -> str:
        text = self._decode([*self._anchor, token])
        piece = text.removeprefix(self._before) if text.startswith(self._before) else self._decode([token])
        return self._known.setdefault(token, piece)


@dataclass(frozen=True)
class ParquetRecorder:
    """Writes ``rollouts/step_<n>.parquet`` (``protocol.Recorder``); tokens have texts where ``pieces`` is given."""

    folder: Path
    temperature: float
    pieces: Pieces | None = None

    def __call__(
        self,
        step: int,
        samples: Sequence[Sample],
        texts: Sequence[str],
        batch: Batch,
        advantage_B: Tensor,
        proximal_N: Tensor | None,
    ) -> None:
        rows = None if proximal_N is None else [row.tolist() for row in proximal_N.split(batch.length_B.tolist())]
        write_rollouts(
            self.folder / f"step_{step:08d}.parquet",
            step,
            samples,
            batch.reward_B.tolist(),
            advantage_B.tolist(),
            rows,
            batch.group_B.tolist(),
            texts,
            self.temperature,
            None if self.pieces is None else [self.pieces(sample.ids) for sample in samples],
        )


def make_parts(spec: RunSpec, folder: RunFolder, tracker: Tracker, stack: ExitStack) -> Parts:
    """All parts of a run; the engine's memory is freed when ``stack`` closes."""
    task: Task = make_task(spec.task)  # first: its faults show at once
    with setup_progress("warming up the tiny model") as progress:
        model = policies.prepare(spec.policy, examples=warmup_examples(spec), progress=progress)
    policy = policies.load(model, spec.policy, keep_reference=needs_reference(spec.loss))
    rollout = make_rollout(spec, model, policies.device_of(spec.policy.device))
    stack.callback(rollout.close)
    return Parts(
        policy=policy,
        rollout=rollout,
        task=task,
        tracker=tracker,
        probe=HandOverProbe(spec.rollout.probe_sequences, probe_bound(spec), spec.rollout.temperature == 1.0),
        record=ParquetRecorder(folder.rollouts, spec.rollout.temperature, Pieces(policy.tokenizer)),
        stop_ids=stop_ids(spec, policy.tokenizer),
        shadows=methods(spec.shadow, spec),
    )
