"""Shadow figures against each method evaluated alone at its first update; the shortcuts that make them cheap."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from composing import composed
from torch import Tensor

from trimtab.config import methods, recipes, resolve
from trimtab.correction import measure
from trimtab.method import Inputs, Result, Shadows, evaluate, policy_term, recomputes
from trimtab.spec import Algo, AlgoSpec, Denominator, LossName, MethodSpec, MisSpec, Proximal, RunSpec, TisMode

PRESETS = recipes()


@cache
def presets() -> dict[str, MethodSpec]:
    return methods(PRESETS, RunSpec())


def random_inputs(seed: int, *, dtype: torch.dtype = torch.float64, gap: float = 0.3, poison: bool = False) -> Inputs:
    """A ragged batch with holes, an empty row and a row without valid tokens; poison: NaN and inf in the rollout's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    length_B = torch.randint(1, 9, (14,), generator=generator)
    length_B[3] = 0
    row_N = torch.repeat_interleave(torch.arange(14), length_B)
    n = len(row_N)
    rollout_N = -normal(n).abs() - 0.5
    proximal_N = rollout_N + gap * normal(n)
    valid_N = torch.rand(n, generator=generator) > 0.15
    valid_N[row_N == 5] = False
    rollout_N[~valid_N], proximal_N[~valid_N] = torch.nan, torch.inf
    if poison:
        at = valid_N.nonzero()[:, 0][torch.randperm(int(valid_N.sum()), generator=generator)[:5]]
        rollout_N[at] = torch.tensor([torch.nan, torch.nan, -torch.inf, torch.inf, -60.0], dtype=torch.float64)
    return Inputs(
        current_N=torch.full((n,), torch.nan, dtype=dtype),  # never looked at
        rollout_N=rollout_N.to(dtype),
        valid_N=valid_N,
        row_N=row_N,
        length_B=length_B,
        advantage_B=normal(14).to(dtype),
        proximal_N=proximal_N.to(dtype),
        reward_B=normal(14),
        group_B=torch.arange(14) // 3,
        lag_N=torch.randint(0, 3, (n,), generator=generator),
    )


def alone(method: MethodSpec, inputs: Inputs) -> Result:
    """The method's own evaluation of its first update: current = proximal, which it has if a forward scores it."""
    proximal_N = inputs.proximal_N if recomputes(method) else None
    return evaluate(policy_term(method), replace(inputs, current_N=inputs.proximal_N, proximal_N=proximal_N))


def expected(method: MethodSpec, inputs: Inputs) -> dict[str, float]:
    """Figures from ``evaluate``'s result: by plain sums over its weights and keeps."""
    result = alone(method, inputs)
    valid_N, row_N, corrections = inputs.valid_N, inputs.row_N, result.applied.corrections
    keep_N = torch.stack([c.keep_N for c in corrections]).all(0) & valid_N
    weight_N = corrections[0].weight_N.double()
    inside = method.algo.name is Algo.bypass and method.loss.name is not LossName.reinforce
    if inside:  # the ratio of the loss, on-policy where the rollout's log-prob is missing
        weight_N = ratio_of_the_loss(method, inputs)
    kept = weight_N[keep_N].clamp(max=min(1e140, torch.finfo(inputs.rollout_N.dtype).max))  # as metrics hold infinity
    tokens, square = int(valid_N.sum()), float(kept.square().sum())
    rows = {int(r) for r in row_N[valid_N]}
    figures = {
        "kept_token_fraction": int(keep_N.sum()) / tokens,
        "kept_seq_fraction": len({int(r) for r in row_N[keep_N]}) / len(rows),
        "ess": float(kept.sum()) ** 2 / (tokens * square) if square else 0.0,
        "weight_mean": float(kept.mean()) if len(kept) else 0.0,
        "pg_loss": float(result.loss.policy),
    }
    if not inside:  # where a rule is on the weight's own pair, the run's metrics say the same
        measured = measure(corrections[0]).as_dict()
        if len(corrections) == 1:
            assert figures["ess"] == pytest.approx(measured["mis_ess"])
            assert figures["kept_token_fraction"] == measured["mis_kept_token_fraction"]
            assert figures["kept_seq_fraction"] == measured["mis_kept_seq_fraction"]
    if inside:
        unrejected = MisSpec(tis_mode=TisMode.off)
        every = replace(method, mis=unrejected, loss=replace(method.loss, denominator=Denominator.all))
        found = alone(every, inputs).surrogate
        clipped_N = found.clipped_low_N | found.clipped_high_N | found.dual_clipped_N
        figures["saturated_fraction"] = int((clipped_N & valid_N).sum()) / tokens
    return figures


def ratio_of_the_loss(method: MethodSpec, inputs: Inputs) -> Tensor:
    assert inputs.proximal_N is not None
    d_N = torch.where(inputs.valid_N & ~inputs.rollout_N.isnan(), inputs.proximal_N - inputs.rollout_N, 0.0).double()
    if method.loss.ratio_level.name != "token":
        for row in range(len(inputs.length_B)):
            mine = inputs.valid_N & (inputs.row_N == row)
            d_N[mine] = d_N[mine].mean().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    clamp = method.loss.log_ratio_clamp
    return (d_N if clamp is None else d_N.clamp(-clamp, clamp)).exp()


def compare(given: dict[str, MethodSpec], inputs: Inputs, rel: float) -> None:
    for name, figures in Shadows(given)(inputs).items():
        want = expected(given[name], inputs)
        got = {key: figures[key] for key in want}
        assert got == pytest.approx(want, rel=rel, abs=rel, nan_ok=True), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gap", [1e-3, 0.3, 3.0])
