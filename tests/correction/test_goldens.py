"""Weights, masks and reduced metrics of miles' ``compute_mis_weights``, as its own code gave them on 41 cases.

Where we differ on purpose, the test states our value instead:
- batch normalising in mask mode: the mean is over kept weights, theirs over all;
- a row without valid tokens is left out of means, theirs counts it as 0 (also in the sequence-level factor);
- the veto acts on its own, theirs only with use_rs (the test translates: no veto without use_rs);
- mis_is_ratio_mean_after_tis_rs is over kept tokens, theirs over all (then it equals the mean after bounding).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from trimtab.correction import RejectRule, WeightRule, correct, measure
from trimtab.spec import Level, TisMode

FILE = Path(__file__).parents[1] / "goldens" / "miles.json.gz"
CASES = json.loads(gzip.decompress(FILE.read_bytes()))["cases"]
WITHOUT_PREFIX = {"tis", "tis_clipfrac", "tis_abs"}


def rules(config: dict) -> dict:
    """Our arguments for a miles configuration, with its fallbacks: rs bounds from tis bounds."""
    upper = config["tis_upper_bound"]
    lower = 1 / upper if config["tis_lower_bound"] is None else config["tis_lower_bound"]
    weight = WeightRule(
        Level[config["tis_level"]], TisMode[config["tis_mode"]], lower, upper, config["tis_batch_normalize"]
    )
    if not config["use_rs"]:
        return dict(weight=weight)
    low = lower if config["rs_lower_bound"] is None else config["rs_lower_bound"]
    high = upper if config["rs_upper_bound"] is None else config["rs_upper_bound"]
    return dict(
        weight=weight, reject=[RejectRule.ratio(Level[config["rs_level"]], low, high)], veto=config["rs_veto_threshold"]
    )


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_miles(case):
    config, dtype = case["config"], torch.float64 if case["dtype"] == "float64" else torch.float32
    rel = 1e-9 if dtype is torch.float64 else 2e-5

    def flat(rows: list, kind: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row], dtype=kind)

    mask_N = flat(case["loss_mask"], torch.bool)
    length_B = torch.tensor([len(row) for row in case["loss_mask"]])
    done = correct(flat(case["train"], dtype), flat(case["rollout"], dtype), mask_N, length_B, **rules(config))
    assert torch.equal(done.keep_N, flat(case["mask"], torch.bool))

    expected = flat(case["weights"])[mask_N]
    empty = sum(not any(row) for row in case["loss_mask"])
    factor = 1.0  # theirs / ours
    if config["tis_batch_normalize"]:
        theirs = case["metrics"]["batch_norm_factor"] * len(length_B) / (len(length_B) - empty)
        if config["tis_mode"] == "mask":
            theirs_kept = expected[done.keep_N[mask_N]] * theirs
            assert done.factor == pytest.approx(float(theirs_kept.mean()), rel=rel)
            factor = theirs / done.factor
        elif config["tis_level"] == "sequence":
            factor = (len(length_B) - empty) / len(length_B)
    torch.testing.assert_close(done.weight_N[mask_N].double(), expected * factor, rtol=rel, atol=0)

    metrics = measure(done).as_dict()
    for name, value in case["metrics"].items():
        ours = metrics[name if name in WITHOUT_PREFIX else f"mis_{name}"]
        theirs = float(value) * len(length_B) / (len(length_B) - empty)
        if name.endswith("_final"):
            theirs *= factor
        if name == "batch_norm_factor":
            theirs /= factor
        if name == "is_ratio_mean_after_tis_rs" and not torch.equal(done.keep_N, mask_N):
            continue  # ours against the loops: test_statistics.py
        # their indicator means are float32
        tolerance = 1e-6 if "fraction" in name else rel
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-12 if rel == 1e-9 else 1e-6), name
