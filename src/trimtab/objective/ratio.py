"""The policy ratio current/anchor, per token or per row, in log space."""

from __future__ import annotations

from torch import Tensor

from trimtab.objective.terms import TokenTerms, exponent
from trimtab.spec import RatioLevel


def log_ratio(t: TokenTerms, level: RatioLevel, clamp: float | None) -> Tensor:
    """Logarithm of the ratio at each token [N], with x = current - anchor.

    token: x. sequence: mean of x over the row's counted tokens, whose gradient reaches each of them by 1/count (GSPO).
    sequence_token: the same value, whose gradient is that of the token's own log-prob (GSPO-token). ``clamp``, nats,
    bounds the result, and without one what the dtype can hold does, from above (``exponent_limit``); beyond it the
    gradient is 0, as where the ratio itself saturates. Source: arXiv:1707.06347 (token), arXiv:2507.18071 (GSPO,
    equations 7 and 14).
    """
    x_N = t.current_N - t.anchor_N
    match level:
        case RatioLevel.token:
            pass
        case RatioLevel.sequence:
            x_N = t.at_tokens(t.row_mean(x_N))
        case RatioLevel.sequence_token:
            x_N = t.at_tokens(t.row_mean(x_N.detach())) + (t.current_N - t.current_N.detach())
    return exponent(x_N, clamp)
