"""A gap between engine and trainer made on purpose, of a kind and strength that are known: ``mismatch.*``.

``logit_noise`` is made by the transformers engine itself, ``dtype``, ``kv_fp8`` and ``raw_logprobs`` by how the engine
is started (``engine_spec``), the others around any engine (``Injected``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.batch import Prompt, Sample, Sampling
from trimtab.errors import EngineError
from trimtab.protocol import Rollout, Streaming
from trimtab.spec import KvCacheDtype, LogprobsMode, Mismatch, MismatchSpec, RolloutSpec

_HELD, _LEFT_OUT = "version", "left_out"  # keys of the saved state beside the held weights; no model has such weights


def engine_spec(rollout: RolloutSpec, mismatch: MismatchSpec) -> RolloutSpec:
    """The options that the engine is started with, so that it makes the gap; unchanged where they can't."""
    match mismatch.kind:
        case Mismatch.dtype:
            return replace(rollout, dtype=mismatch.dtype)
        case Mismatch.kv_fp8:
            return replace(rollout, kv_cache_dtype=KvCacheDtype.fp8)
        case Mismatch.raw_logprobs:
            return replace(rollout, logprobs_mode=LogprobsMode.raw)
        case (
            Mismatch.none | Mismatch.logit_noise | Mismatch.temperature | Mismatch.top_p | Mismatch.quantised_weights
            | Mismatch.stale | Mismatch.shift
        ):  # fmt: skip
            return rollout


def moves_scores(kind: Mismatch) -> bool:
    """Whether ``Rollout.score`` shows the gap too, so that a probe of the hand-over can't tell it from a fault."""
    match kind:
        case Mismatch.dtype | Mismatch.kv_fp8 | Mismatch.quantised_weights | Mismatch.stale:
            return True
        case (
            Mismatch.none | Mismatch.logit_noise | Mismatch.temperature | Mismatch.top_p | Mismatch.raw_logprobs
            | Mismatch.shift
        ):  # fmt: skip
            return False


def label(mismatch: MismatchSpec) -> str:
    """The gap in a word or two, such as ``logit_noise 0.3`` or ``dtype bfloat16``; empty for none."""
    match mismatch.kind:
        case Mismatch.none:
            return ""
        case Mismatch.dtype:
            return f"dtype {mismatch.dtype.value}"
        case Mismatch.kv_fp8 | Mismatch.raw_logprobs as kind:
            return kind.value
        case (
            Mismatch.logit_noise | Mismatch.temperature | Mismatch.top_p | Mismatch.quantised_weights | Mismatch.stale
            | Mismatch.shift as kind
        ):  # fmt: skip
            return f"{kind.value} {mismatch.strength:g}"


def inject(engine: Rollout, mismatch: MismatchSpec) -> Rollout:
    """``engine`` with the gap around it; ``engine`` itself for none."""
    if mismatch.kind is Mismatch.none:
        return engine
    return InjectedStream(engine, mismatch) if isinstance(engine, Streaming) else Injected(engine, mismatch)


