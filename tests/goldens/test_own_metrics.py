"""trimtab's own ``mis_*`` metrics against miles' reduced ones, where both define the same quantity.

Where we differ on purpose, the test states our value instead:
- batch normalising in mask mode: the mean is over kept weights, theirs over all;
- a row without valid tokens is left out of means, theirs counts it as 0 (also in the sequence-level factor);
- mis_is_ratio_mean_after_tis_rs is over kept tokens, theirs over all (then it equals the mean after bounding).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import replay
import torch
from adapt import miles
from adapt.shared import Case, layout, ratio_inputs

from trimtab.correction import measure
from trimtab.method import evaluate

CASES = {
    case.name: case
    for case in replay.cases(Path(__file__).parent)
    if case.function == "compute_mis_weights" and case.config["use_tis"]
}


@pytest.mark.parametrize("name", CASES)
def test_own_metrics(name: str) -> None:
    case = CASES[name]
    rel = 1e-9 if case.dtype is torch.float64 else 2e-5
    lay, valid_N = layout(case.raw("loss_masks")), case.flags("loss_masks")
    inputs = ratio_inputs(case, "train_log_probs", "rollout_log_probs", valid_N, lay)
    (done,) = evaluate(miles.method(case), inputs).applied.corrections
    theirs = case.outputs["metrics_reduced_sample_mean"]
    share = lay.rows / sum(map(any, case.raw("loss_masks")))  # their means count rows without a token
    factor = _factor(case, done.factor, theirs, share)
    ours = measure(done).as_dict()
    for name, value in theirs.items():
        if name == "is_ratio_mean_after_tis_rs" and not torch.equal(done.keep_N, valid_N):
            continue  # ours against the loops: test_statistics.py
        expected = float(value) * share
        if name.endswith("_final"):
            expected *= factor
        if name == "batch_norm_factor":
            expected /= factor
        # their indicator means are float32
        tolerance = 1e-6 if "fraction" in name else rel
        assert ours[f"mis_{name}"] == pytest.approx(expected, rel=tolerance, abs=1e-12 if rel == 1e-9 else 1e-6), name


def _factor(case: Case, ours: float, theirs: dict[str, float], share: float) -> float:
    """What their factor is of ours."""
    if not case.config["tis_batch_normalize"]:
        return 1.0
    if case.config["tis_mode"] == "mask":
        return theirs["batch_norm_factor"] * share / ours
    return 1 / share if case.config["tis_level"] == "sequence" else 1.0
