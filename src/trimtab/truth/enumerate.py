"""Every sequence of a problem as one flat batch, and the exact gradient of what training wants.

Shapes: ``P`` prefixes of all prompts (prompts in order, prefixes sorted as text), ``V`` symbols, ``B`` sequences, ``N``
their tokens laid flat. A table [P, V] flattened is the order in which gradients are given out. float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.truth.problem import Problem, Word, sequences, text


@dataclass(frozen=True)
class Enumeration:
    """``labels``: prompt number and prefix of each row of the tables. ``prefix_N``: that row, for each token.

    ``weight_B``: the weight of the sequence's prompt. ``rollout_PV``, ``proximal_PV``: log-probs; ``logits_PV``: of the
    current policy as the problem gives it.
    """

    labels: tuple[tuple[int, str], ...]
    words: tuple[Word, ...]
    prefix_N: Tensor
    token_N: Tensor
    row_N: Tensor
    length_B: Tensor
    prompt_B: Tensor
    weight_B: Tensor
    advantage_B: Tensor
    rollout_PV: Tensor
    proximal_PV: Tensor
    logits_PV: Tensor
    total_weight: float

    def tokens_of(self, logp_PV: Tensor) -> Tensor:
        """Log-prob of each token [N] under a table."""
        return logp_PV[self.prefix_N, self.token_N]

    def sequences_of(self, logp_PV: Tensor) -> Tensor:
        """Log-prob of each sequence [B] under a table."""
        total_B = torch.zeros(len(self.words), dtype=torch.float64)
        return total_B.index_add(0, self.row_N, self.tokens_of(logp_PV))

    @property
    def draw_B(self) -> Tensor:
        """Probability that a prompt, drawn in proportion to its weight, and the rollout policy give this sequence."""
        return self.weight_B / self.total_weight * self.sequences_of(self.rollout_PV).exp()


def enumerate_problem(problem: Problem) -> Enumeration:
    """Lay all sequences flat, prompt by prompt."""
    labels: list[tuple[int, str]] = []
    words: list[Word] = []
    prefix_N: list[int] = []
    prompt_B: list[int] = []
    tables: dict[str, list[tuple[float, ...]]] = {"rollout": [], "proximal": [], "current": []}
    dead = (0.0,) * problem.symbols  # a prefix that no sequence passes, listed for one policy only
    for number, prompt in enumerate(problem.prompts):
        keys = sorted(prompt.current)
        place = {key: len(labels) + i for i, key in enumerate(keys)}
        labels += [(number, key) for key in keys]
        tables["rollout"] += [prompt.rollout.get(key, dead) for key in keys]
        tables["proximal"] += [prompt.proximal.get(key, dead) for key in keys]
        tables["current"] += [prompt.current[key] for key in keys]
        for word in sequences(problem.symbols, problem.length, problem.eos):
            words.append(word)
            prompt_B.append(number)
            prefix_N += [place[text(word[:t])] for t in range(len(word))]
    length_B = torch.tensor([len(word) for word in words])
    advantages = [problem.prompts[p].advantage[text(word)] for p, word in zip(prompt_B, words, strict=True)]
    weights = torch.tensor([p.weight for p in problem.prompts], dtype=torch.float64)
    return Enumeration(
        labels=tuple(labels),
        words=tuple(words),
        prefix_N=torch.tensor(prefix_N),
        token_N=torch.tensor([symbol for word in words for symbol in word]),
        row_N=torch.repeat_interleave(torch.arange(len(words)), length_B),
        length_B=length_B,
        prompt_B=torch.tensor(prompt_B),
        weight_B=weights[torch.tensor(prompt_B)],
        advantage_B=torch.tensor(advantages, dtype=torch.float64),
        rollout_PV=torch.tensor(tables["rollout"], dtype=torch.float64).log_softmax(-1),
        proximal_PV=torch.tensor(tables["proximal"], dtype=torch.float64).log_softmax(-1),
        logits_PV=torch.tensor(tables["current"], dtype=torch.float64),
        total_weight=float(weights.sum()),
    )


def objective(listed: Enumeration, logits_PV: Tensor) -> Tensor:
    """J = Σ_prompts weight Σ_y π(y) A(y), with π the softmax of ``logits_PV``; scalar, differentiable."""
    probability_B = listed.sequences_of(logits_PV.log_softmax(-1)).exp()
    return (listed.weight_B * probability_B * listed.advantage_B).sum()


def target_gradient(listed: Enumeration, logits_PV: Tensor) -> Tensor:
    """∇J in the logits, [P, V]: what a gradient from the current policy's own samples is on average."""
    at_PV = logits_PV.detach().clone().requires_grad_()
    (gradient_PV,) = torch.autograd.grad(objective(listed, at_PV), at_PV)
    return gradient_PV


def ascend(listed: Enumeration, logits_PV: Tensor, step_size: float, steps: int) -> Tensor:
    """Logits after ``steps`` steps of exact-gradient ascent: the inner loop of a batch, without its noise."""
    for _ in range(steps):
        logits_PV = logits_PV + step_size * target_gradient(listed, logits_PV)
    return logits_PV
