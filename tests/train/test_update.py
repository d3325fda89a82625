"""One training step on the toy: gradients, denominators, rejection, faults."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from composing import composed
from torch import Tensor
from toy import ToyPolicy, toy_batch

from trimtab.batch import Batch
from trimtab.config import check, resolve
from trimtab.config.keys import with_values
from trimtab.errors import ConfigError
from trimtab.objective.advantage import group_advantages
from trimtab.spec import (
    AdvantageKl,
    Aggregate,
    Algo,
    Baseline,
    Denominator,
    KlEstimator,
    KlImportance,
    Level,
    LossName,
    OverTokens,
    Pair,
    Proximal,
    RatioLevel,
    RejectSpec,
    RejectTerms,
    RunSpec,
    Scale,
    Sign,
    Statistic,
    TisMode,
)
from trimtab.train.clock import Clock
from trimtab.train.optim import Optimizer
from trimtab.train.update import Outcome, Updater


class Recorded(Optimizer):
    """Keeps a copy of the gradient of every step it is asked for."""

    def __init__(self, policy: ToyPolicy, spec: RunSpec) -> None:
        super().__init__(policy.parameters(), spec.optim, spec.steps)
        self.policy, self.gradients = policy, list[Tensor]()

    def step(self) -> float | None:
        assert self.policy.table.grad is not None
        self.gradients.append(self.policy.table.grad.clone())
        return super().step()


def advantages(batch: Batch) -> Tensor:
    return group_advantages(batch.reward_B, batch.group_B, baseline=Baseline.group_mean, scale=Scale.std).advantage_B


def step(
    given: list[str] | RunSpec, batch: Batch | None = None, poison: float | None = None, dropped: Tensor | None = None
) -> tuple[Outcome, Recorded, ToyPolicy]:
    """One training step from overrides, or from a resolved spec."""
    spec, policy = given if isinstance(given, RunSpec) else composed(*given), ToyPolicy()
    batch = batch if batch is not None else toy_batch(policy)
    policy.poison = poison
    optimizer = Recorded(policy, spec)
    dropped = dropped if dropped is not None else torch.zeros(batch.rows, dtype=torch.bool)
    update = Updater(policy, optimizer, spec)
    outcome = update(batch, advantages(batch), dropped, torch.zeros_like(batch.version_N), 1, Clock())
    return outcome, optimizer, policy


ALGOS = ("standard", "bypass", "decoupled", "on_policy", "reinforce")


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("aggregate", [a.name for a in Aggregate])
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_gradient_and_metrics_do_not_depend_on_the_cut_into_micro_batches(
    algo: str, aggregate: str, denominator: str
) -> None:
    common = [f"algo={algo}", f"loss.aggregate={aggregate}", f"loss.denominator={denominator}"]
    common += ["rs=token", "mis.rs_lower_bound=0.8", "mis.rs_upper_bound=1.25", "mis.tis_batch_normalize=true"]
    common += ["loss.kl_coef=0.1", "loss.entropy_coef=0.01"]
    whole, one, _ = step([*common, "optim.microbatch_tokens=100000"])
    for budget in (9, 20, 50):
        cut, many, policy = step([*common, f"optim.microbatch_tokens={budget}"])
        assert policy.forwards > 2
        assert torch.allclose(many.gradients[0], one.gradients[0], rtol=1e-6, atol=1e-9)
        for name, value in whole.metrics.items():
            assert cut.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def expected_token_mean(policy: ToyPolicy, batch: Batch, weight: Any) -> Tensor:
    """Gradient of -mean A w logp at the first step, by a loop over tokens in float64."""
    table = policy.initial.clone().requires_grad_()
    advantage_B, at, total = advantages(batch), 0, torch.zeros((), dtype=torch.float64)
    for row in range(batch.rows):
        ids, n = batch.ids_B[row].tolist(), int(batch.length_B[row])
        for i in range(len(ids) - n, len(ids)):
            logp = table[ids[i - 1]].log_softmax(0)[ids[i]]
            w = weight(float(logp.detach()), float(batch.rollout_logp_N[at]))
            total = total - advantage_B[row] * w * logp / batch.tokens
            at += 1
    return torch.autograd.grad(total, table)[0]


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        (["algo=standard"], lambda p, mu: 1.0),
        (["algo=decoupled", "mis.tis_upper_bound=1.1"], lambda p, mu: min(math.exp(p - mu), 1.1)),
        (["algo=decoupled", "tis_mode=off"], lambda p, mu: 1.0),
        (["algo=reinforce", "mis.tis_upper_bound=1.1"], lambda p, mu: min(math.exp(p - mu), 1.1)),
        (["tis_mode=clip", "mis.tis_upper_bound=1.1"], lambda p, mu: min(max(math.exp(p - mu), 1 / 1.1), 1.1)),
        (["tis_mode=mask", "mis.tis_upper_bound=1.1"], lambda p, mu: math.exp(p - mu) * (abs(p - mu) <= math.log(1.1))),
        (["algo=bypass", "loss.clip_low=1", "loss.clip_high=1e6"], lambda p, mu: math.exp(p - mu)),
    ],
)  # fmt: skip
def test_first_gradient_equals_a_loop_over_tokens(overrides: list[str], weight: Any) -> None:
    policy = ToyPolicy()
    batch = toy_batch(policy)
    _, optimizer, _ = step(overrides, batch)
    assert torch.allclose(optimizer.gradients[0], expected_token_mean(policy, batch, weight), rtol=1e-5, atol=1e-8)


def test_metrics_only_measures_and_leaves_the_gradient_of_standard() -> None:
    _, standard, _ = step(["algo=standard"])
    outcome, measured, _ = step(["algo=decoupled", "algo.metrics_only=true", "rs=token", "mis.rs_upper_bound=1.01"])
    assert torch.equal(standard.gradients[0], measured.gradients[0])
    assert outcome.metrics["train/mis_kept_token_fraction"] < 1.0


def test_decoupled_weights_come_from_the_proximal_policy_and_stay_over_epochs() -> None:
    policy = ToyPolicy()
    batch = toy_batch(policy)
    outcome, optimizer, _ = step(["optim.epochs=3", "optim.lr=0.05", "loss.clip_high=10", "loss.clip_low=1"], batch)
    assert outcome.applied == 3
    # The last gradient by hand: weights of the first policy, PPO ratio of the one before the last step.
    table = policy.initial.clone().requires_grad_()
    replayed = ToyPolicy()
    again = Recorded(replayed, composed("optim.lr=0.05"))
    for gradient in optimizer.gradients[:2]:
        replayed.table.grad = gradient.clone()
        again.step()
    table = replayed.table.detach().clone().requires_grad_()
    at, total, advantage_B = 0, torch.zeros((), dtype=torch.float64), advantages(batch)
    for row in range(batch.rows):
        ids, n = batch.ids_B[row].tolist(), int(batch.length_B[row])
        for i in range(len(ids) - n, len(ids)):
            current = table[ids[i - 1]].log_softmax(0)[ids[i]]
            proximal = float(policy.initial[ids[i - 1]].log_softmax(0)[ids[i]])
            w = min(math.exp(proximal - float(batch.rollout_logp_N[at])), 2.0)
            total = total - advantage_B[row] * w * (current - proximal).exp() / batch.tokens
            at += 1
    assert torch.allclose(optimizer.gradients[2], torch.autograd.grad(total, table)[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("algo", ["decoupled", "bypass", "reinforce"])
def test_a_fully_rejected_batch_makes_no_step_and_moves_no_schedule(algo: str) -> None:
    batch = toy_batch(ToyPolicy())
    far = replace(batch, rollout_logp_N=batch.rollout_logp_N - 5.0)
    outcome, optimizer, policy = step([f"algo={algo}", "rs=sequence", "optim.warmup_steps=4"], far)
    assert (outcome.applied, outcome.all_rejected, outcome.nonfinite) == (0, 1, 0)
    assert torch.equal(policy.table.detach(), policy.initial)
    assert optimizer.updates == 0 and optimizer.lr == pytest.approx(3e-4 / 4)
    assert outcome.metrics["train/loss"] == 0.0


@pytest.mark.parametrize("algo", ALGOS)
def test_a_non_finite_forward_makes_no_step(algo: str) -> None:
    outcome, _, policy = step([f"algo={algo}"], poison=math.nan)
    assert (outcome.applied, outcome.nonfinite) == (0, 1)
    assert torch.equal(policy.table.detach(), policy.initial)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poisoned_rollout_log_probs_are_survived_and_counted(algo: str, poison: float) -> None:
    batch = toy_batch(ToyPolicy())
    spoilt_N = batch.rollout_logp_N.clone()
    spoilt_N[[0, 5]] = poison
    outcome, optimizer, _ = step([f"algo={algo}", "rs=token"], replace(batch, rollout_logp_N=spoilt_N))
    assert outcome.applied == 1
    assert optimizer.gradients[0].isfinite().all()
    name = "missing_logprob" if math.isnan(poison) else "infinite_log_ratio"
    assert outcome.metrics[f"train/mis_{name}_count"] == 2.0


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 100.0])
def test_what_stands_at_tokens_that_are_not_the_policys_changes_nothing(algo: str, poison: float) -> None:
    batch = toy_batch(ToyPolicy())
    mask_N = torch.ones(batch.tokens, dtype=torch.bool)
    mask_N[[1, 4, 9]] = False
    clean = replace(batch, mask_N=mask_N)
    spoilt_N = batch.rollout_logp_N.clone()
    spoilt_N[~mask_N] = poison
    extra = [f"algo={algo}", "rs=geometric", "veto=at_1e-4", "mis.rs_lower_bound=0.5", "mis.rs_upper_bound=2"]
    one, first, _ = step(extra, clean)
    two, second, _ = step(extra, replace(clean, rollout_logp_N=spoilt_N))
    assert torch.equal(first.gradients[0], second.gradients[0])
    assert {k: v for k, v in one.metrics.items()} == {k: v for k, v in two.metrics.items()}


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_the_kept_denominator_scales_the_gradient_by_all_over_kept(share: float) -> None:
    """Why grad_norm and mis_kept_token_fraction are to be read together: the direction is the same, the size isn't."""
    batch = toy_batch(ToyPolicy())
    far_N = torch.arange(batch.tokens) < share * batch.tokens
    far = replace(batch, rollout_logp_N=batch.rollout_logp_N - 9.0 * far_N)
    common = ["tis_mode=off", "rs=token", "mis.rs_lower_bound=0.01", "mis.rs_upper_bound=100"]
    everything = step([*common, "loss.denominator=all"], far)[1].gradients[0]
    kept = step([*common, "loss.denominator=kept"], far)[1].gradients[0]
    assert torch.allclose(kept, everything * batch.tokens / int((~far_N).sum()), rtol=1e-5, atol=1e-9)