class Injected:
    """An engine (``protocol.Rollout``) with a gap on purpose; s is ``mismatch.strength``.

    temperature: samples and reports at T (1 + s). top_p: samples from the most probable tokens of mass 1 - s and
    reports their renormalised log-probs. quantised_weights: ``quantised`` at each hand-over. stale: s hand-overs
    are left out between two that are taken, whether or not the weights moved; a checkpoint keeps the weights in the
    engine (``protocol.Stateful``). shift: a share s of the responses report ``shifted`` log-probs.
    With ``Sampling.gap`` false the policy of the last hand-over samples, without the gap.
    ``score`` answers for the weights in the engine, without sampling's gaps (``moves_scores``).
    """

    def __init__(self, engine: Rollout, mismatch: MismatchSpec) -> None:
        self._engine, self._mismatch = engine, mismatch
        self._held: dict[str, Tensor] = {}  # stale: a copy of the weights in the engine
        self._version: int | None = None  # their version
        self._left_out = 0  # hand-overs since
        self._resumed = False
        self._offered: tuple[dict[str, Tensor], int] | None = None  # the last hand-over: the trainer's own tensors

    @property
    def mismatch(self) -> MismatchSpec:
        """The gap."""
        return self._mismatch

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """As the engine, with the gap; greedy sampling (temperature 0) knows neither temperature nor top-p."""
        if not sampling.gap:
            return self._without(prompts, sampling)
        samples = self._engine.generate(prompts, self._gapped(sampling))
        if self._mismatch.kind is not Mismatch.shift:
            return samples
        count, strength = sampling.samples_per_prompt, self._mismatch.strength
        return [
            shifted(sample) if chosen(sampling.seed, i // count, i % count, strength) else sample
            for i, sample in enumerate(samples)
        ]

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand weights over, quantised or not at all where that is the gap."""
        match self._mismatch.kind:
            case Mismatch.quantised_weights | Mismatch.stale:
                self._offered = dict(weights), version
                self._take(*self._offered)
            case _:
                self._engine.load(weights, version)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """The engine's own."""
        return self._engine.score(rows)

    def describe(self) -> dict[str, Any]:
        """The engine's own, and the gap."""
        gap = {"kind": self._mismatch.kind.value, "strength": self._mismatch.strength, "label": label(self._mismatch)}
        return self._engine.describe() | {"mismatch": gap}

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def state(self) -> dict[str, Tensor]:
        """Stale weights and their version, which a resumed run can't make anew; empty for other gaps."""
        if self._version is None:
            return {}
        return {**self._held, _HELD: torch.tensor(self._version), _LEFT_OUT: torch.tensor(self._left_out)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put the weights of ``state`` into the engine."""
        if self._mismatch.kind is not Mismatch.stale:
            return
        if _HELD not in state or _LEFT_OUT not in state:
            raise EngineError(
                "the checkpoint lacks the engine's stale weights: it was written without mismatch=stale; start anew "
                "with resume=no and another run_dir="
            )
        self._hold({k: v for k, v in state.items() if k not in (_HELD, _LEFT_OUT)}, int(state[_HELD]))
        self._left_out, self._resumed = int(state[_LEFT_OUT]), True

    def _gapped(self, sampling: Sampling) -> Sampling:
        """How the engine is asked to sample instead."""
        match self._mismatch.kind:
            case Mismatch.temperature:
                return replace(sampling, temperature=sampling.temperature * (1 + self._mismatch.strength))
            case Mismatch.top_p:
                return replace(sampling, top_p=sampling.top_p * (1 - self._mismatch.strength))
            case _:
                return sampling

    def _without(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """Samples of the policy itself: the gap's weights make room for those of the last hand-over."""
        if self._offered is None:
            return self._engine.generate(prompts, sampling)
        weights, version = self._offered
        if self._version == version:
            return self._engine.generate(prompts, sampling)
        self._engine.load(weights.items(), version)
        samples = self._engine.generate(prompts, sampling)
        if self._version is None:  # quantised
            self._take(weights, version)
        else:
            self._engine.load(self._held.items(), self._version)
        return samples

    def _take(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self._mismatch.kind is Mismatch.quantised_weights:
            self._engine.load(quantised(weights.items(), self._mismatch.strength), version)
        elif self._resumed:  # the hand-over that the saved step ended with, again
            self._resumed = False
        elif self._version is None or self._left_out >= self._mismatch.strength:
            self._hold(weights, version)
        else:
            self._left_out += 1

    def _hold(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._engine.load(weights.items(), version)
        self._held = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
        self._version, self._left_out = version, 0


class InjectedStream(Injected):
    """The same around an engine that samples all the time (``protocol.Streaming``)."""

    def __init__(self, engine: Streaming, mismatch: MismatchSpec) -> None:
        super().__init__(engine, mismatch)
        self._stream = engine

    def _without(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """Other weights would reach the responses that are being written, so quantised ones stay."""
        return self._engine.generate(prompts, sampling)

    def submit(self, key: int, prompt: Prompt, sampling: Sampling) -> None:
        """As the engine, with the gap."""
        self._stream.submit(key, prompt, self._gapped(sampling))

    def finished(self, wait: bool = True) -> tuple[int, list[Sample]] | None:
        """The engine's own."""
        return self._stream.finished(wait)

    def restarts(self) -> int:
        """The engine's own."""
        return self._stream.restarts()


def quantised(weights: Iterable[tuple[str, Tensor]], step: float) -> Iterator[tuple[str, Tensor]]:
    """Each row of each matrix rounded to multiples of ``step`` times its largest magnitude; vectors as they are.

    w -> d round(w / d), d = step max |row|, in float32; ``step`` 1/127 is symmetric int8 by row.
    """
    for name, tensor in weights:
        yield name, _quantised(tensor.detach(), step) if tensor.ndim >= 2 and step > 0 else tensor


def _quantised(matrix: Tensor, step: float) -> Tensor:
    wide = matrix.float()
    unit = step * wide.abs().amax(-1, keepdim=True)
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))  # a row of zeros stays one
    return ((wide / unit).round() * unit).to(matrix.dtype)


def shifted(sample: Sample) -> Sample:
    """The response with each token's log-prob moved to the token behind it; the first keeps its own."""
    return replace(sample, logps=(*sample.logps[:1], *sample.logps[:-1]))


def chosen(seed: int, prompt: int, sample: int, share: float) -> bool:
    """Whether response ``sample`` of prompt ``prompt`` of a call is in the ``share`` of all; fixed by the numbers."""
    digest = hashlib.blake2b(f"shift/{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
