"""Resolved methods written out by hand."""

from __future__ import annotations

from trimtab.spec import (
    Aggregate,
    Algo,
    AlgoSpec,
    Denominator,
    Level,
    LossName,
    LossSpec,
    MethodSpec,
    MisSpec,
    Numerator,
    TisMode,
)


def method(
    algo: Algo = Algo.decoupled,
    level: Level | None = Level.sequence,
    upper: float | None = None,
    lower: float | None = None,
    mode: TisMode = TisMode.truncate,
    loss: LossName = LossName.ppo_clip,
    normalize: bool = False,
    rs: tuple[Level, float, float] | None = None,
    m2: float | None = None,
    denominator: Denominator = Denominator.all,
    aggregate: Aggregate = Aggregate.token_mean,
) -> MethodSpec:
    """``level`` None: no weight. ``rs``: level, lower and upper bound of one rejection rule."""
    mis = MisSpec(
        tis_mode=TisMode.off if level is None else mode,
        tis_level=level or Level.token,
        tis_lower_bound=lower,
        tis_upper_bound=upper,
        tis_batch_normalize=normalize,
        use_rs=rs is not None,
        rs_level=rs[0] if rs else Level.token,
        rs_lower_bound=rs[1] if rs else None,
        rs_upper_bound=rs[2] if rs else None,
        m2_threshold=m2,
        numerator=Numerator.proximal if algo is Algo.decoupled else Numerator.current,
    )
    return MethodSpec(AlgoSpec(algo), mis, LossSpec(name=loss, denominator=denominator, aggregate=aggregate))
