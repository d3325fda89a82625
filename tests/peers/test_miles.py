"""miles' metrics against float64 loops written from its formulas, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.peers import miles
from trimtab.spec import Level, TisMode

LENGTHS = [5, 0, 1, 8, 3]
ROWS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def batch() -> tuple[torch.Tensor, ...]:
    """Ragged rows: one of no tokens, one of a single token, one (the last) fully masked; one |d| beyond 20."""
    g = torch.Generator().manual_seed(3)
    rollout = -3 * torch.rand(sum(LENGTHS), generator=g, dtype=torch.float64)
    train = rollout + 0.5 * torch.randn(sum(LENGTHS), generator=g, dtype=torch.float64)
    train[2] = rollout[2] + 25
    valid = torch.rand(sum(LENGTHS), generator=g) > 0.25
    valid[:6], valid[-3:] = True, False
    return train, rollout, valid, ROWS, torch.tensor(LENGTHS)


def pairs(x: torch.Tensor, valid: torch.Tensor) -> list[list[tuple[float, bool]]]:
    flat = list(zip(x.tolist(), valid.tolist(), strict=True))
    return [[flat.pop(0) for _ in range(n)] for n in LENGTHS]


def clamp(x: float, low: float = -20, high: float = 20) -> float:
    return min(max(x, low), high)


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def row_ratios(level: Level, row: list[tuple[float, bool]]) -> list[float]:
    kept = [x for x, m in row if m]
    if level is Level.token:
        return [math.exp(clamp(x)) for x, _ in row]
    return [math.exp(clamp(sum(kept) if level is Level.sequence else mean(kept)))] * len(row)


def same(found: dict[str, torch.Tensor], expected: dict[str, list[float]]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, rel=1e-12, abs=1e-14), name


def test_off_policy() -> None:
    train, rollout, valid, row, length = batch()
    expected: dict[str, list[float]] = {}

    def put(name: str, values: list[float]) -> None:
        expected.setdefault(f"mis_{name}", []).extend(values)

    for a_row, b_row in zip(pairs(train, valid), pairs(rollout, valid), strict=True):
        n = len(a_row)
        d = [(a - b, m) for (a, m), (b, _) in zip(a_row, b_row, strict=True)]
        kept = [x for x, m in d if m]
        a, b = -mean([x for x, m in a_row if m]), -mean([x for x, m in b_row if m])
        put("training_log_ppl", [a] * n)
        put("training_ppl", [math.exp(a)] * n)
        put("rollout_log_ppl", [b] * n)
        put("rollout_ppl", [math.exp(b)] * n)
        put("kl", [-x for x, _ in d])
        put("k3_kl", [math.exp(x) - x - 1 for x, _ in d])
        put("log_ppl_diff", [a - b] * n)
        put("log_ppl_abs_diff", [abs(a - b)] * n)
        put("ppl_ratio", [math.exp(a - b)] * n)
        put("chi2_token", [mean([math.exp(2 * clamp(x)) for x in kept]) - 1] * n)
        put("chi2_seq", [math.exp(2 * clamp(sum(kept))) - 1] * n)
    same(miles.off_policy(train, rollout, valid, row, length), expected)


def bounded(mode: TisMode, w: float) -> float:
    return {TisMode.truncate: min(w, 1.5), TisMode.clip: clamp(w, 0.7, 1.5), TisMode.mask: w}[mode]


SHARES = {
    TisMode.truncate: {"mis_tis_truncate_fraction": lambda w: w > 1.5},
    TisMode.clip: {"mis_tis_clip_fraction_low": lambda w: w < 0.7, "mis_tis_clip_fraction_high": lambda w: w > 1.5},
    TisMode.mask: {"mis_tis_mask_fraction_low": lambda w: w < 0.7, "mis_tis_mask_fraction_high": lambda w: w > 1.5},
}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("mode", SHARES)
@pytest.mark.parametrize("level", Level)
def test_importance(level: Level, mode: TisMode, normalise: bool) -> None:
    train, rollout, valid, row, length = batch()
    if normalise and level is Level.geometric:
        with pytest.raises(ConfigError, match="tis_level=sequence"):
            miles.importance(train, rollout, valid, row, length, level=level, mode=mode, lower=0.7, upper=1.5,
                             batch_normalize=True)  # fmt: skip
        return
    d = pairs(train - rollout, valid)
    raw = [row_ratios(level, r) for r in d]
    w = [[bounded(mode, x) * m for x, (_, m) in zip(ws, r, strict=True)] for ws, r in zip(raw, d, strict=True)]
    kept = [[x for x, (_, m) in zip(ws, r, strict=True) if m] for ws, r in zip(w, d, strict=True)]
    flat_raw, flat = [x for r in raw for x in r], [x for r in w for x in r]
    expected = {
        "mis_tis_weight_before_bound": flat_raw,
        "mis_tis_weight_after_bound": flat,
        "mis_is_ratio_mean_after_tis_rs": flat,
        **{name: [float(share(x)) for x in flat_raw] for name, share in SHARES[mode].items()},
    }
    factor = 1.0
    if normalise:
        factor = mean([x for r in kept for x in r]) if level is Level.token else mean([mean(r) for r in kept])
        expected["mis_batch_norm_factor"] = [factor] * len(flat)
    for name, of in (("mean", mean), ("min", min), ("max", max)):
        each = [[(of(r) if r else 0.0) / factor] * n for r, n in zip(kept, LENGTHS, strict=True)]
        expected[f"mis_is_ratio_{name}_final"] = [x for r in each for x in r]
    found = miles.importance(
        train, rollout, valid, row, length, level=level, mode=mode, lower=0.7, upper=1.5, batch_normalize=normalise
    )
    same(found, expected)


@pytest.mark.parametrize("mode", [TisMode.off, TisMode.zero])
def test_modes_that_miles_lacks_are_refused(mode: TisMode) -> None:
    with pytest.raises(ConfigError, match="truncate, clip and mask"):
        miles.importance(*batch(), level=Level.token, mode=mode, lower=0.5, upper=2.0)


@pytest.mark.parametrize("veto", [None, 0.6])
@pytest.mark.parametrize("level", Level)
def test_rejection(level: Level, veto: float | None) -> None:
    train, rollout, valid, row, length = batch()
    d = pairs(train - rollout, valid)
    ratios = [x for r in d for x in row_ratios(level, r)]
    expected = {
        "mis_rs_mask_fraction_low": [float(x < 0.8) for x in ratios],
        "mis_rs_mask_fraction_high": [float(x > 1.3) for x in ratios],
    }
    if veto is not None:
        bad = [[m and x < math.log(veto) for x, m in r] for r in d]
        expected["mis_rs_catastrophic_token_fraction"] = [float(x) for r in bad for x in r]
        expected["mis_rs_catastrophic_seq_fraction"] = [float(any(r)) for r in bad for _ in r]
        assert 0 < sum(expected["mis_rs_catastrophic_seq_fraction"]) < len(ratios)
    found = miles.rejection(train, rollout, valid, row, length, level=level, lower=0.8, upper=1.3, veto=veto)
    same(found, expected)


def test_sample_mean_counts_a_row_without_valid_tokens_as_zero() -> None:
    train, _, valid, row, length = batch()
    rows = [mean([x for x, m in r if m]) for r in pairs(train, valid)]
    found = miles.sample_mean({"x": train}, valid, row, length)
    assert found == {"x": pytest.approx(sum(rows) / 5, rel=1e-12)}


def test_built_in_weights() -> None:
    d = torch.tensor([0.0, math.log(2), math.log(2.5), -1.0, 30.0], dtype=torch.float64)
    found = miles.built_in(d, torch.zeros_like(d), lower=0.5, upper=2.0)
    ratios = [math.exp(x) for x in d.tolist()]
    assert found["tis"].tolist() == pytest.approx(ratios, rel=1e-14)
    assert found["tis_clipfrac"].tolist() == [0, 0, 1, 1, 1]
    assert found["tis_abs"].tolist() == pytest.approx([abs(x - 1) for x in ratios], rel=1e-14)


@pytest.mark.parametrize("clamped", [True, False])
def test_mismatch_is_float32_and_at_most_ten(clamped: bool) -> None:
    train = torch.tensor([-1.0, -0.3, 90.0, -90.0, math.nan], dtype=torch.float64)
    rollout = torch.tensor([-0.4, -0.9, -1.0, -1.0, -1.0], dtype=torch.float64)
    found = miles.mismatch(train, rollout, torch.tensor([True, True, True, False, True]), clamp=clamped)
    small = [math.exp(x) - 1 - x for x in (-0.6, 0.6)]
    assert found["train_rollout_kl"].dtype == torch.float32
    assert found["train_rollout_kl"].tolist() == pytest.approx([*small, 10, 0, 0], rel=2e-6)
    assert found["train_rollout_logprob_abs_diff"].tolist() == pytest.approx([0.6, 0.6, 91, 0, 0], rel=1e-12)
    raw = miles.mismatch(train, rollout, clamp=clamped)["train_rollout_kl"]
    assert raw[3] == 10
    assert bool(raw[4].isnan()) is not clamped


def test_off_policy_sequence_mask() -> None:
    old, current, valid, row, length = batch()
    advantage = torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0])[row].double()
    mask, clipped = [], 0.0
    rows = zip(pairs(old - current, valid), pairs(advantage, valid), strict=True)
    for diffs, advantages in rows:
        kept = [x for x, m in diffs if m]
        drop = [a < 0 and mean(kept) > 0.01 for a, _ in advantages]
        mask += [float(not x) for x in drop]
        clipped += sum(drop) / max(len(kept), 1)
    found = miles.opsm(current, old, valid, row, length, advantage_N=advantage, delta=0.01)
    assert found["opsm_mask"].tolist() == mask
    assert found["opsm_clipfrac"] == pytest.approx(clipped, rel=1e-6)
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("gspo", [False, True])
def test_policy_loss(gspo: bool) -> None:
    old, current, valid, row, length = batch()
    advantage = torch.randn(len(old), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    kl, clipped = [], []
    for diffs, advantages in zip(pairs(old - current, valid), pairs(advantage, valid), strict=True):
        of_row = mean([x for x, m in diffs if m])
        for (x, m), (a, _) in zip(diffs, advantages, strict=True):
            x = (of_row if gspo else x) * m
            r = math.exp(clamp(-x))
            kl.append(x)
            clipped.append(float(m and -clamp(r, 0.8, 1.28) * a > -r * a))
    found = miles.policy_loss(
        current, old, valid, row, length, advantage_N=advantage, clip_low=0.2, clip_high=0.28, gspo=gspo
    )
    same(found, {"ppo_kl": kl, "pg_clipfrac": clipped, "ois": [math.exp(-x) for x in kl]})
    shared = []
    for r in pairs(found["ppo_kl"], valid):
        w = [math.exp(clamp(-x)) for x, m in r if m]
        shared.append(sum(w) ** 2 / (len(w) * sum(x * x for x in w)) if w else 0.0)
    ess = miles.ess_ratio(found["ppo_kl"], valid, row, length)
    assert ess["ess_ratio"] == pytest.approx(sum(shared) / 5, rel=1e-5)
