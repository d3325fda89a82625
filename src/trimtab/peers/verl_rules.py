"""verl's options of its rollout correction, as it reads them, and its rejection as rules of ``mis.reject``.

Commit 1dda039b; ``legacy_*``: 418f964a. What verl refuses is refused here, with the name of its option.
"""

from __future__ import annotations

import math

from trimtab.errors import ConfigError
from trimtab.peers.options import member
from trimtab.peers.verl import RsOption
from trimtab.spec import LOG_RATIO_CLAMP, Level, OverTokens, RejectSpec, Statistic

Bounds = tuple[float | None, float]


def threshold(option: str, value: object) -> Bounds:
    """(lower, upper) of a threshold: a number, or text, "2.0" or "0.5_2.0"; one number is the upper bound.

    ``option``: the name it is given as. Raises ConfigError unless 0 < lower <= upper.
    """
    allowed = 'allowed: a number > 0, or text "lower_upper" with 0 < lower <= upper; for example "0.5_2.0"'
    low, _, high = str(value).rpartition("_")
    try:
        lower, upper = None if not low else float(low), float(high)
    except ValueError:
        raise ConfigError(f"{option}={value!r} is no threshold; {allowed}") from None
    bounds_hold = upper > 0 and (lower is None or 0 < lower <= upper)
    if isinstance(value, bool) or not bounds_hold:
        raise ConfigError(f"{option}={value!r} is refused; {allowed}")
    return lower, upper


def weight_level(name: str, *, legacy: bool = False) -> Level:
    """``rollout_is``: token or sequence; the older commit has geometric, too."""
    allowed = [Level.token, Level.sequence] + [Level.geometric] * legacy
    for level in allowed:
        if level.value == name:
            return level
    raise ConfigError(f"rollout_is={name!r} is refused; allowed: {', '.join(level.value for level in allowed)}, null")


def options(names: str | None, thresholds: object) -> list[tuple[RsOption, float | None, float]]:
    """``rollout_rs`` and ``rollout_rs_threshold``: each option once, with its (lower, upper); one may serve all.

    Raises ConfigError for an unknown option, a missing threshold, and a lower bound where the option has none.
    """
    if not names:
        return []
    found = [member(RsOption, "rollout_rs", name) for name in dict.fromkeys(name.strip() for name in names.split(","))]
    if thresholds is None:
        raise ConfigError(f"rollout_rs={names} has no threshold; give one, for example rollout_rs_threshold=2.0")
    texts: list[object] = list(thresholds.split(",")) if isinstance(thresholds, str) else [thresholds]
    texts = [text.strip() if isinstance(text, str) else text for text in texts]
    if len(texts) not in (1, len(found)):
        raise ConfigError(
            f"rollout_rs_threshold={thresholds!r} holds {len(texts)} thresholds for {len(found)} options of "
            "rollout_rs; give one, or one each"
        )
    texts = texts * len(found) if len(texts) == 1 else texts
    given = [(one, *threshold("rollout_rs_threshold", text)) for one, text in zip(found, texts, strict=True)]
    for one, lower, _ in given:
        _check_sides(one, lower)
    return given


def _check_sides(option: RsOption, lower: float | None) -> None:
    if lower is not None and not option.two_sided:
        raise ConfigError(
            f"{option.name} has no lower bound, only an upper one; lower={lower:g} was given; "
            "for example rollout_rs_threshold=0.1"
        )


def rule(option: RsOption, *, upper: float, lower: float | None = None) -> RejectSpec:
    """One option of ``rollout_rs``, compared as verl does: k1 = -d with the logs of its bounds, in log space.

    Bounds of k1 are ratios rollout/proximal, (1/upper, upper) if only one is given. Token log-ratios are clamped to
    +-20 before anything is made of them. Raises ConfigError for a lower bound of k2 and k3, which start at 0.
    """
    _check_sides(option, lower)
    level, over_tokens = _level(option)
    if not option.two_sided:
        return RejectSpec(Statistic[option.name[-2:]], level, over_tokens, None, upper, clamp=LOG_RATIO_CLAMP)
    low, high = math.log(1 / upper if lower is None else lower), math.log(upper)
    return RejectSpec(Statistic.k1, level, over_tokens, low, high, inverse=True, clamp=LOG_RATIO_CLAMP)


def ratio_rule(option: RsOption, *, upper: float, lower: float | None = None) -> RejectSpec:
    """The same with bounds on the ratio, as the presets write it, to be read and overridden as ratios.

    They differ only for a ratio that the logarithm rounds across its bound.
    """
    if not option.two_sided:
        return rule(option, upper=upper, lower=lower)
    level, over_tokens = _level(option)
    low = 1 / upper if lower is None else lower
    return RejectSpec(Statistic.ratio, level, over_tokens, low, upper, inverse=True, clamp=LOG_RATIO_CLAMP)


def _level(option: RsOption) -> tuple[Level, OverTokens | None]:
    if option.of_tokens:
        return Level.token, None
    return Level.sequence, OverTokens[option.name.split("_")[1]]


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
