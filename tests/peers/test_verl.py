"""verl's metrics against float64 loops written from its formulas, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.errors import ConfigError
from trimtab.peers import verl, verl_loss
from trimtab.peers.verl import RsOption
from trimtab.peers.verl_loss import VerlLoss
from trimtab.spec import Level

LENGTHS = [5, 0, 1, 8, 3]
ROWS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def batch(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Ragged rows: one of no tokens, one of a single token, one (the last) fully masked; one |d| beyond 20."""
    g = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(sum(LENGTHS), generator=g, dtype=torch.float64)
    numerator = rollout + 0.5 * torch.randn(sum(LENGTHS), generator=g, dtype=torch.float64)
    numerator[2] = rollout[2] - 25
    valid = torch.rand(sum(LENGTHS), generator=g) > 0.25
    valid[:6], valid[-3:] = True, False
    return numerator, rollout, valid, ROWS, torch.tensor(LENGTHS)


def valid_rows(x: torch.Tensor, valid: torch.Tensor) -> list[list[float]]:
    pairs = zip(x.split(LENGTHS), valid.split(LENGTHS), strict=True)
    return [[float(v) for v, m in zip(row, keep, strict=True) if m] for row, keep in pairs]


def clamp(x: float, low: float = -20, high: float = 20) -> float:
    return min(max(x, low), high)


def tiny(values: list[float]) -> float:
    """verl's masked mean."""
    return sum(values) / (len(values) + 1e-8)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def unbiased(values: list[float]) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def biased(values: list[float]) -> float:
    return math.sqrt(max(0.0, tiny([v * v for v in values]) - tiny(values) ** 2))


def same(found: dict[str, float], expected: dict[str, float], prefix: str) -> None:
    assert {name.removeprefix(prefix) for name in found} == set(expected)
    for name, value in expected.items():
        rel = 1e-6 if "fraction" in name else 1e-9  # verl's shares of rows are float32
        assert found[prefix + name] == pytest.approx(value, rel=rel, abs=1e-12), name


def test_off_policy() -> None:
    numerator, rollout, valid, row, length = batch()
    a, b = valid_rows(numerator, valid), valid_rows(rollout, valid)
    d = [[x - y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]
    tokens = [x for r in d for x in r]
    train, roll = [-tiny(r) for r in a], [-tiny(r) for r in b]
    diff = [x - y for x, y in zip(train, roll, strict=True)]
    expected = {
        "training_ppl": mean([math.exp(x) for x in train]),
        "training_log_ppl": mean(train),
        "rollout_ppl": mean([math.exp(x) for x in roll]),
        "rollout_log_ppl": mean(roll),
        "kl": -tiny(tokens),
        "k3_kl": tiny([math.exp(x) - x - 1 for x in tokens]),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(x) for x in diff]),
        "log_ppl_diff_max": max(diff),
        "log_ppl_diff_min": min(diff),
        "ppl_ratio": mean([math.exp(x) for x in diff]),
        "chi2_token": tiny([math.exp(2 * clamp(x)) for x in tokens]) - 1,
        "chi2_seq": mean([math.exp(2 * clamp(sum(r))) for r in d]) - 1,
    }
    same(verl.off_policy(numerator, rollout, valid, row, length), expected, "rollout_corr/")


def weights(level: Level, d: list[list[float]]) -> tuple[list[list[float]], list[float]]:
    """Raw weights of each row's valid tokens, and each row's own log-ratio (row levels)."""
    own = [sum(r) if level is Level.sequence else tiny(r) for r in d]
    if level is Level.token:
        return [[math.exp(clamp(x)) for x in r] for r in d], own
    return [[math.exp(clamp(x))] * len(r) for x, r in zip(own, d, strict=True)], own


