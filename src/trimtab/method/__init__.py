"""A method as a whole: corrections, surrogate and denominators of one recipe, as a pure function of a batch."""

from __future__ import annotations

from trimtab.method.evaluate import (
    Applied,
    Coefficients,
    Result,
    apply_stage,
    denominators,
    evaluate,
    loss_of,
    needs_reference,
    needs_whole,
    nothing,
    recomputes,
    token_gradient,
    with_top,
)
from trimtab.method.inputs import Inputs
from trimtab.method.rules import Stage, stages
from trimtab.method.shadow import Shadows, policy_term

__all__ = [
    "Applied",
    "Coefficients",
    "Inputs",
    "Result",
    "Shadows",
    "Stage",
    "apply_stage",
    "denominators",
    "evaluate",
    "loss_of",
    "needs_reference",
    "needs_whole",
    "nothing",
    "policy_term",
    "recomputes",
    "stages",
    "token_gradient",
    "with_top",
]
