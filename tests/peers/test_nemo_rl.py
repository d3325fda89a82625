"""NeMo-RL's metrics against loops over rows and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from peers.ragged import mean, ragged

from trimtab.objective.aggregate import Counts
from trimtab.peers import nemo_rl
from trimtab.spec import KlEstimator

TOTALS = Counts(20, 6)
DATA = ragged()
TOKENS, ROWS = 20 + 1e-8, 6 + 1e-8


def metrics(**options):
    given = DATA.of("current_N", "proximal_N", "rollout_N", "reference_N", "reward_B")
    return nemo_rl.loss_metrics(**given, options=nemo_rl.Options(**options), loss=1.5, totals=TOTALS)


def tokens(*names):
    """(row, values of that token) of all valid tokens."""
    columns = [DATA.rows(vars(DATA)[name]) for name in names]
    return [(b, *values) for b in range(len(DATA.length_B)) for values in zip(*(c[b] for c in columns), strict=True)]


def test_mismatch_of_proximal_and_rollout():
    found = metrics()
    pairs = [(p, g) for _, p, g in tokens("proximal_N", "rollout_N")]
    k3 = [math.exp(p - g) - 1 - (p - g) for p, g in pairs]
    assert found["token_mult_prob_error"] == pytest.approx(sum(math.exp(abs(p - g)) for p, g in pairs) / TOKENS)
    assert found["gen_kl_error"] == pytest.approx(sum(k3) / TOKENS)
    assert found["policy_kl_error"] == pytest.approx(sum(math.exp(g - p) - 1 + p - g for p, g in pairs) / TOKENS)
    js = 0.0
    for p, g in pairs:
        m = math.log((math.exp(p) + math.exp(g)) / 2)
        js += sum(math.exp(x - m) - 1 - (x - m) for x in (p, g)) / 2
    assert found["js_divergence_error"] == pytest.approx(js / TOKENS)
    assert metrics(reference_policy_kl_type=KlEstimator.k1)["gen_kl_error"] == pytest.approx(
        sum(g - p for p, g in pairs) / TOKENS
    )
    assert found["loss"] == 1.5
    assert found["num_valid_samples"] == 4
    assert found["approx_entropy"] == pytest.approx(
        -sum(math.exp(c - g) * c for _, c, g in tokens("current_N", "rollout_N")) / TOKENS
    )


@pytest.mark.parametrize("kind", ["token", "sequence", "none", "forced"])
def test_ratio(kind):
    options = dict(
        sequence_level_importance_ratios=kind == "sequence",
        disable_ppo_ratio=kind == "none",
        force_on_policy_ratio=kind == "forced",
        token_level_loss=kind != "sequence",
    )
    found = metrics(ratio_clip_min=0.1, ratio_clip_max=0.3, **options)
    ratios, clamped = [], []
    for cs, ps in zip(DATA.rows(DATA.current_N), DATA.rows(DATA.proximal_N), strict=True):
        geometric = math.exp(sum(c - p for c, p in zip(cs, ps, strict=True)) / (len(cs) + 1e-8))
        for c, p in zip(cs, ps, strict=True):
            r = {"token": math.exp(c - p), "sequence": geometric, "none": c, "forced": 1.0}[kind]
            ratios.append(r), clamped.append(min(max(r, 0.9), 1.3) if kind in ("token", "sequence") else r)
    assert found["probs_ratio"] == pytest.approx(sum(ratios) / TOKENS)
    assert found["probs_ratio_clamped"] == pytest.approx(sum(clamped) / TOKENS)
    assert [found["probs_ratio_min"], found["probs_ratio_max"]] == pytest.approx([min(ratios), max(ratios)])
    assert found["probs_ratio_clamped_max"] == pytest.approx(max(clamped))


def test_truncated_weights():
    weights = [math.exp(p - g) for _, p, g in tokens("proximal_N", "rollout_N")]
    low, high = 0.8, 1.25
    outside = sum(w < low or w > high for w in weights)
    assert metrics()["sampling_importance_ratio"] == pytest.approx(sum(weights) / TOKENS)
    tis = metrics(truncation=nemo_rl.Truncation(nemo_rl.TruncationKind.tis, high))
    assert tis["sampling_importance_ratio"] == pytest.approx(sum(min(w, high) for w in weights) / TOKENS)
    assert tis["is_oob_ratio"] == pytest.approx(sum(w > high for w in weights) / TOKENS)
    icepop = metrics(truncation=nemo_rl.Truncation(nemo_rl.TruncationKind.icepop, high, low))
    assert icepop["sampling_importance_ratio"] == pytest.approx(sum(w for w in weights if low <= w <= high) / TOKENS)
    assert icepop["is_oob_ratio"] == pytest.approx(outside / TOKENS)
    assert outside


def test_rows_dropped_by_their_geometric_mean():
    low, high = 0.9, 1.1
    found = metrics(truncation=nemo_rl.Truncation(nemo_rl.TruncationKind.seq_mask_tis, high, low))
    kept, dropped = 0.0, 0
    for ps, gs in zip(DATA.rows(DATA.proximal_N), DATA.rows(DATA.rollout_N), strict=True):
        ds = [p - g for p, g in zip(ps, gs, strict=True)]
        inside = low <= math.exp(sum(ds) / (len(ds) + 1e-8)) <= high
        kept += sum(math.exp(d) for d in ds) if inside else 0.0
        dropped += bool(ds) and not inside
    assert 0 < dropped < 4
    assert found["sampling_importance_ratio"] == pytest.approx(kept / TOKENS)
    assert found["is_oob_ratio"] == pytest.approx(dropped / ROWS)


def test_weights_of_rows_count_once_for_each_row():
    found = metrics(sequence_level_importance_ratios=True, token_level_loss=False)
    products = []
    for ps, gs in zip(DATA.rows(DATA.proximal_N), DATA.rows(DATA.rollout_N), strict=True):
        products.append(math.exp(sum(p - g for p, g in zip(ps, gs, strict=True))))
    assert found["sampling_importance_ratio"] == pytest.approx(sum(products) * 4 / ROWS)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_kl_penalty(by_token, on_policy):
    found = metrics(
        reference_policy_kl_penalty=0.3, token_level_loss=by_token, use_on_policy_kl_approximation=on_policy,
        kl_output_clamp_value=0.05,
    )  # fmt: skip
    rows = [[] for _ in DATA.length_B]
    for b, c, r, g in tokens("current_N", "reference_N", "rollout_N"):
        kl = math.exp(r - c) - 1 - (r - c)
        rows[b].append(min(kl * (math.exp(c - g) if on_policy else 1.0), 0.05))
    if by_token:
        assert found["kl_penalty"] == pytest.approx(sum(map(sum, rows)) / TOKENS)
    else:
        assert found["kl_penalty"] == pytest.approx(sum(sum(row) / (len(row) + 1e-8) for row in rows) / ROWS)
    assert metrics()["kl_penalty"] == 0


def test_positive_nll():
    positive = [-c for b, c in tokens("current_N") if DATA.reward_B[b] > 0]
    found = metrics(positive_example_nll_weight=0.1)
    assert found["positive_nll_loss"] == pytest.approx(sum(positive) / (len(positive) + 1e-8))
    assert metrics()["positive_nll_loss"] == 0


def test_overflowing_weight_is_zero():
    given = DATA.of("current_N", "proximal_N", "rollout_N")
    given = {name: x.float() if x.is_floating_point() else x for name, x in given.items()}
    given["proximal_N"] = given["rollout_N"] + 95
    found = nemo_rl.loss_metrics(
        **given, options=nemo_rl.Options(truncation=nemo_rl.Truncation(nemo_rl.TruncationKind.tis, 2.0)), loss=0.0
    )
    assert found["sampling_importance_ratio"] == 0.0


def test_sequence_filter():
    given = DATA.of("proximal_N", "rollout_N", "reward_B")
    errors = [
        mean([math.exp(abs(p - g)) for p, g in zip(ps, gs, strict=True)])
        for ps, gs in zip(DATA.rows(DATA.proximal_N), DATA.rows(DATA.rollout_N), strict=True)
    ]
    filled = [e for e in errors if e]
    threshold = sorted(filled)[1]
    found = nemo_rl.sequence_filter_metrics(**given, threshold=threshold)
    left = [e for e in filled if e <= threshold]
    gone = [b for b, e in enumerate(errors) if e > threshold]
    assert found["sample_mask"].tolist() == [0 < e <= threshold for e in errors]
    assert found["max_seq_mult_prob_error"] == pytest.approx(max(filled))
    assert found["mean_seq_mult_prob_error"] == pytest.approx(mean(filled))
    assert found["min_seq_mult_prob_error"] == pytest.approx(min(filled))
    assert found["mean_seq_mult_prob_error_after_mask"] == pytest.approx(mean(left))
    assert found["num_masked_seqs"] == len(gone) == 2
    assert found["masked_correct_pct"] == pytest.approx(mean([float(DATA.reward_B[b]) for b in gone]))
    none = nemo_rl.sequence_filter_metrics(**given, threshold=None)
    assert none["num_masked_seqs"] == 0 and torch.equal(none["sample_mask"], torch.tensor([e > 0 for e in errors]))
    all_gone = nemo_rl.sequence_filter_metrics(**given, threshold=0.5)
    assert all_gone["max_seq_mult_prob_error_after_mask"] == 0.0
