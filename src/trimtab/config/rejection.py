"""What each rule of ``mis.reject`` must agree on with itself and with the algorithm."""

from __future__ import annotations

import math
from typing import Iterator

from trimtab.config.keys import written
from trimtab.config.ranges import wrong
from trimtab.spec import Algo, Level, Pair, RejectSpec, RunSpec, Statistic

EXAMPLE = "'mis.reject=[{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}]'"
AT_EQUAL = {Statistic.ratio: 1.0, Statistic.mult_error: 1.0}
"""The statistic of equal log-probs; 0 for all others."""
LEAST = {Statistic.ratio: 0.0, Statistic.k2: 0.0, Statistic.k3: 0.0, Statistic.abs: 0.0, Statistic.mult_error: 1.0}
"""What a statistic never falls below."""
EVEN = (Statistic.k2, Statistic.abs, Statistic.mult_error)
"""Statistics that are the same for d and for -d."""


def rejection(spec: RunSpec) -> Iterator[str]:
    """Bounds in order around what equal log-probs give, a way over the tokens, policies that the algorithm scores."""
    for rule in spec.mis.reject:
        for allowed in (*_bounds(rule), *_level(rule), *_unused(rule), *_pair(rule, spec.algo.name)):
            yield wrong("mis.reject", [rule], allowed, EXAMPLE)


def _bounds(rule: RejectSpec) -> Iterator[str]:
    neutral = AT_EQUAL.get(rule.statistic, 0.0)
    low = -math.inf if rule.lower is None else rule.lower
    high = math.inf if rule.upper is None else rule.upper
    if rule.lower is None and rule.upper is None:
        yield "a rule with lower, upper or both"
    elif math.isnan(low) or math.isnan(high) or not low <= neutral <= high:
        yield f"lower <= {written(neutral)} <= upper, so that equal log-probs are kept"
    if rule.clamp is not None and not 0 < rule.clamp < math.inf:
        yield "clamp > 0, or null"


def _unused(rule: RejectSpec) -> Iterator[str]:
    statistic = rule.statistic
    if rule.lower is not None and statistic is not Statistic.ratio and rule.lower <= LEAST.get(statistic, -math.inf):
        yield f"lower=null with statistic={statistic.name}, which is never below {written(LEAST[statistic])}"
    if rule.inverse and statistic in EVEN:
        yield f"inverse=false with statistic={statistic.name}, which is the same for d and -d"
    if rule.clamp is not None and statistic is Statistic.prob_diff:
        yield "clamp=null with statistic=prob_diff, which is of no log-ratio"


def _level(rule: RejectSpec) -> Iterator[str]:
    match rule.level:
        case Level.token if rule.over_tokens is not None:
            yield "over_tokens=null with level=token"
        case Level.sequence if rule.over_tokens is None:
            yield "over_tokens=sum, mean, max or every with level=sequence"
        case Level.geometric:
            yield "level=token or level=sequence; a geometric mean is level=sequence with over_tokens=mean"
        case _:
            pass


def _pair(rule: RejectSpec, algo: Algo) -> Iterator[str]:
    match algo:
        case Algo.bypass | Algo.on_policy if rule.pair in (Pair.proximal_rollout, Pair.current_proximal):
            yield f"pair=current_rollout or null with algo={algo.name}, which scores no proximal policy"
        case _:
            pass
