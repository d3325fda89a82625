"""What flows through a step: samples from an engine, then one flat batch.

Shape legend, used in names everywhere: ``N`` response tokens of the whole batch laid flat, ``B`` rows
(one response each), ``G`` group size, ``V`` vocabulary. ``row_N`` is the row number of each token, sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from trimtab.errors import DataError


class Finish(Enum):
    """Why a response ended."""

    stop = "stop"  # an end token, which is the response's last token and has its log-prob
    length = "length"  # max_tokens reached


@dataclass(frozen=True)
class Problem:
    """One task item: the prompt (text, or chat messages) and what its reward needs."""

    id: str
    prompt: str | list[dict[str, str]]
    answer: str
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """A tokenised problem, ready to sample from."""

    problem: Problem
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How an engine samples. ``seed`` fixes every request; ``temperature`` 0 is greedy.

    ``top_p`` below 1 is an injected mismatch: the trainer scores the whole vocabulary.
    ``gap`` false leaves an injected mismatch out: an evaluation is of the policy, not of what was done to its sampler.
    ``step`` is the training step that the samples are for (1, 2, …); a replay engine looks its recording up by it.
    """

    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int
    samples_per_prompt: int = 1
    step: int = 1
    top_p: float = 1.0
    gap: bool = True


@dataclass(frozen=True)
class Sample:
    """One response as its engine reported it (token-in, token-out; never re-tokenised).

    ``logps[i]`` is the engine's log-prob (natural log) of ``ids[i]``; NaN where the engine gave none.
    ``versions[i]`` is the policy version that sampled token i. ``own[i]`` is False for tokens that the
    policy did not choose (tool output); they take no part in weights, metrics or loss.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    logps: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    own: tuple[bool, ...] | None = None

    def check(self, vocabulary: int | None = None) -> None:
        """Raise DataError, naming the problem, when the response breaks the contract."""
        name = self.prompt.problem.id
        for field, values in (("log-probs", self.logps), ("versions", self.versions), ("own flags", self.own)):
            if values is not None and len(values) != len(self.ids):
                raise DataError(
                    f"sample {name}: {len(values)} {field} for {len(self.ids)} response tokens; they must be as many"
                )
        if vocabulary is not None:
            for token in (*self.prompt.ids, *self.ids):
                if not 0 <= token < vocabulary:
                    raise DataError(f"sample {name}: token id {token} is outside the vocabulary of {vocabulary}")
        for i, logp in enumerate(self.logps):
            if 1e-3 < logp < float("inf"):
                raise DataError(
                    f"sample {name}: the engine's log-prob of response token {i} is {logp:.4g}, above 0; "
                    "it returned something else (a logit?): check rollout.logprobs_mode"
                )


@dataclass(frozen=True)
class Batch:
    """Samples laid flat. ``mask_N`` is False where the policy did not choose the token.

    ids_B: per row int64 [prompt + response]; length_B: int64 response lengths; row_N: int64 sorted;
    token_N: int64; rollout_logp_N: float32 nats, NaN where missing; version_N: int64; mask_N: bool;
    group_B: int64 prompt number of each row; reward_B: float32.
    """

    ids_B: tuple[Tensor, ...]
    length_B: Tensor
    row_N: Tensor
    token_N: Tensor
    rollout_logp_N: Tensor
    version_N: Tensor
    mask_N: Tensor
    group_B: Tensor
    reward_B: Tensor

    @property
    def rows(self) -> int:
        return len(self.ids_B)

    @property
    def tokens(self) -> int:
        return int(self.row_N.numel())

    def positions_of(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Flat positions (int64) of all tokens of ``rows``, in the order of ``rows``."""
        ends = self.length_B.cumsum(0)
        starts = ends - self.length_B
        spans = [torch.arange(int(starts[r]), int(ends[r])) for r in rows]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, rows: Sequence[int]) -> Batch:
        """The sub-batch of ``rows``, renumbered from 0 in the given order."""
        index = torch.as_tensor(list(rows), dtype=torch.int64)
        at = self.positions_of(index)
        length = self.length_B[index]
        return Batch(
            ids_B=tuple(self.ids_B[int(r)] for r in index),
            length_B=length,
            row_N=torch.repeat_interleave(torch.arange(len(index)), length),
            token_N=self.token_N[at],
            rollout_logp_N=self.rollout_logp_N[at],
            version_N=self.version_N[at],
            mask_N=self.mask_N[at],
            group_B=self.group_B[index],
            reward_B=self.reward_B[index],
        )


def pack(samples: Sequence[Sample], group_B: Sequence[int], reward_B: Sequence[float]) -> Batch:
    """Lay samples flat. Rows keep the samples' order; empty responses are rows of length 0."""
    length = torch.tensor([len(s.ids) for s in samples], dtype=torch.int64)
    flat = [t for s in samples for t in s.ids]
    own = [o for s in samples for o in (s.own if s.own is not None else (True,) * len(s.ids))]
    return Batch(
        ids_B=tuple(torch.tensor((*s.prompt.ids, *s.ids), dtype=torch.int64) for s in samples),
        length_B=length,
        row_N=torch.repeat_interleave(torch.arange(len(samples)), length),
        token_N=torch.tensor(flat, dtype=torch.int64),
        rollout_logp_N=torch.tensor([x for s in samples for x in s.logps], dtype=torch.float32),
        version_N=torch.tensor([v for s in samples for v in s.versions], dtype=torch.int64),
        mask_N=torch.tensor(own, dtype=torch.bool),
        group_B=torch.tensor(list(group_B), dtype=torch.int64),
        reward_B=torch.tensor(list(reward_B), dtype=torch.float32),
    )


@dataclass(frozen=True)
class Scores:
    """A trainer's pass over a batch: ``logp_N`` and ``entropy_N`` in float32 nats (entropy None if not asked)."""

    logp_N: Tensor
    entropy_N: Tensor | None = None