def test_dropped_rows_take_no_part() -> None:
    batch = toy_batch(ToyPolicy())
    dropped = torch.arange(batch.rows) < 8
    _, optimizer, _ = step([], batch, dropped=dropped)
    advantage_B = advantages(batch)
    rest = batch.select(range(8, batch.rows))
    spec, policy = composed(), ToyPolicy()
    alone = Recorded(policy, spec)
    none = torch.zeros(rest.rows, dtype=torch.bool)
    Updater(policy, alone, spec)(rest, advantage_B[8:], none, torch.zeros_like(rest.version_N), 1, Clock())
    assert torch.allclose(optimizer.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-10)


def test_minibatches_cover_every_row_once() -> None:
    outcome, optimizer, _ = step(["optim.minibatches=4", "optim.epochs=2"])
    assert outcome.applied == len(optimizer.gradients) == 8


@pytest.mark.parametrize("lengths", [[0, 3, 0], [0, 0, 1]])
def test_empty_responses_are_no_rows_of_the_loss(lengths: list[int]) -> None:
    batch = toy_batch(ToyPolicy(), prompts=3, group=1)
    keep = [i for row, n in enumerate(lengths) for i in batch.positions_of([row])[:n].tolist()]
    short = Batch(
        ids_B=tuple(
            ids[: len(ids) - int(had) + n] for ids, had, n in zip(batch.ids_B, batch.length_B, lengths, strict=True)
        ),
        length_B=torch.tensor(lengths),
        row_N=batch.row_N[keep],
        token_N=batch.token_N[keep],
        rollout_logp_N=batch.rollout_logp_N[keep],
        version_N=batch.version_N[keep],
        mask_N=batch.mask_N[keep],
        group_B=batch.group_B,
        reward_B=batch.reward_B,
    )  # fmt: skip
    for algo in ALGOS:
        spec, policy = composed(f"algo={algo}"), ToyPolicy()
        outcome = Updater(policy, Recorded(policy, spec), spec)(
            short, torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.zeros_like(short.version_N), 1, Clock()
        )
        assert outcome.applied == 1


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "algo": [{"algo.name": name} for name in Algo],
    "proximal": [{"algo.proximal": kind} for kind in Proximal],
    "loss": [{"loss.name": name} for name in LossName],
    "ratio_level": [{"loss.ratio_level": level} for level in RatioLevel],
    "clip": [{"loss.dual_clip": 1.5}, {"loss.ratio_cap": 1.5}, {"loss.clip_low": 1.0}],
    "clamps": [{"loss.log_ratio_clamp": None}, {"mis.log_ratio_clamp": None}],
    "reject": [
        {"mis.reject": [RejectSpec(statistic, Level.sequence, over, upper=1.5)]}
        for statistic in Statistic
        for over in OverTokens
    ],
    "tokens": [{"mis.reject": [RejectSpec(Statistic.k2, Level.token, upper=0.1, sign=sign)]} for sign in Sign],
    "pairs": [{"mis.reject": [RejectSpec(Statistic.abs, Level.token, upper=0.1, pair=pair)]} for pair in Pair],
    "chain": [
        {
            "mis.reject": [
                RejectSpec(Statistic.ratio, Level.sequence, OverTokens.mean, 0.9, 1.1, inverse=True, clamp=1.0),
                RejectSpec(Statistic.prob_diff, Level.token, lower=-0.2, upper=0.2),
            ]
        },
    ],
    "m2": [{"mis.m2_threshold": 0.01}],
    "advantage_kl": [{"loss.advantage_kl": kind, "loss.advantage_kl_coef": 0.1} for kind in AdvantageKl],
    "extras": [
        {"loss.log_ratio_penalty": 0.1},
        {"loss.top_entropy": 0.3},
        {"loss.positive_nll_coef": 0.1},
        {"loss.entropy_coef": 0.01},
    ],
    "metrics_only": [{"algo.metrics_only": flag} for flag in (True, False)],
    "tis_mode": [{"mis.tis_mode": mode} for mode in TisMode],
    "level": [{"mis.tis_level": level} for level in Level],
    "normalize": [{"mis.tis_batch_normalize": flag} for flag in (True, False)],
    "rs": [{"mis.use_rs": False}, *({"mis.use_rs": True, "mis.rs_level": level} for level in Level)],
    "veto": [{"mis.rs_veto_threshold": value} for value in (None, 1e-4, 1e-5, 1e-6, 0.9)],
    "denominator": [{"loss.denominator": value} for value in Denominator],
    "reject_terms": [{"loss.reject_terms": value} for value in RejectTerms],
    "aggregate": [{"loss.aggregate": value} for value in Aggregate],
    "kl": [{"loss.kl_coef": 0.01, "loss.kl_gradient": kind} for kind in KlEstimator],
    "kl_importance": [
        {"loss.kl_coef": 0.01, "loss.kl_importance": kind, "loss.kl_clamp": 10.0, "loss.kl_input_clamp": 20.0}
        for kind in KlImportance
    ],
}
PAIRS = list(itertools.combinations(OPTIONS, 2))
ONE_BATCH = toy_batch(ToyPolicy(), prompts=3, group=2, gap=0.05)
STEPPED: dict[str, Outcome] = {}


