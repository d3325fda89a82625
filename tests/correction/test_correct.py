"""Weights and keep flags against float64 loops, closed forms and the identities that must hold."""

from __future__ import annotations

import itertools
import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.correction import LOG_RATIO_CLAMP, RejectRule, WeightRule, correct, measure
from trimtab.errors import ConfigError, DataError
from trimtab.spec import Level, TisMode

NAN, INF = math.nan, math.inf
BOUNDS = {Level.token: (0.5, 2.0), Level.sequence: (0.3, 3.0), Level.geometric: (0.9, 1.1)}


def flat(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=dtype)


def tensors(a: list, b: list, mask: list, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return flat(a, dtype), flat(b, dtype), flat(mask, torch.bool), torch.tensor([len(row) for row in a])


def ragged(seed: int, odd: bool = False, scale: float = 0.4) -> tuple[list, list, list]:
    """Rows of uneven length: empty ones, wholly masked ones, holes; with ``odd``, missing and infinite log-probs."""
    generator = torch.Generator().manual_seed(seed)
    a, b, mask = [], [], []
    for length in [0, 7, 1, 0, 5, 12, 3, 30, 0]:
        rollout = (-torch.rand(length, generator=generator, dtype=torch.float64) * 3).tolist()
        noise = (scale * torch.randn(length, generator=generator, dtype=torch.float64)).tolist()
        a.append([x + y for x, y in zip(rollout, noise, strict=True)])
        b.append(rollout)
        mask.append((torch.rand(length, generator=generator) > 0.25).tolist())
    mask[6] = [False] * 3
    if odd:
        b[1][0], b[7][3], b[7][4], b[2][0] = NAN, NAN, -INF, NAN
        a[5][1], a[5][2], a[4][0] = -INF, NAN, NAN
        for row, at in [(1, 0), (7, 3), (7, 4), (2, 0), (5, 1), (5, 2), (4, 0)]:
            mask[row][at] = True
    return a, b, mask


def rule(level: Level, mode: TisMode, normalize: bool = False) -> WeightRule:
    lower, upper = BOUNDS[level]
    return WeightRule(level, mode, lower, upper, normalize)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("mode", [None, *TisMode])
@pytest.mark.parametrize("level", list(Level))
def test_every_level_mode_rejection_veto_and_normalising_match_the_loops(level, mode, odd, normalize):
    rejections = [(), *([r] for r in Level), (Level.token, Level.geometric)]
    for seed, (reject, veto) in enumerate(itertools.product(rejections, [None, 0.4])):
        a, b, mask = ragged(seed, odd)
        rules = [RejectRule.ratio(r, *BOUNDS[r]) for r in reject]
        weight = None if mode is None else rule(level, mode, normalize)
        done = correct(*tensors(a, b, mask), weight=weight, reject=rules, veto=veto)
        lower, upper = BOUNDS[level]
        w, keep, factor = oracle.correction(
            a, b, mask, level=level.value, mode=mode and mode.value, lower=lower, upper=upper,
            normalize=normalize and mode is not None, veto=veto, rules=[(r.value, *BOUNDS[r]) for r in reject],
        )  # fmt: skip
        torch.testing.assert_close(done.weight_N, flat(w), rtol=1e-12, atol=0)
        assert torch.equal(done.keep_N, flat(keep, torch.bool))
        assert done.factor == pytest.approx(factor, rel=1e-12)
        assert done.weight_N.isfinite().all() and not done.weight_N.requires_grad


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), max_size=9), max_size=6),
    st.sampled_from(list(Level)),
    st.sampled_from(list(TisMode)),
    st.booleans(),
)
def test_any_batch_matches_the_loops(rows, level, mode, normalize):
    a, b, mask = ([[token[i] for token in row] for row in rows] for i in range(3))
    done = correct(*tensors(a, b, mask), weight=rule(level, mode, normalize), veto=1e-4)
    lower, upper = BOUNDS[level]
    w, keep, _ = oracle.correction(
        a, b, mask, level=level.value, mode=mode.value, lower=lower, upper=upper, normalize=normalize, veto=1e-4
    )
    torch.testing.assert_close(done.weight_N, flat(w), rtol=1e-11, atol=0)
    assert torch.equal(done.keep_N, flat(keep, torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", list(TisMode))
@pytest.mark.parametrize("level", list(Level))
def test_equal_log_probs_give_exactly_one_and_keep_everything(level, mode, dtype):
    a, _, mask = ragged(0)
    a_N, _, mask_N, length_B = tensors(a, a, mask, dtype)
    rules = [RejectRule.ratio(r, 0.999, 1.001) for r in Level]
    weight = WeightRule(level, mode, 0.999, 1.001, batch_normalize=True)
    done = correct(a_N, a_N, mask_N, length_B, weight=weight, reject=rules, veto=0.5)
    assert torch.equal(done.weight_N, torch.ones_like(a_N)) and done.weight_N.dtype == dtype
    assert torch.equal(done.keep_N, mask_N)
    metrics = measure(done).as_dict()
    assert metrics["mis_ess"] == metrics["mis_ess_seq"] == metrics["mis_kept_token_fraction"] == metrics["tis"] == 1
    assert metrics["mis_batch_norm_factor"] == metrics["mis_is_ratio_max_final"] == 1
    assert metrics["mis_k3_kl"] == metrics["mis_chi2_seq"] == metrics["mis_abs_log_ratio_p99"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_are_inclusive_and_the_veto_is_strict(dtype):
    log = torch.tensor([2.0, 0.5, 2.1, 0.45], dtype=dtype).log()
    zero, mask, length = torch.zeros_like(log), torch.ones(4, dtype=torch.bool), torch.tensor([1, 1, 1, 1])
    for level in Level:
        done = correct(log, zero, mask, length, weight=WeightRule(level, TisMode.mask, 0.5, 2.0))
        assert done.keep_N.tolist() == [True, True, False, False]
        done = correct(log, zero, mask, length, weight=None, reject=[RejectRule.ratio(level, 0.5, 2.0)], veto=0.5)
        assert done.keep_N.tolist() == [True, True, False, False]
    assert correct(log, zero, mask, length, weight=None, veto=0.5).keep_N.tolist() == [True, True, True, False]


def test_closed_forms():
    d = torch.tensor([math.log(4), math.log(0.25), 0.0, math.log(3)], dtype=torch.float64)
    zero, mask, length = torch.zeros_like(d), torch.ones(4, dtype=torch.bool), torch.tensor([3, 1])

    def weights(level: Level, mode: TisMode, normalize: bool = False) -> list[float]:
        bounds = WeightRule(level, mode, 0.5, 2.0, normalize)
        return correct(d, zero, mask, length, weight=bounds).weight_N.tolist()

    assert weights(Level.token, TisMode.off) == pytest.approx([4, 0.25, 1, 3], rel=1e-15)
    assert weights(Level.token, TisMode.truncate) == pytest.approx([2, 0.25, 1, 2], rel=1e-15)
    assert weights(Level.token, TisMode.clip) == pytest.approx([2, 0.5, 1, 2], rel=1e-15)
    assert weights(Level.sequence, TisMode.clip) == pytest.approx([1, 1, 1, 2], rel=1e-15)
    assert weights(Level.sequence, TisMode.clip, True) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 4 / 3], rel=1e-15)
    assert weights(Level.token, TisMode.clip, True) == pytest.approx([x / 1.375 for x in (2, 0.5, 1, 2)], rel=1e-15)
    # mask mode: only the kept weight, 1, is in the mean
    assert weights(Level.token, TisMode.mask, True) == pytest.approx([4, 0.25, 1, 3], rel=1e-15)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("mode", list(TisMode))
@pytest.mark.parametrize("odd", [False, True])
def test_masked_positions_are_inert(level, mode, odd):
    a, b, mask = ragged(3, odd)
    a_N, b_N, mask_N, length_B = tensors(a, b, mask, torch.float32)
    kwargs = dict(weight=rule(level, mode, True), reject=[RejectRule.ratio(Level.geometric, 0.9, 1.1)], veto=0.1)
    reference = correct(a_N, b_N, mask_N, length_B, **kwargs)
    for left, right in itertools.product([INF, -INF, NAN, 1e30], repeat=2):
        other = correct(a_N.where(mask_N, left), b_N.where(mask_N, right), mask_N, length_B, **kwargs)
        assert torch.equal(other.weight_N, reference.weight_N) and torch.equal(other.keep_N, reference.keep_N)
        assert measure(other).as_dict() == measure(reference).as_dict()


@pytest.mark.parametrize("mode", list(TisMode))
def test_missing_log_probs_are_neutral(mode):
    """Weight 1, kept, in no mismatch metric, counted."""
    b = torch.tensor([-1.0, NAN, -2.0, NAN, NAN])
    a = torch.tensor([-1.1, -3.0, -2.2, -1.0, -9.0])
    mask, length = torch.ones(5, dtype=torch.bool), torch.tensor([3, 2])
    done = correct(a, b, mask, length, weight=WeightRule(Level.token, mode, 0.5, 2.0), veto=0.5)
    assert done.weight_N[[1, 3, 4]].tolist() == [1, 1, 1] and done.keep_N.all()
    metrics = measure(done).as_dict()
    assert metrics["mis_missing_logprob_count"] == 3 and metrics["mis_infinite_log_ratio_count"] == 0
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(0.15, rel=1e-6)
    assert metrics["mis_training_log_ppl"] == pytest.approx(1.65, rel=1e-6)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("bad", [(0.0, -INF), (-INF, 0.0), (-INF, -INF), (NAN, -1.0), (INF, -1.0)])
def test_infinite_log_ratios_are_catastrophic(level, bad):
    """Rejected by whatever covers them, saturating otherwise, never taken for missing."""
    a, b = torch.tensor([-1.0, bad[0], -1.0]), torch.tensor([-1.0, bad[1], -1.0])
    mask, length = torch.ones(3, dtype=torch.bool), torch.tensor([2, 1])
    rejected = [True, False, True] if level is Level.token else [False, False, True]
    for kwargs in (
        dict(weight=WeightRule(level, TisMode.mask, 0.0, None)),
        dict(weight=None, reject=[RejectRule.ratio(level, 0.0, INF)]),
    ):
        done = correct(a, b, mask, length, **kwargs)
        assert done.keep_N.tolist() == rejected and done.weight_N.isfinite().all()
    assert correct(a, b, mask, length, weight=None, veto=1e-9).keep_N.tolist() == [False, False, True]
    done = correct(a, b, mask, length, weight=WeightRule(level, TisMode.clip, 0.5, 2.0))
    assert done.weight_N[1] == (2.0 if bad[1] == -INF != bad[0] or bad[0] == INF else 0.5) and done.keep_N.all()
    metrics = measure(done).as_dict()
    assert metrics["mis_infinite_log_ratio_count"] == 1 and metrics["mis_missing_logprob_count"] == 0
    assert all(map(math.isfinite, metrics.values())) and metrics["mis_abs_log_ratio_max"] == 0


def test_extreme_token_inside_and_outside_a_geometric_band():
    """A log-ratio of +120 on one token; kept or rejected, the weight is finite."""
    for others, kept in ((-1.0, True), (0.0, False)):
        a = torch.full((121,), others)
        a[0] = 120.0
        done = correct(
            a, torch.zeros(121), torch.ones(121, dtype=torch.bool), torch.tensor([121]),
            weight=WeightRule(Level.token, TisMode.off, None, None),
            reject=[RejectRule.ratio(Level.geometric, 0.9, 1.1)],
        )  # fmt: skip
        assert bool(done.keep_N.all()) is kept and bool(done.keep_N.any()) is kept
        assert done.weight_N[0].item() == pytest.approx(math.exp(LOG_RATIO_CLAMP), rel=1e-6)
        assert measure(done).as_dict()["mis_clamped_log_ratio_count"] == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_long_sequence_saturates_and_is_counted(sign):
    """4,096 tokens of +-0.03 sum to 123."""
    a, mask = torch.full((4096,), 0.03 * sign), torch.ones(4096, dtype=torch.bool)
    off = WeightRule(Level.sequence, TisMode.off, None, None)
    done = correct(a, torch.zeros(4096), mask, torch.tensor([4096]), weight=off)
    assert done.weight_N.tolist() == pytest.approx([math.exp(20.0 * sign)] * 4096, rel=1e-6)
    metrics = measure(done).as_dict()
    assert metrics["mis_clamped_log_ratio_count"] == 1
    assert metrics["mis_abs_log_ratio_p50"] == pytest.approx(0.03, rel=2**-8)


@pytest.mark.parametrize("mode", [None, *TisMode])
def test_all_rejected(mode):
    """A band that rejects everything leaves ESS 0 and finite weights."""
    a, b, mask = ragged(5)
    weight = None if mode is None else WeightRule(Level.token, mode, 0.5, 2.0, True)
    done = correct(*tensors(a, b, mask), weight=weight, reject=[RejectRule.ratio(Level.geometric, 5.0, 6.0)])
    assert not done.keep_N.any() and done.weight_N.isfinite().all()
    metrics = measure(done).as_dict()
    assert metrics["mis_ess"] == metrics["mis_kept_token_fraction"] == metrics["mis_kept_seq_fraction"] == 0
    assert all(map(math.isfinite, metrics.values()))


def test_rejection_leaves_weights_alone():
    """Keep and weight are separate answers."""
    a, b, mask = ragged(6)
    weight = rule(Level.token, TisMode.truncate)
    free = correct(*tensors(a, b, mask), weight=weight)
    some = correct(*tensors(a, b, mask), weight=weight, reject=[RejectRule.ratio(Level.token, 0.8, 1.2)], veto=0.3)
    assert torch.equal(free.weight_N, some.weight_N) and some.keep_N.sum() < free.keep_N.sum()


def test_veto_has_a_direction():
    """A low threshold vetoes low ratios only; one of 1 or more is refused."""
    a = torch.tensor([-12.0, 0.0, 12.0, 0.0])
    done = correct(a, torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.tensor([2, 2]), weight=None, veto=1e-4)
    assert done.keep_N.tolist() == [False, False, True, True]
    for threshold in (1e4, 1.0, 0.0, -1.0, NAN):
        with pytest.raises(ConfigError, match="rs_veto_threshold"):
            correct(a, a, a > 0, torch.tensor([2, 2]), weight=None, veto=threshold)


def test_opposite_log_ratios_cancel_in_row_levels_but_not_at_token_level():
    """+5, -5 passes sum and geometric bounds; token bounds and the veto catch it."""
    a = torch.tensor([5.0, -5.0, 5.0, -5.0])
    mask, length = torch.ones(4, dtype=torch.bool), torch.tensor([4])
    for level, kept in ((Level.sequence, True), (Level.geometric, True), (Level.token, False)):
        done = correct(a, torch.zeros(4), mask, length, weight=None, reject=[RejectRule.ratio(level, 0.5, 2.0)])
        assert bool(done.keep_N.any()) is kept
    assert not correct(a, torch.zeros(4), mask, length, weight=None, veto=0.01).keep_N.any()


@pytest.mark.parametrize("level", list(Level))
def test_the_factor_does_not_depend_on_the_cut(level):
    """Parts merge their sums, an empty row counts for nothing, every level is supported."""
    a, b, mask = ragged(8)
    whole = correct(*tensors(a, b, mask), weight=rule(level, TisMode.mask, True))
    for cuts in ([4], [2, 5, 7], list(range(1, 9))):
        edges = [0, *cuts, len(a)]
        parts = [[x[i:j] for x in (a, b, mask)] for i, j in itertools.pairwise(edges)]
        first = [correct(*tensors(*part), weight=rule(level, TisMode.mask, True)).mass for part in parts]
        mass = first[0]
        for other in first[1:]:
            mass = mass.merge(other)
        done = [correct(*tensors(*p), weight=rule(level, TisMode.mask, True), factor=mass.value) for p in parts]
        assert mass.value == pytest.approx(whole.factor, rel=1e-14)
        torch.testing.assert_close(torch.cat([d.weight_N for d in done]), whole.weight_N, rtol=1e-14, atol=0)


@pytest.mark.parametrize("mode", list(TisMode))
@pytest.mark.parametrize("level", list(Level))
def test_cutting_the_batch_changes_no_bit(level, mode):
    generator = torch.Generator().manual_seed(1)
    length_B = torch.randint(0, 3000, (64,), generator=generator)
    b_N = -torch.rand(int(length_B.sum()), generator=generator)
    a_N = b_N + 0.02 * torch.randn(len(b_N), generator=generator)
    mask_N = torch.rand(len(b_N), generator=generator) > 0.1
    kwargs = dict(
        weight=WeightRule(level, mode, 0.9, 1.1), reject=[RejectRule.ratio(Level.sequence, 0.5, 2.0)], veto=0.95
    )
    whole = correct(a_N, b_N, mask_N, length_B, **kwargs)
    pieces = [x.split(length_B.tolist()) for x in (a_N, b_N, mask_N)]
    rows = [correct(*row, length.view(1), **kwargs) for *row, length in zip(*pieces, length_B, strict=True)]
    assert torch.equal(torch.cat([r.weight_N for r in rows]), whole.weight_N)
    assert torch.equal(torch.cat([r.keep_N for r in rows]), whole.keep_N)


def test_float32_row_sums_are_float64():
    """A running float32 sum over this batch would be off by far more than the band is wide."""
    length_B = torch.full((40,), 8192)
    a_N = torch.full((40 * 8192,), 1e-4)
    done = correct(
        a_N + 3, torch.full_like(a_N, 3.0), torch.ones_like(a_N, dtype=torch.bool), length_B,
        weight=WeightRule(Level.sequence, TisMode.off, None, None),
    )  # fmt: skip
    exact = math.exp(8192 * ((a_N[0] + 3).double() - 3).item())
    assert done.weight_N.tolist() == pytest.approx([exact] * len(a_N), rel=1e-6)


def test_gradients_never_pass():
    a = torch.zeros(3, requires_grad=True)
    done = correct(
        a, torch.zeros(3), torch.tensor([True, True, False]), torch.tensor([3]), weight=rule(Level.token, TisMode.clip)
    )
    assert not done.weight_N.requires_grad


def test_wrong_shapes_and_bounds_are_refused():
    a, mask, length = torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.tensor([2, 2])
    with pytest.raises(DataError, match="length_B adds up to 4"):
        correct(a, a, mask, length, weight=None)
    with pytest.raises(DataError, match="row_N"):
        correct(a, a, mask, torch.tensor([2, 1]), weight=None, row_N=torch.tensor([0, 1, 1]))
    correct(a, a, mask, torch.tensor([2, 1]), weight=None, row_N=torch.tensor([0, 0, 1]))
    with pytest.raises(ConfigError, match="tis_upper_bound"):
        WeightRule(Level.token, TisMode.clip, 2.0, 0.5)
    with pytest.raises(ConfigError, match="rs_lower_bound"):
        RejectRule.ratio(Level.token, -0.5, 2.0)


@pytest.mark.parametrize("row_N", [None, torch.tensor([0, 0, 1])])
@pytest.mark.parametrize(
    ("length_B", "message"),
    [
        (torch.tensor([4, -1]), "length_B holds -1 for row 1"),
        (torch.tensor([2.0, 1.0]), r"length_B is torch.float32 \[2.0, 1.0\]"),
        (torch.tensor([1.5, 1.5]), r"length_B is torch.float32 \[1.5, 1.5\]"),
        (torch.tensor([math.nan, 3.0]), r"length_B is torch.float32 \[nan, 3.0\]"),
        (torch.tensor([True, True, True]), r"length_B is torch.bool \[True, True, True\]"),
        (torch.tensor([[2, 1]]), r"length_B has shape \(1, 2\)"),
        (torch.tensor(3), r"length_B has shape \(\)"),
    ],
)
def test_lengths_that_count_no_tokens_are_refused(length_B, message, row_N):
    a, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(DataError, match=message):
        correct(a, a, mask, length_B, weight=None, row_N=row_N)


def test_no_tokens_at_all():
    none = torch.zeros(0)
    for length_B in (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)):
        done = correct(none, none, none.bool(), length_B, weight=rule(Level.token, TisMode.clip, True), veto=0.5)
        assert done.weight_N.numel() == done.keep_N.numel() == 0 and done.factor == 1
        assert all(map(math.isfinite, measure(done).as_dict().values()))
