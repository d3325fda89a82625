"""Each planted fault is found and named; a healthy set-up is quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lab.parity.planted import SEMANTIC, WEIGHTS, handed

from trimtab.lab.bench import Bench, compose_to_measure, opened, silent
from trimtab.lab.parity import kinds, numerics, path, semantics, trainers, weights
from trimtab.lab.parity.ladder import set_up
from trimtab.lab.parity.model import Rung, Verdict, changes, healthy
from trimtab.lab.parity.state import Effort, Lab
from trimtab.rollout.transformers import TransformersEngine

SMALL = ("rollout=transformers", "policy.warmup_accuracy=0", "rollout.max_tokens=6")
EFFORT = Effort(prompts=16, group=4, tokens=6, longs=2, versions=2)


FAST = (
    "raw log-probs", "top-p", "shift of some responses", "end token dropped", "trainer shifted",
    "only the first hand-over", "a tensor left behind", "a stale head",
)  # fmt: skip


LATER: dict[str, tuple[Callable[[Lab], object], ...]] = {
    "raw log-probs, run at T=1": (semantics.other_temperatures,),
    "trainer shifted": (trainers.climb,),
    "trainer in bfloat16": (trainers.climb,),
    "dropout in the trainer": (trainers.climb,),
}
"""Parts of the ladder that find a fault which the engine's own log-probs don't show."""


def some(faults: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """Every fault, those that are not among the fast ones marked slow."""
    return [fault if fault in fast else pytest.param(fault, marks=pytest.mark.slow) for fault in faults]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The tiny model of random weights, sharpened so that its distributions are worth measuring."""
    cache = tmp_path_factory.mktemp("cache")
    with opened(compose_to_measure([*SMALL, f"policy.cache_dir={cache}"])) as bench:
        yield bench


@torch.no_grad()
def lab_of(base: Bench, *overrides: str, prompts: int = EFFORT.prompts) -> Lab:
    """A fresh lab on the same folder."""
    spec = compose_to_measure([*SMALL, *overrides])
    spec = replace(spec, policy=replace(spec.policy, cache_dir=base.spec.policy.cache_dir))
    bench = replace(base, spec=spec, version=0)
    bench.policy = bench.another_policy()
    bench.engine = TransformersEngine(bench.folder, spec.rollout, spec.mismatch)
    return set_up(bench, replace(EFFORT, prompts=prompts), "task", silent)


def named(rungs: list[Rung]) -> list[str]:
    return [rung.cause.name for rung in changes(rungs) if rung.cause is not None]


@pytest.mark.parametrize("fault", some(SEMANTIC, FAST))
@torch.no_grad()
def test_a_fault_of_meaning_is_found_and_named(base: Bench, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, overrides, name = SEMANTIC[fault]
    lab = lab_of(base, *overrides, prompts=24 if "seed" in fault else EFFORT.prompts)
    plant(monkeypatch)
    for part in (semantics.sampled, semantics.reported, *LATER.get(fault, ())):
        part(lab)
    assert named(lab.rungs)[:1] == [name], [(r.name, r.cause) for r in lab.rungs if r.fault]


@pytest.mark.parametrize("fault", some(WEIGHTS, FAST))
@torch.no_grad()
def test_a_fault_of_the_hand_over_is_found_and_named(base: Bench, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name, text = WEIGHTS[fault]
    lab = lab_of(base)
    plant(monkeypatch)
    lab.samples = lab.bench.engine.generate(lab.shorts, lab.sampling())
    lab.truth = lab.sees(lab.samples)
    lab.effort = replace(lab.effort, versions=2 if fault == "only the first hand-over" else 1)
    lab.bench.score(lab.samples)  # as the rungs before do: a copy that a fault keeps is one of the first weights
    lab.measure_noise(lab.truth)
    weights.climb(lab)
    found = changes(lab.rungs)
    assert [rung.cause.name for rung in found if rung.cause] == [name]
    assert found[0].cause is not None and text in found[0].cause.text


@pytest.mark.parametrize("left", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@torch.no_grad()
def test_one_tensor_left_behind_is_found_between_coarse_sides(
    base: Bench, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-over that moves everything by a little hides it within the rounding of bfloat16."""
    lab = lab_of(base, "rollout.dtype=bfloat16", "policy.dtype=bfloat16")
    handed(lambda name, tensor: None if name == left else tensor)(monkeypatch)
    lab.samples = lab.bench.engine.generate(lab.shorts, lab.sampling())
    lab.measure_noise(lab.sees(lab.samples))
    kinds.one_kind_at_a_time(lab)
    (rung,) = changes(lab.rungs)
    assert rung.cause is not None and rung.cause.name == "stale_group" and rung.cause.text.startswith(left)


@pytest.mark.parametrize("overrides", [(), ("rollout.dtype=bfloat16", "policy.dtype=bfloat16", "seed=3")])
@torch.no_grad()
def test_a_healthy_set_up_is_quiet(base: Bench, overrides: tuple[str, ...]) -> None:
    lab = lab_of(base, *overrides, prompts=10)
    lab.effort = replace(lab.effort, versions=1)
    for part in (semantics.climb, path.climb, weights.climb, numerics.climb):
        part(lab)
    assert healthy(lab.rungs), [(r.name, r.cause) for r in lab.rungs if r.fault]
    assert any(rung.verdict is Verdict.rounding for rung in lab.rungs) == bool(overrides)
    names = [rung.name for rung in lab.rungs]
    assert len(names) == len(set(names)) and len(names) > 40
