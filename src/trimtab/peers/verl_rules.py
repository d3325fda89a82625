"""verl's rejection options as rules of ``mis.reject`` (commit 1dda039b; ``legacy_rule``: 418f964a)."""

from __future__ import annotations

from trimtab.errors import ConfigError
from trimtab.peers.verl import RsOption
from trimtab.spec import LOG_RATIO_CLAMP, Level, OverTokens, RejectSpec, Statistic


def rule(option: RsOption, *, upper: float | None, lower: float | None = None) -> RejectSpec:
    """One option of ``rollout_rs``. k1 has bounds on the ratio rollout/proximal, (1/upper, upper) if only one is given.

    Token log-ratios are clamped to +-20 before anything is made of them. Raises ConfigError for a missing bound, and
    for a lower one of k2 and k3, whose statistic starts at 0.
    """
    if upper is None:
        raise ConfigError(f"{option.name} has no threshold; give one, for example 2.0")
    name = option.name.removeprefix("seq_")
    over, _, statistic = name.partition("_")
    level, over_tokens = (Level.token, None) if option.of_tokens else (Level.sequence, OverTokens[over])
    if option.two_sided:
        low = 1 / upper if lower is None else lower
        return RejectSpec(Statistic.ratio, level, over_tokens, low, upper, inverse=True, clamp=LOG_RATIO_CLAMP)
    if lower is not None:
        raise ConfigError(f"{option.name} has no lower bound, only an upper one; lower={lower:g} was given")
    return RejectSpec(Statistic[statistic], level, over_tokens, None, upper, clamp=LOG_RATIO_CLAMP)


def legacy_rule(level: Level, *, upper: float, lower: float | None = None) -> RejectSpec:
    """The older ``rollout_rs``: bounds on proximal/rollout of a token, on a row's product or its geometric mean."""
    low = 1 / upper if lower is None else lower
    match level:
        case Level.token:
            return RejectSpec(Statistic.ratio, Level.token, None, low, upper)
        case Level.sequence:
            return RejectSpec(Statistic.ratio, Level.sequence, OverTokens.sum, low, upper)
        case Level.geometric:
            return RejectSpec(Statistic.ratio, Level.sequence, OverTokens.mean, low, upper)
