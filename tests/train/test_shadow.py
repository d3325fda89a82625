"""Shadow methods in a live run: they change nothing, and their gradients are those of a dense computation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import END, ToyPolicy, ToyRollout, ToyTask, toy_batch, toy_spec

from trimtab.batch import Batch, Sample
from trimtab.config import compose, methods, recipes
from trimtab.method import evaluate, policy_term, recomputes
from trimtab.spec import MethodSpec, RunSpec
from trimtab.track import JsonlTracker, read_metrics, truncate_after
from trimtab.train import checkpoint
from trimtab.train.loop import Loop, Parts
from trimtab.train.shadow import ShadowMethods, inputs_of

WAYS = [
    ["algo=decoupled"],
    ["algo=bypass", "optim.microbatch_tokens=20"],
    ["algo=on_policy", "optim.epochs=2"],
    ["algo=reinforce", "optim.minibatches=3", "optim.epochs=2", "optim.microbatch_tokens=30"],
    ["algo=standard", "optim.minibatches=2", "loss.kl_coef=0.01", "loss.entropy_coef=0.01"],
    ["preset=verl/decoupled_k3_rs_token_tis", "optim.microbatch_tokens=25", "advantage.equal_groups=drop"],
]


class Missing(ToyRollout):
    """Some tokens lack a log-prob."""

    def generate(self, *arguments: Any) -> list[Sample]:
        found = super().generate(*arguments)
        return [replace(s, logps=(math.nan, *s.logps[1:])) if i % 5 == 0 else s for i, s in enumerate(found)]


def run(folder: Path, spec: RunSpec, resume: bool = False, policy: ToyPolicy | None = None) -> dict[str, Tensor]:
    """The weights that a toy run ends with."""
    policy = policy or ToyPolicy()
    parts = Parts(
        policy=policy, rollout=Missing(0.3), task=ToyTask(), tracker=JsonlTracker(), stop_ids=(END,),
        probe=lambda policy, rollout, samples: {}, record=lambda *a: None, shadows=methods(spec.shadow, spec),
    )  # fmt: skip
    loop = Loop(parts, spec, folder, "hash")
    if resume:
        snapshot = checkpoint.load_last(folder / "checkpoints")
        assert snapshot is not None
        loop.restore(snapshot)
        truncate_after(folder / "metrics.jsonl", loop.state.step)
    parts.tracker.start({}, "id", "name", folder)
    loop()
    parts.tracker.finish("completed", {})
    return {"table": policy.table.detach().clone()}


def lines(folder: Path, *left_out: str) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", *left_out))} for row in rows]


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    a, b = (checkpoint.load_last(path / "checkpoints") for path in (one, other))
    assert a is not None and b is not None and a.meta == b.meta and a.step == b.step
    assert a.model.keys() == b.model.keys() and all(torch.equal(a.model[key], b.model[key]) for key in a.model)
    assert repr(a.optimizer) == repr(b.optimizer) and repr(a.randomness) == repr(b.randomness)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_a_run_with_shadows_is_equal_to_one_without_to_the_bit(tmp_path: Path, way: list[str]) -> None:
    asked = recipes() if way == WAYS[0] else recipes()[WAYS.index(way) :: len(WAYS)]  # between them all
    more = [f"shadow=[{','.join(asked)}]", "shadow_gradient_every=2"]
    plain = run(tmp_path / "plain", toy_spec(*way, steps=4))
    shadowed = run(tmp_path / "shadowed", toy_spec(*way, *more, steps=4))
    assert torch.equal(plain["table"], shadowed["table"])
    assert lines(tmp_path / "shadowed", "shadow/") == lines(tmp_path / "plain")
    assert_equal_checkpoints(tmp_path / "plain", tmp_path / "shadowed")
    rows = lines(tmp_path / "shadowed")[1:]
    names = {key.split("/", 1)[1].rpartition("/")[0] for row in rows for key in row if key.startswith("shadow/")}
    assert names == set(asked)
    with_gradients = [any(key.endswith("/grad_cosine") for key in row) for row in rows]
    assert with_gradients == [False, True] * 2


def test_resumed_with_shadows_equals_never_stopped(tmp_path: Path) -> None:
    shadows = ["shadow=[trl/token_mask,areal/m2po]", "shadow_gradient_every=1", "optim.schedule=constant"]
    whole = run(tmp_path / "whole", toy_spec(*shadows, steps=6))
    run(tmp_path / "cut", toy_spec(*shadows, steps=3))
    resumed = run(tmp_path / "cut", toy_spec(*shadows, steps=6), resume=True, policy=ToyPolicy(5))
    assert torch.equal(resumed["table"], whole["table"])
    cut, never = lines(tmp_path / "cut")[-3:], lines(tmp_path / "whole")[-3:]
    assert [{k: v for k, v in row.items() if k != "train/lr"} for row in cut] == [
        {k: v for k, v in row.items() if k != "train/lr"} for row in never
    ]


# -- gradients -------------------------------------------------------------------------------------------------------


def advantages(batch: Batch) -> Tensor:
    return torch.linspace(-1.0, 1.5, batch.rows)


def gradients(spec: RunSpec, batch: Batch, policy: ToyPolicy | None = None) -> dict[str, float]:
    policy = policy or ToyPolicy()
    dropped_B, lag_N = torch.zeros(batch.rows, dtype=torch.bool), torch.ones_like(batch.version_N)
    asked = ShadowMethods(methods(spec.shadow, spec), policy, spec)
    return asked.gradients(batch, advantages(batch), dropped_B, lag_N)


def dense(method: MethodSpec, batch: Batch) -> Tensor:
    """d policy term / d table, by autograd through a table of log-probs and ``evaluate`` at once."""
    table = ToyPolicy().initial.clone().requires_grad_()
    ends = batch.length_B.cumsum(0).tolist()
    current = []
    for ids, n, _ in zip(batch.ids_B, batch.length_B.tolist(), ends, strict=True):
        current += [table[ids[i - 1]].log_softmax(0)[ids[i]] for i in range(len(ids) - n, len(ids))]
    current_N = torch.stack(current).float()
    none_B, lag_N = torch.zeros(batch.rows, dtype=torch.bool), torch.ones_like(batch.version_N)
    inputs = inputs_of(batch, advantages(batch), none_B, lag_N, current_N.detach())
    proximal_N = inputs.proximal_N if recomputes(method) else None
    loss = evaluate(policy_term(method), replace(inputs, current_N=current_N, proximal_N=proximal_N)).loss.total
    return torch.autograd.grad(loss, table)[0]


@pytest.mark.parametrize("budget", [100_000, 20])
@pytest.mark.parametrize("own", ["algo=decoupled", "algo=bypass", "preset=pipelinerl/gspo"])
def test_gradients_equal_a_dense_computation(own: str, budget: int) -> None:
    spec = toy_spec(own, "shadow=all", "shadow_gradient_every=1", f"optim.microbatch_tokens={budget}")
    batch = toy_batch(ToyPolicy())
    missing_N = batch.rollout_logp_N.clone()
    missing_N[[2, 11]] = torch.nan
    batch = replace(batch, rollout_logp_N=missing_N)
    found, applied = gradients(spec, batch), dense(MethodSpec(spec.algo, spec.mis, spec.loss), batch)
    for name, method in methods(spec.shadow, spec).items():
        gradient = dense(method, batch)
        ratio = float(gradient.norm() / applied.norm())
        if ratio > 0:
            cosine = float((gradient * applied).sum() / (gradient.norm() * applied.norm()))
            assert found[f"shadow/{name}/grad_cosine"] == pytest.approx(cosine, abs=2e-6), name
        assert found[f"shadow/{name}/grad_norm_ratio"] == pytest.approx(ratio, rel=2e-6), name
    assert sum(key.endswith("grad_cosine") for key in found) > 60  # some reject the whole batch


@pytest.mark.parametrize("budget", [100_000, 20])
@pytest.mark.parametrize(
    "name", ["verl/bypass_pg_is", "trl/sequence_mask", "areal/m2po", "miles/metrics_only", "miles/default"]
)
def test_the_applied_method_is_its_own_shadow(name: str, budget: int) -> None:
    spec = toy_spec(f"preset={name}", f"shadow=[{name}]", f"optim.microbatch_tokens={budget}")
    found = gradients(spec, toy_batch(ToyPolicy()))
    assert found == pytest.approx({f"shadow/{name}/grad_cosine": 1.0, f"shadow/{name}/grad_norm_ratio": 1.0}, abs=1e-12)


def test_gradients_leave_the_policy_as_it_is() -> None:
    policy = ToyPolicy()
    policy.table.grad = torch.ones_like(policy.table)
    gradients(toy_spec("shadow=all", "shadow_gradient_every=1"), toy_batch(policy), policy)
    assert torch.equal(policy.table.grad, torch.ones_like(policy.table)) and torch.equal(policy.table, policy.initial)
    assert policy.forwards == 1  # of one micro-batch, for all methods


def test_what_a_vanishing_gradient_leaves_undefined_is_left_out() -> None:
    spec = toy_spec("rs=token", "mis.rs_upper_bound=1.5", "shadow=[miles/standard,trl/sequence_mask]")
    batch = toy_batch(ToyPolicy())
    far = replace(batch, rollout_logp_N=batch.rollout_logp_N - 5.0)
    assert gradients(spec, far) == {}  # the run itself rejects everything
    plain = toy_spec("algo=standard", "shadow=[miles/standard,trl/sequence_mask]")
    found = gradients(plain, far)
    assert found["shadow/trl/sequence_mask/grad_norm_ratio"] == 0.0
    assert "shadow/trl/sequence_mask/grad_cosine" not in found and "shadow/miles/standard/grad_cosine" in found


def test_a_batch_without_a_valid_token_has_no_figures() -> None:
    batch = toy_batch(ToyPolicy())
    nothing = replace(batch, mask_N=torch.zeros_like(batch.mask_N))
    spec = toy_spec("shadow=all", "shadow_gradient_every=1")
    assert gradients(spec, nothing) == {}
    none_B, lag_N = torch.zeros(batch.rows, dtype=torch.bool), torch.zeros_like(batch.version_N)
    inputs = inputs_of(nothing, advantages(batch), none_B, lag_N, batch.rollout_logp_N)
    assert ShadowMethods(methods(spec.shadow, spec), ToyPolicy(), spec).figures(inputs) == {}


# -- the real policy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["optim.microbatch_tokens=64", "optim.minibatches=2", "policy.logit_chunk=7"]])
def test_the_smoke_run_is_equal_to_the_bit(tmp_path: Path, more: list[str]) -> None:
    from trimtab import experiment

    gap = ["mismatch=logit_noise", "mismatch.strength=0.2", f"policy.cache_dir={tmp_path / 'cache'}"]
    common = ["debug=smoke", "rollout.max_tokens=5", "task.eval_size=4", "task.difficulty=one_digit", *gap, *more]
    shadow = ["shadow=[verl/bypass_pg_is,trl/token_mask,pipelinerl/gspo]", "shadow_gradient_every=1"]
    for name, extra in (("plain", []), ("shadowed", shadow)):
        experiment.run(compose([*common, *extra, f"run_dir={tmp_path / name}"]))
    assert lines(tmp_path / "shadowed", "shadow/") == lines(tmp_path / "plain")
    assert_equal_checkpoints(tmp_path / "plain", tmp_path / "shadowed")
    last = lines(tmp_path / "shadowed")[-1]
    figures = ("kept_token_fraction", "kept_seq_fraction", "ess", "saturated_fraction", "weight_mean", "pg_loss")
    assert all(math.isfinite(last[f"shadow/trl/token_mask/{key}"]) for key in figures)