def described(level: Level, raw: list, w: list, own: list, low: float, high: float, start: float) -> dict[str, float]:
    raws, ws = [x for r in raw for x in r], [x for r in w for x in r]
    clamped, rows, raw_rows = [clamp(x, start, high) for x in ws], [tiny(r) for r in w], [tiny(r) for r in raw]
    of_token = level is Level.token
    return {
        "mean": tiny(ws),
        "max": max(ws) if of_token else math.exp(min(max(own), 20)),
        "min": min(ws) if of_token else math.exp(min(own)),
        "ratio_fraction_high": tiny([x > high for x in raws]) if of_token else mean([x > math.log(high) for x in own]),
        "ratio_fraction_low": tiny([x < low for x in raws]) if of_token else mean([x < math.log(low) for x in own]),
        "std": biased(clamped),
        "eff_sample_size": 1 / tiny([(x / (tiny(clamped) + 1e-8)) ** 2 for x in clamped]),
        "seq_mean": mean(rows),
        "seq_std": unbiased(rows),
        "seq_max": max(rows),
        "seq_min": min(rows),
        "seq_max_deviation": max(abs(x - 1) for x in rows),
        "seq_fraction_high": mean([x > high for x in raw_rows]),
        "seq_fraction_low": mean([x < low for x in raw_rows]),
    }


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("lower", [None, 0.6])
@pytest.mark.parametrize("level", [Level.token, Level.sequence])
def test_importance(level: Level, lower: float | None, normalise: bool) -> None:
    numerator, rollout, valid, row, length = batch()
    d = valid_rows(numerator - rollout, valid)
    raw, own = weights(level, d)
    high, low = 1.5, 1 / 1.5 if lower is None else lower
    w = [[min(x, high) if lower is None else x * (low <= x <= high) for x in r] for r in raw]
    expected = described(level, raw, w, own, low, high, 0.0)
    if lower is not None:
        expected["oob_ratio"] = tiny([not low <= x <= high for r in raw for x in r])
    if normalise:
        of_rows = mean([tiny(r) for r in w if r])
        expected["batch_norm_factor"] = tiny([x for r in w for x in r]) if level is Level.token else of_rows
    found = verl.importance(
        numerator, rollout, valid, row, length, level=level, lower=lower, upper=high, batch_normalize=normalise
    )
    same(found, expected, "rollout_corr/rollout_is_")


@pytest.mark.parametrize("level", Level)
def test_legacy(level: Level) -> None:
    numerator, rollout, valid, row, length = batch()
    d = valid_rows(numerator - rollout, valid)
    raw, own = weights(level, d)
    expected = described(level, raw, raw, own, 0.8, 1.3, 0.8)
    bad = [[not 0.8 <= x <= 1.3 for x in r] for r in raw]
    expected["masked_fraction"] = tiny([x for r in bad for x in r])
    of_rows = [not 0.8 <= math.exp(clamp(x)) <= 1.3 for x in own]
    expected["seq_masked_fraction"] = mean([any(r) for r in bad] if level is Level.token else of_rows)
    found = verl.legacy_rejection(numerator, rollout, valid, row, length, level=level, lower=0.8, upper=1.3)
    same(found, expected, "rollout_corr/rollout_rs_")
    if level is not Level.geometric:
        found = verl.legacy_importance(numerator, rollout, valid, row, length, level=level, upper=1.3)
        same(found, described(level, raw, raw, own, 1 / 1.3, 1.3, 1 / 1.3), "rollout_corr/rollout_is_")


def aggregate(option: RsOption, row: list[float]) -> float:
    if option.name.startswith("seq_sum"):
        return sum(row)
    return (max(row) if row else 0.0) if option.name.startswith("seq_max") else tiny(row)


@pytest.mark.parametrize("option", RsOption)
def test_rejection(option: RsOption) -> None:
    numerator, rollout, valid, row, length = batch()
    k = {
        "k1": lambda x: -clamp(x),
        "k2": lambda x: clamp(x) ** 2 / 2,
        "k3": lambda x: math.exp(clamp(x)) - 1 - clamp(x),
    }[option.name[-2:]]
    two_sided = option.name.endswith("k1")
    low, high = (math.log(0.7), math.log(1.6)) if two_sided else (0.0, 0.3)
    stat = [[k(x) for x in r] for r in valid_rows(numerator - rollout, valid)]
    rows = [aggregate(option, r) for r in stat if r]
    if not option.name.startswith("token"):
        stat = [[aggregate(option, r)] * len(r) for r in stat]
    tokens = [x for r in stat for x in r]
    ends = tokens if option.name.startswith("token") else rows
    share = tiny if option.name.startswith("token") else mean
    bad = [[x > high or (two_sided and x < low) for x in r] for r in stat if r]
    expected = {
        "mean": tiny(tokens),
        "max": max(ends),
        "min": min(ends),
        "fraction_high": share([x > high for x in ends]),
        "fraction_low": share([x < low for x in ends]) if two_sided else 0.0,
        "std": biased([clamp(x, low, high) for x in tokens]),
        "seq_mean": mean(rows),
        "seq_std": unbiased(rows),
        "seq_max": max(rows),
        "seq_min": min(rows),
        "seq_max_deviation": max(abs(x) for x in rows),
        "seq_fraction_high": mean([x > high for x in rows]),
        "masked_fraction": tiny([x for r in bad for x in r]),
        "seq_masked_fraction": mean([any(r) for r in bad]),
    }
    if two_sided:
        expected["seq_fraction_low"] = mean([x < low for x in rows])
    bounds = dict(lower=0.7, upper=1.6) if two_sided else dict(upper=0.3)
    found = verl.rejection(numerator, rollout, valid, row, length, option=option, **bounds)
    same(found, expected, f"rollout_corr/rollout_rs_{option.name}_")


