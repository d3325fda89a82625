"""Score-function losses: a detached coefficient times the log-prob."""

from __future__ import annotations

from torch import Tensor

from trimtab.objective.terms import Surrogate, unbounded


def reinforce(logp_N: Tensor, advantage_N: Tensor) -> Surrogate:
    """-A logp. The detached importance weight current/rollout multiplies it, which makes the gradient off-policy exact.

    logp_N: current log-probs, nats, [N]. Source: Williams 1992, doi:10.1007/BF00992696.
    """
    return unbounded(-advantage_N * logp_N)


def cispo(log_ratio_N: Tensor, logp_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A logp: the clip bounds a token's gradient and never takes it away.

    log_ratio_N: current minus anchor, logp_N: current, nats, [N]. clip_low >= 1 leaves the lower side free. The weight
    multiplies the result. Flags: tokens whose coefficient was cut. Source: arXiv:2506.13585 (MiniMax-M1, equation 4).
    """
    r = log_ratio_N.detach().exp()
    loss = unbounded(-r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N * logp_N)
    return Surrogate(loss.loss_N, r < 1.0 - clip_low, r > 1.0 + clip_high, loss.dual_clipped_N)
