"""Where a step's numbers begin to be alarming, each bound with its source; docs/alarms.md shows the same table."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.spec import Dtype, RunSpec

FAR_APART = 0.1
"""|Δp| that counts as far apart: the last column of ABEJA's table; INTELLECT's IPO leaves such tokens out."""

WINDOW, NEEDED = 5, 3
"""A level holds when it is exceeded in so many of the last so many steps: one odd batch is no alarm."""

SIGMAS = 3.0
"""Standard errors that the pooled count of far tokens must exceed its bound by."""

TREND = 30
"""Steps that a slope looks back over: in the field |d| rose from 0.011 to 0.036 over 30 steps."""

GROWTH_ABS, GROWTH_KL = 1.75, 3.0
"""Growth from the first to the last third of the trend; that case has 2.2 in |d|, and KL goes with its square."""

FLOOR, FLOOR_MOVED = 0.1, 0.5
"""A slope counts from this share of the level on: noise may grow as it likes, and so may a warming-up learning rate
where the policy's own steps are part of the gap."""

ESS_LEVEL = 0.3
"""Effective sample size that verl's page on rollout correction warns below."""

ESS_DROP, ESS_MEMORY, ESS_LEAST = 0.5, 20, 10
"""A sudden drop: less than half of the median of the last 20 steps, once there are 10."""

LATE = 2
"""Steps of the last five with tokens older than the mode allows: the hand-over comes late, or not at all."""

STUCK = 0.1
"""The engine's own log-probs moved by less than this share of the gap that a hand-over has left: it was not taken."""


@dataclass(frozen=True)
class Bounds:
    """Levels of a step's gap. kl: k3 in nats a token; abs_diff: mean |d| in nats; far: share of |Δp| > 0.1."""

    kl: float
    abs_diff: float
    far: float


# By the coarser dtype of the two sides; MOVED: where the policy's own steps are part of the gap.
FLOAT32 = Bounds(kl=1e-5, abs_diff=5e-4, far=0.01)
FLOAT16 = Bounds(kl=1e-3, abs_diff=0.01, far=0.01)
BFLOAT16 = Bounds(kl=1e-2, abs_diff=0.05, far=0.01)
MOVED = Bounds(kl=0.1, abs_diff=0.2, far=0.2)


def rounding(spec: RunSpec) -> Bounds:
    """What rounding explains under the coarser dtype of the two sides, as they are configured to be.

    A gap that is injected by ``mismatch=dtype`` is no part of it: its alarm is meant to be seen.
    """
    match (spec.rollout.dtype, spec.policy.dtype):
        case (Dtype.bfloat16, _) | (_, Dtype.bfloat16):
            return BFLOAT16
        case (Dtype.float16, _) | (_, Dtype.float16):
            return FLOAT16
        case _:
            return FLOAT32
