"""Rollout correction: pure maths on flat tokens, tensors in and tensors out, nothing carries a gradient.

``correct`` gives each token a weight and a keep flag (``correct_given``: of a ``log_ratio`` that several corrections
share); ``measure`` says what that did and how far the two policies are apart, in statistics that merge exactly;
``summarise`` says in five numbers what it did.
"""

from __future__ import annotations

from trimtab.correction.correct import Correction, correct, correct_given
from trimtab.correction.log_ratio import LogRatio, log_ratio
from trimtab.correction.m2 import SecondMoment, second_moment_keep
from trimtab.correction.reject import Rejection, RejectRule
from trimtab.correction.statistics import CorrectionStats, measure
from trimtab.correction.summary import summarise, summarise_all
from trimtab.correction.weight import WeightRule
from trimtab.stat import LOG_RATIO_CLAMP

__all__ = [
    "LOG_RATIO_CLAMP",
    "Correction",
    "CorrectionStats",
    "LogRatio",
    "RejectRule",
    "Rejection",
    "SecondMoment",
    "WeightRule",
    "correct",
    "correct_given",
    "log_ratio",
    "measure",
    "second_moment_keep",
    "summarise",
    "summarise_all",
]