def one_step(values: dict[str, Any]) -> None:
    """What is refused says so; everything else makes a step with finite metrics."""
    spec = with_values(RunSpec(), values)
    try:
        check(spec)
    except ConfigError as refusal:
        assert " is refused; allowed: " in str(refusal)
        return
    resolved = resolve(spec)
    if (key := repr(resolved)) not in STEPPED:  # many pairs come to the same: what nothing reads is resolved away
        STEPPED[key] = step(resolved, ONE_BATCH)[0]
    outcome = STEPPED[key]
    assert outcome.applied + outcome.all_rejected == 1, values
    assert all(math.isfinite(value) for value in outcome.metrics.values()), values


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, id="-".join(pair), marks=() if "algo" in pair else pytest.mark.slow) for pair in PAIRS],
)
def test_every_pair_of_options_makes_one_step(one: str, other: str) -> None:
    """The same pairs go through Hydra in tests/config."""
    for x, y in itertools.product(OPTIONS[one], OPTIONS[other]):
        one_step({**x, **y})


def test_few_pairs_are_refused() -> None:
    """A rule that refused nearly everything would let the test above pass."""
    refused, pairs = 0, 0
    for one, other in PAIRS:
        for x, y in itertools.product(OPTIONS[one], OPTIONS[other]):
            pairs += 1
            try:
                check(with_values(RunSpec(), {**x, **y}))
            except ConfigError:
                refused += 1
    assert pairs > 4000
    assert refused < 0.08 * pairs