def test_a_bound_an_option_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="seq_max_k2 has no lower bound"):
        verl.rejection(*batch(), option=RsOption.seq_max_k2, lower=0.5, upper=1.0)


def test_the_total_of_rejection_counts_rows_without_tokens() -> None:
    *_, valid, row, length = batch()
    keep = torch.ones_like(valid)
    keep[[0, 1]] = False
    found = verl.rejection_total(keep, valid, row, length)
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / (int(valid.sum()) + 1e-8), rel=1e-12)
    assert found["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 5, rel=1e-7)


def test_legacy_veto() -> None:
    numerator, rollout, valid, row, length = batch()
    bad = [[x < math.log(0.5) for x in r] for r in valid_rows(numerator - rollout, valid)]
    found = verl.legacy_veto(numerator, rollout, valid, row, length, threshold=0.5)
    expected = {"veto_fraction": mean([any(r) for r in bad]),
                "catastrophic_token_fraction": tiny([x for r in bad for x in r])}  # fmt: skip
    assert 0 < expected["veto_fraction"] < 1
    same(found, expected, "rollout_corr/rollout_is_")
    none = verl.legacy_veto(numerator, rollout, valid, row, length, threshold=None)
    same(none, dict.fromkeys(expected, 0.0), "rollout_corr/rollout_is_")


def test_float32_overflows_as_it_does_in_float32() -> None:
    numerator, rollout, valid, row, length = batch()
    numerator = rollout + 95 * torch.sign(numerator - rollout)
    found = verl.off_policy(numerator.float(), rollout.float(), valid, row, length)
    assert found["rollout_corr/k3_kl"] == math.inf
    assert found["rollout_corr/chi2_token"] == pytest.approx(
        tiny([math.exp(2 * clamp(x)) for r in valid_rows(numerator - rollout, valid) for x in r]) - 1, rel=2e-5
    )


def test_weights_that_are_all_zero_have_no_effective_samples() -> None:
    _, rollout, valid, row, length = batch()
    found = verl.importance(rollout + 3, rollout, valid, row, length, level=Level.token, lower=0.5, upper=2.0)
    assert found["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert found["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(1, rel=1e-8)


def clip_flags(loss: VerlLoss, x: float, th: float, old: float, adv: float, row: float) -> tuple[bool, bool]:
    r = math.exp(clamp(x))
    if loss is VerlLoss.gspo:
        r = math.exp(min(row, 10))
    free, bounded = -adv * r, -adv * clamp(r, 0.9, 1.2)
    if loss is VerlLoss.vanilla:
        return bounded > free, adv < 0 and max(free, bounded) > -adv * 3
    if loss is VerlLoss.gspo:
        return bounded > free, False
    if loss is VerlLoss.cispo:
        return not 0.9 <= r <= 1.2, False
    if loss is VerlLoss.geo_mean:
        return not -0.1 <= x <= 0.2 and adv > 0, not -0.1 <= x <= 0.2 and adv < 0
    if loss is VerlLoss.sapo:
        return False, False
    p, q = math.exp(th), math.exp(old)
    if loss is VerlLoss.dppo_tv:
        kept = p - q <= 0.2 if adv > 0 else p - q >= -0.1
    else:
        kl = q * (old - th) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        kept = (kl <= 0.2 or p <= q) if adv > 0 else (kl <= 0.1 or p >= q)
    return not kept, kept and r > 20


@pytest.mark.parametrize("loss", VerlLoss)
def test_policy_loss(loss: VerlLoss) -> None:
    current, anchor, valid, row, length = batch(1)
    current = current.clamp(max=-1e-3)
    current[3], anchor[3] = -0.1, -9.0
    advantage = torch.randn(len(current), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    d = valid_rows(current - anchor, valid)
    flags, kl = [], []
    packs = [valid_rows(x, valid) for x in (current, anchor, advantage)]
    for at, diffs in enumerate(d):
        for x, th, old, adv in zip(diffs, *(p[at] for p in packs), strict=True):
            kl.append(-(x if loss in (VerlLoss.gspo, VerlLoss.geo_mean, VerlLoss.reinforce) else clamp(x)))
            if loss is not VerlLoss.reinforce:
                flags.append(clip_flags(loss, x, th, old, adv, mean(diffs)))
    expected = {"ppo_kl": tiny(kl)}
    if loss is not VerlLoss.reinforce:
        expected |= {"pg_clipfrac": tiny([c for c, _ in flags]), "pg_clipfrac_lower": tiny([c for _, c in flags])}
    found = verl_loss.policy_loss(
        current, anchor, valid, row, length, loss=loss, advantage_N=advantage, clip_low=0.1, clip_high=0.2
    )
    same(found, expected, "actor/")