def test_every_preset_equals_itself_alone(seed: int, gap: float) -> None:
    compare(presets(), random_inputs(seed, gap=gap), 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_every_preset_equals_itself_alone_on_poisoned_rollouts(seed: int) -> None:
    compare(presets(), random_inputs(seed, poison=True), 1e-9)


def test_every_preset_equals_itself_alone_in_float32() -> None:
    compare(presets(), random_inputs(7, dtype=torch.float32), 2e-5)


LOSSES = ["grpo", "dual_clip", "cispo", "sapo", "gmpo", "gspo", "vespo", "dppo_tv", "dppo_kl", "luspo", "reinforce"]
CORRECTIONS: dict[str, list[str]] = {
    "truncate": ["mis.tis_upper_bound=1.2"],
    "normalised": ["mis.tis_batch_normalize=true", "level=sequence"],
    "masked": ["tis_mode=mask", "mis.tis_upper_bound=1.1"],
    "rejecting": ["rs=token", "mis.rs_upper_bound=1.1", "veto=at_1e-4", "level=geometric"],
    "opsm": ["mis.reject=[{statistic:abs,level:token,upper:0.05,pair:current_proximal}]"],
    "m2": ["mis.m2_threshold=0.02"],
    "signed": ["mis.reject=[{statistic:k1,level:sequence,over_tokens:sum,upper:0.1,sign:negative}]"],
}


def of(algo: str, loss: str, rules: tuple[str, ...], kept: bool) -> MethodSpec:
    mis, spec = composed(*rules, f"algo={algo}").mis, composed(f"loss={loss}")
    denominator = Denominator.kept if kept else Denominator.all
    whole = replace(spec, mis=mis, algo=AlgoSpec(Algo[algo]), loss=replace(spec.loss, denominator=denominator))
    made = resolve(whole)
    return MethodSpec(made.algo, made.mis, made.loss)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_loss_under_every_correction_equals_itself_alone(correction: str) -> None:
    rules = CORRECTIONS[correction]
    algos = ("decoupled",) if "current_proximal" in rules[0] else ("standard", "decoupled", "bypass", "on_policy")
    asked = itertools.product(algos, LOSSES, (False, True))
    found = {f"{algo}-{loss}-{kept}": of(algo, loss, tuple(rules), kept) for algo, loss, kept in asked}
    for seed in range(2):
        compare(found, random_inputs(seed), 1e-9)
    compare(found, random_inputs(8, poison=True), 1e-9)


@pytest.mark.parametrize("correction", ["truncate", "opsm", "rejecting", "elsewhere"])
def test_a_guessed_proximal_policy_makes_other_pairs_differ(correction: str) -> None:
    elsewhere = ["mis.reject=[{statistic:k2,level:token,upper:0.01,pair:current_rollout}]", "rs=token"]
    mis = composed(*CORRECTIONS.get(correction, elsewhere)).mis
    whole = resolve(replace(RunSpec(), mis=mis, algo=AlgoSpec(Algo.decoupled, Proximal.loglinear)))
    method = MethodSpec(whole.algo, whole.mis, whole.loss)
    for seed in range(4):
        compare({"guess": method}, random_inputs(seed, poison=seed % 2 == 1), 1e-9)


def test_methods_do_not_disturb_each_other() -> None:
    inputs = random_inputs(1, poison=True)
    together = Shadows(presets())(inputs)
    for name, method in presets().items():
        assert repr(Shadows({name: method})(inputs)[name]) == repr(together[name]), name


@pytest.mark.parametrize("lengths", [[0, 0], [0, 1, 0], [1]])
def test_hardly_any_tokens(lengths: list[int]) -> None:
    length_B = torch.tensor(lengths)
    n, row_N = sum(lengths), torch.repeat_interleave(torch.arange(len(lengths)), length_B)
    logp_N, advantage_B = torch.full((n,), -1.0), torch.ones(len(lengths))
    valid_N, group_B, lag_N = torch.ones(n, dtype=torch.bool), torch.zeros_like(length_B), torch.zeros_like(row_N)
    inputs = Inputs(
        logp_N, logp_N, valid_N, row_N, length_B, advantage_B, proximal_N=logp_N, group_B=group_B, lag_N=lag_N
    )
    for name, figures in Shadows(presets())(inputs).items():
        assert figures["kept_token_fraction"] == figures["ess"] == (1.0 if n else 0.0), name
        assert figures["saturated_fraction"] == 0.0, name


def test_one_by_hand() -> None:
    """Weights 1/4, 1, 2, 4 with advantages 1, 1, -1, -1 in two responses of two tokens."""
    weight = torch.tensor([0.25, 1.0, 2.0, 4.0], dtype=torch.float64)
    logp_N = torch.full((4,), -2.0, dtype=torch.float64)
    inputs = Inputs(
        current_N=logp_N, rollout_N=logp_N - weight.log(), valid_N=torch.ones(4, dtype=torch.bool),
        row_N=torch.tensor([0, 0, 1, 1]), length_B=torch.tensor([2, 2]), proximal_N=logp_N,
        advantage_B=torch.tensor([1.0, -1.0], dtype=torch.float64),
    )  # fmt: skip
    figures = Shadows({"it": presets()["verl/decoupled_token_is"]})(inputs)
    truncated = [0.25, 1.0, 2.0, 2.0]
    assert figures["it"] == pytest.approx({
        "kept_token_fraction": 1.0, "kept_seq_fraction": 1.0, "saturated_fraction": 0.25, "weight_mean": 5.25 / 4,
        "ess": 5.25**2 / (4 * sum(w * w for w in truncated)), "pg_loss": (-0.25 - 1 + 2 + 2) / 4,
    })  # fmt: skip
