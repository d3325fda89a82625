"""prime-rl's metrics against loops over rows and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from peers.ragged import mean, ragged

from trimtab.peers import prime_rl

DATA = ragged(4)
ADVANTAGES = DATA.advantage_B.tolist()


def rows(*names):
    columns = [DATA.rows(vars(DATA)[name]) for name in names]
    return [list(zip(*r, strict=True)) for r in zip(*columns, strict=True)]


def near(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, rel=1e-6), name


def kl(c, g):
    return math.exp(c - g) - (c - g) - 1


def split(pairs, flags):
    masked = [kl(*p) for p, f in zip(pairs, flags, strict=True) if f]
    kept = [kl(*p) for p, f in zip(pairs, flags, strict=True) if not f]
    return mean(masked), mean(kept), mean(flags)


def change(c, g):
    return math.exp(c) - math.exp(g)


def test_default():
    found = prime_rl.default_metrics(
        **DATA.of("current_N", "rollout_N", "advantage_B"), dppo_mask_low=0.1, dppo_mask_high=0.05
    )
    names = ["masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked", "is_masked_low", "is_masked_high"]
    columns = {name: [] for name in [*names, "masked_advantage_positive", "masked_advantage_negative"]}
    for pairs, a in zip(rows("current_N", "rollout_N"), ADVANTAGES, strict=True):
        rose, fell = [change(*p) > 0.05 for p in pairs], [change(*p) < -0.1 for p in pairs]
        flags = rose if a > 0 else fell
        row = (*split(pairs, flags), mean(fell) if a < 0 else 0.0, mean(rose) if a > 0 else 0.0,
               float(a > 0 and any(flags)), float(a < 0 and any(flags)))  # fmt: skip
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    assert any(columns["is_masked"])
    near(found, columns)


def test_ipo_and_a_row_without_weight():
    weight_N = torch.where(DATA.row_N == 0, 0.0, 1.0)
    given = DATA.of("current_N", "rollout_N")
    found = prime_rl.ipo_metrics(**given, ipo_threshold=0.05, weight_N=weight_N)
    columns = [split(p, [abs(change(*x)) > 0.05 for x in p]) for p in rows("current_N", "rollout_N")[1:] if p]
    near(
        found,
        dict(zip(["masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked"], zip(*columns, strict=True), strict=True)),
    )
    assert len(prime_rl.ipo_metrics(**given)["is_masked"]) == len(DATA.length_B)


def test_ref_kl_and_ce_components():
    weight_N = torch.where(DATA.valid_N, 0.3, 0.0)
    given = DATA.of("current_N", "rollout_N", "reference_N") | {"weight_N": weight_N}
    del given["valid_N"]
    found = prime_rl.ref_kl_metrics(**given)
    triples = [row for row in rows("current_N", "rollout_N", "reference_N") if row]
    columns = [split([t[:2] for t in row], [change(*t[:2]) < -0.2 for t in row]) for row in triples]
    names = ["ref_kl/masked_mismatch_kl", "ref_kl/unmasked_mismatch_kl", "ref_kl/is_masked"]
    expected = dict(zip(names, zip(*columns, strict=True), strict=True))
    near(found, expected | {"ref_kl": [mean([r - c for c, _, r in row]) for row in triples]})
    ce = prime_rl.ce_metrics(current_N=DATA.current_N, row_N=DATA.row_N, length_B=DATA.length_B, weight_N=weight_N)
    near(ce, {"nll": [-mean([c for c, _, _ in row]) for row in triples]})


def test_legacy():
    options = prime_rl.Legacy(0.75, 1.5, 0.7, 1.6, 0.4, 2.5)
    found = prime_rl.legacy_metrics(**DATA.of("current_N", "rollout_N"), options=options, teacher_N=DATA.reference_N)
    expected = {name: [] for name in found}
    for triples in rows("current_N", "rollout_N", "reference_N"):
        pairs = [t[:2] for t in triples]
        ratios, geometric = [math.exp(c - g) for c, g in pairs], math.exp(mean([c - g for c, g in pairs]))
        low, high = [r < 0.75 for r in ratios], [r > 1.5 for r in ratios]
        row = [min(ratios, default=math.inf) < 0.4, max(ratios, default=-math.inf) > 2.5,
               geometric < 0.7, geometric > 1.6]  # fmt: skip
        flags = [a or b or any(row) for a, b in zip(low, high, strict=True)]
        masked, kept, _ = split(pairs, flags)
        values = dict(
            mismatch_kl=[mean([kl(*p) for p in pairs])], masked_mismatch_kl=[masked], unmasked_mismatch_kl=[kept],
            is_masked=flags, is_masked_low=low, is_masked_high=high, sequence_masked_low=row[:1],
            sequence_masked_high=row[1:2], geo_masked_low=row[2:3], geo_masked_high=row[3:],
            geo_seq_ratio=[geometric], teacher_kl=[mean([r - c for c, _, r in triples])],
        )  # fmt: skip
        for name, more in values.items():
            expected[name].extend(map(float, more))
    assert any(expected["is_masked"]) and not all(expected["is_masked"])
    near(found, expected)
