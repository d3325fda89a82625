"""A whole trimtab in miniature for tests: a bigram policy, an engine that samples from it, a task of two symbols."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composing import composed
from torch import Tensor

from trimtab.batch import Batch, Finish, Problem, Prompt, Sample, Sampling, Scores, pack
from trimtab.spec import RunSpec

VOCABULARY = 6
END = 5


class ToyTokenizer:
    vocabulary = VOCABULARY
    end_ids = (END,)

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[int, ...]:
        return tuple(int(c) for c in str(prompt))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(i) for i in ids if i != END)

    def ids_containing(self, text: str) -> tuple[int, ...]:
        return tuple(i for i in range(VOCABULARY) if text in str(i))


class ToyPolicy:
    """Log-probs of a token depend on the token before: one [V, V] table, in float64."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokenizer = ToyTokenizer()
        table = 0.3 * torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.table = table.requires_grad_()
        self.initial = table.detach().clone()
        self.forwards = 0
        self.poison: float | None = None

    def _score(self, table: Tensor, batch: Batch, temperature: float) -> Scores:
        before = [ids[len(ids) - int(n) - 1 : -1] for ids, n in zip(batch.ids_B, batch.length_B, strict=True) if n > 0]
        if not before:
            return Scores(table.sum().float() * torch.zeros(0), torch.zeros(0))
        logp_NV = (table[torch.cat(before)] / temperature).log_softmax(-1)
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
        return Scores(logp_NV.gather(1, batch.token_N[:, None])[:, 0].float(), entropy_N.float())

    def score(self, batch: Batch, temperature: float = 1.0, grad: bool = False, entropy: bool = False) -> Scores:
        self.forwards += 1
        scores = self._score(self.table, batch, temperature)
        if self.poison is not None:
            scores = replace(scores, logp_N=scores.logp_N * self.poison)
        return scores if grad else Scores(scores.logp_N.detach())

    def score_reference(self, batch: Batch, temperature: float = 1.0) -> Scores:
        return self._score(self.initial, batch, temperature)

    def parameters(self) -> Iterable[Tensor]:
        return [self.table]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach()

    def state(self) -> dict[str, Tensor]:
        return {"table": self.table.detach()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.table.copy_(state["table"])

    def save_pretrained(self, folder: Path) -> None:
        raise NotImplementedError


class ToyRollout:
    """Samples from its own copy of the table plus a fixed gap, so that the rollout policy is known exactly."""

    def __init__(self, gap: float = 0.0) -> None:
        self.gap = gap * np.random.default_rng(7).standard_normal((VOCABULARY, VOCABULARY))
        self.table = np.zeros((VOCABULARY, VOCABULARY))
        self.version = -1

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.table, self.version = dict(weights)["table"].numpy().copy(), version

    def logp(self, before: int, temperature: float) -> np.ndarray:
        logits = (self.table[before] + self.gap[before]) / temperature
        return logits - np.log(np.exp(logits).sum())

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        return [
            self._one(prompt, sampling, np.random.default_rng([sampling.seed, p, i]))
            for p, prompt in enumerate(prompts)
            for i in range(sampling.samples_per_prompt)
        ]

    def _one(self, prompt: Prompt, sampling: Sampling, random: np.random.Generator) -> Sample:
        ids, logps = list[int](), list[float]()
        while len(ids) < sampling.max_tokens and (not ids or ids[-1] not in sampling.stop_ids):
            logp = self.logp(ids[-1] if ids else prompt.ids[-1], sampling.temperature or 1.0)
            token = int(random.choice(VOCABULARY, p=np.exp(logp))) if sampling.temperature else int(logp.argmax())
            ids.append(token)
            logps.append(float(logp[token]))
        finish = Finish.stop if ids[-1] in sampling.stop_ids else Finish.length
        return Sample(prompt, tuple(ids), tuple(logps), (self.version,) * len(ids), finish)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]] | None:
        return [[float(self.logp(a, 1.0)[b]) for a, b in pairwise(row)] for row in rows]

    def describe(self) -> dict[str, Any]:
        return {"engine": "toy"}

    def close(self) -> None:
        pass


