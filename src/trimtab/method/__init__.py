"""A method as a whole: corrections, surrogate and denominators of one published recipe, as a pure function of a batch."""

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
    token_gradient,
    with_top,
)
from trimtab.method.inputs import Inputs
from trimtab.method.rules import Stage, stages

__all__ = [
    "Applied",
    "Coefficients",
    "Inputs",
    "Result",
    "Stage",
    "apply_stage",
    "denominators",
    "evaluate",
    "loss_of",
    "needs_reference",
    "needs_whole",
    "nothing",
    "stages",
    "token_gradient",
    "with_top",
]
