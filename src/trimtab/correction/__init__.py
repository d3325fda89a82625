"""Rollout correction: pure maths on flat tokens, tensors in and tensors out, nothing carries a gradient.

``correct`` gives each token a weight and a keep flag, ``measure`` says what that did and how far the two
policies are apart, in statistics that merge exactly.
"""

from __future__ import annotations

from trimtab.correction.correct import Correction, correct
from trimtab.correction.reject import RejectRule
from trimtab.correction.statistics import CorrectionStats, measure
from trimtab.correction.weight import WeightRule
from trimtab.stat import LOG_RATIO_CLAMP

__all__ = ["LOG_RATIO_CLAMP", "Correction", "CorrectionStats", "RejectRule", "WeightRule", "correct", "measure"]