class ToyStreaming(ToyRollout):
    """Writes a token of every open response at each look at what is finished, so hand-overs come in mid-response."""

    def __init__(self, gap: float = 0.0) -> None:
        super().__init__(gap)
        self.tables: dict[int, np.ndarray] = {}
        self.submitted = list[int]()
        self.given = list[list[Sample]]()
        self.most_open = 0
        self._open: dict[int, tuple[Prompt, Sampling, list[tuple[np.random.Generator, list[Any]]]]] = {}

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load(weights, version)
        self.tables[version] = self.table

    def submit(self, key: int, prompt: Prompt, sampling: Sampling) -> None:
        rows = [(np.random.default_rng([sampling.seed, i]), list[Any]()) for i in range(sampling.samples_per_prompt)]
        self._open[key] = (prompt, sampling, rows)
        self.submitted.append(key)
        self.most_open = max(self.most_open, len(self._open))

    def finished(self, wait: bool = True) -> tuple[int, list[Sample]] | None:
        while self._open:
            for key in list(self._open)[:4]:
                self._advance(key)
            ready = self._ready()
            if ready or not wait:
                return self._take(ready[0]) if ready else None
        return None

    def finish_some(self, count: int) -> None:
        """Write the first open groups to their ends."""
        for key in list(self._open)[:count]:
            while not self._is_done(key):
                self._advance(key)

    def restarts(self) -> int:
        return 0

    def _ready(self) -> list[int]:
        return [key for key in self._open if self._is_done(key)]

    def _is_done(self, key: int) -> bool:
        _, sampling, rows = self._open[key]
        return all(self._ended(tokens, sampling) for _, tokens in rows)

    def _ended(self, tokens: list[Any], sampling: Sampling) -> bool:
        return len(tokens) >= sampling.max_tokens or (bool(tokens) and tokens[-1][0] in sampling.stop_ids)

    def _advance(self, key: int) -> None:
        prompt, sampling, rows = self._open[key]
        for random, tokens in rows:
            if not self._ended(tokens, sampling):
                logp = self.logp(tokens[-1][0] if tokens else prompt.ids[-1], sampling.temperature)
                token = int(random.choice(VOCABULARY, p=np.exp(logp)))
                tokens.append((token, float(logp[token]), self.version))

    def _take(self, key: int) -> tuple[int, list[Sample]]:
        prompt, sampling, rows = self._open.pop(key)
        samples = []
        for _, tokens in rows:
            ids, logps, versions = zip(*tokens, strict=True)
            finish = Finish.stop if ids[-1] in sampling.stop_ids else Finish.length
            samples.append(Sample(prompt, ids, logps, versions, finish))
        self.given.append(samples)
        return key, samples


class ToyTask:
    """Reward: share of the response's tokens that repeat the prompt's last symbol."""

    def train(self) -> Sequence[Problem]:
        return [Problem(id=f"t{i}", prompt=str(i % 5), answer=str(i % 5)) for i in range(7)]

    def evaluation(self) -> Sequence[Problem]:
        return [Problem(id=f"e{i}", prompt=str(i), answer=str(i)) for i in range(5)]

    def reward(self, problem: Problem, response: str) -> float:
        return response.count(problem.answer) / max(len(response), 1)

    def fingerprint(self) -> str:
        return "toy"


def toy_batch(policy: ToyPolicy, gap: float = 0.3, prompts: int = 6, group: int = 4, max_tokens: int = 7) -> Batch:
    """A batch sampled from the policy plus a gap."""
    rollout = ToyRollout(gap)
    rollout.load(policy.weights(), 0)
    questions = [Prompt(p, policy.tokenizer.encode(p.prompt)) for p in (*ToyTask().train(), *ToyTask().evaluation())]
    sampling = Sampling(max_tokens, 1.0, (END,), seed=3, samples_per_prompt=group)
    samples = rollout.generate(questions[:prompts], sampling)
    rewards = [ToyTask().reward(s.prompt.problem, policy.tokenizer.decode(s.ids)) for s in samples]
    return pack(samples, [i // group for i in range(len(samples))], rewards)


def toy_spec(*overrides: str, steps: int = 8) -> RunSpec:
    """A configuration of the toy's size."""
    size = [
        "rollout.batch_size=12",
        "rollout.group_size=4",
        "rollout.max_tokens=7",
        "rollout.record_every=0",
        "rollout.probe_every=0",
    ]
    return composed(*size, f"steps={steps}", "evaluation.every=4", "checkpoint.every=3", *overrides)
