"""Shadow methods of a live run: what other corrections would have made of each batch, without touching the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.batch import Batch
from trimtab.method import Inputs, Shadows, policy_term, recomputes, token_gradient
from trimtab.protocol import Policy
from trimtab.spec import MethodSpec, RunSpec
from trimtab.train.plan import microbatches, rows_with
from trimtab.train.scored import blank

Gradient = Sequence[Tensor]


def inputs_of(batch: Batch, advantage_B: Tensor, dropped_B: Tensor, lag_N: Tensor, proximal_N: Tensor) -> Inputs:
    """A batch as methods see it before its first update, where the current policy is the proximal one."""
    return Inputs(
        current_N=proximal_N,
        rollout_N=batch.rollout_logp_N,
        valid_N=batch.mask_N & ~dropped_B[batch.row_N],
        row_N=batch.row_N,
        length_B=batch.length_B,
        advantage_B=advantage_B.float(),
        proximal_N=proximal_N,
        reward_B=batch.reward_B,
        group_B=batch.group_B,
        lag_N=lag_N,
    )


class ShadowMethods:
    """Asks each method about each batch; about gradients every ``shadow_gradient_every`` steps.

    ``methods`` are resolved. Figures are logged as ``shadow/<method>/<figure>`` (docs/metrics.md).
    """

    def __init__(self, methods: Mapping[str, MethodSpec], policy: Policy, spec: RunSpec) -> None:
        self._methods, self._policy, self._spec = methods, policy, spec
        self._applied = MethodSpec(spec.algo, spec.mis, spec.loss)
        self._ask = Shadows(methods)

    def figures(self, inputs: Inputs) -> dict[str, float]:
        """What each method makes of a batch with log-probs from before its first update."""
        if not self._methods or not bool(inputs.valid_N.any()):
            return {}
        return {f"shadow/{name}/{key}": x for name, row in self._ask(inputs).items() for key, x in row.items()}

    def due(self, step: int) -> bool:
        """Whether this step asks about gradients."""
        every = self._spec.shadow_gradient_every
        return bool(self._methods) and every > 0 and step % every == 0

    def gradients(self, batch: Batch, advantage_B: Tensor, dropped_B: Tensor, lag_N: Tensor) -> dict[str, float]:
        """Cosine and norm ratio of each method's policy gradient to the applied one's; the policy is left as it is.

        Costs a forward and a backward pass a method (only the backward, if the batch is one micro-batch).
        """
        unscored = inputs_of(batch, advantage_B, dropped_B, lag_N, blank(batch.tokens))
        cuts = microbatches(batch, rows_with(unscored.valid_N, batch), self._spec.optim.microbatch_tokens)
        if not cuts:
            return {}
        only = self._forward(batch, cuts[0]) if len(cuts) == 1 else None
        proximal_N = blank(batch.tokens)
        for cut in cuts:
            with torch.no_grad():
                logp_N = self._forward(batch, cut) if only is None else only
            proximal_N[batch.positions_of(cut)] = logp_N.detach().cpu()
        inputs = inputs_of(batch, advantage_B, dropped_B, lag_N, proximal_N)

        def of(method: MethodSpec) -> Gradient:
            steer_N = token_gradient(policy_term(method), _as_seen(method, inputs))
            return self._gradient(batch, cuts, steer_N, only)

        own, found = of(self._applied), dict[str, float]()
        for name, method in self._methods.items():
            found |= {f"shadow/{name}/{key}": value for key, value in _compared(of(method), own).items()}
        return found

    def _forward(self, batch: Batch, cut: Sequence[int]) -> Tensor:
        grad = torch.is_grad_enabled()
        return self._policy.score(batch.select(cut), temperature=self._spec.rollout.temperature, grad=grad).logp_N

    def _gradient(self, batch: Batch, cuts: Sequence[Sequence[int]], steer_N: Tensor, only: Tensor | None) -> Gradient:
        """Gradient in the parameters from that in the tokens' log-probs, summed over the cuts; .grad is left alone."""
        parameters = list(self._policy.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for cut in cuts:
            logp_N = self._forward(batch, cut) if only is None else only
            steer = steer_N[batch.positions_of(cut)].to(logp_N)
            parts = torch.autograd.grad(logp_N, parameters, steer, retain_graph=only is not None, allow_unused=True)
            for whole, part in zip(total, parts, strict=True):
                if part is not None:
                    whole += part
        return total


def _as_seen(method: MethodSpec, inputs: Inputs) -> Inputs:
    """What the method itself would have: no proximal log-probs where it takes no forward for them."""
    return inputs if recomputes(method) else replace(inputs, proximal_N=None)


def _compared(other: Gradient, own: Gradient) -> dict[str, float]:
    """grad_cosine, and grad_norm_ratio |other| / |own|; left out is what a gradient of 0 leaves undefined."""
    size, own_size = (math.sqrt(sum(float(x.double().square().sum()) for x in gradient)) for gradient in (other, own))
    if own_size == 0:
        return {}
    if size == 0:
        return {"grad_norm_ratio": 0.0}
    dot = sum(float((x.double() * y.double()).sum()) for x, y in zip(other, own, strict=True))
    return {"grad_cosine": dot / (size * own_size), "grad_norm_ratio": size / own_size}
