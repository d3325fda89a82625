"""The ladder as a whole: from a bench to its rungs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trimtab.errors import ConfigError
from trimtab.lab import prompts as sources
from trimtab.lab.bench import Bench, Report
from trimtab.lab.parity import numerics, path, semantics, weights
from trimtab.lab.parity.model import Rung
from trimtab.lab.parity.reference import Reference, Versions, load
from trimtab.lab.parity.state import TORCH, Effort, Lab, long_prompts
from trimtab.spec import Mismatch, PolicyKind, RunSpec

LARGE = 5000
"""Vocabulary from which on less is sampled: whole logits of every token are kept."""
LONG = 112


def effort_of(bench: Bench, prompts: int | None, group: int | None, tokens: int | None) -> Effort:
    """How much is sampled, from what was asked and how large the model is."""
    large = bench.policy.tokenizer.vocabulary > LARGE
    most = bench.spec.rollout.max_tokens
    return Effort(
        prompts=prompts or (12 if large else 32),
        group=group or (4 if large else 8),
        tokens=min(tokens or (12 if large else 16), most),
        versions=2 if large else 3,
    )


def set_up(bench: Bench, effort: Effort, source: str, report: Report) -> Lab:
    """A lab without rungs: the reference, the prompts."""
    torch.manual_seed(bench.spec.seed)
    problems = sources.problems(source, bench.spec, bench.policy)[: effort.prompts]
    if not problems:
        raise ConfigError(f"--prompts={source} gives no prompt; give another file, builtin or task")
    shorts = bench.encode(problems)
    room = bench.spec.rollout.max_model_len - effort.tokens - 1
    reference = Reference(load(bench.folder))
    return Lab(
        bench=bench,
        reference=reference,
        versions=Versions(reference.weights(), TORCH[bench.spec.policy.dtype], bench.spec.seed),
        effort=effort,
        shorts=shorts,
        longs=long_prompts(shorts, effort.longs, min(LONG, room)),
        report=report,
    )


@torch.no_grad()
def climb(bench: Bench, effort: Effort, source: str, report: Report) -> list[Rung]:
    """Every rung, in order; the policy's weights are other ones afterwards."""
    lab = set_up(bench, effort, source, report)
    parts: list[tuple[str, Callable[[Lab], None]]] = [
        ("semantics", semantics.climb),
        ("inference path", path.climb),
        ("weights", weights.climb),
        ("numerics", numerics.climb),
    ]
    for done, (name, part) in enumerate(parts):
        report(done, len(parts), name)
        if name == "semantics" or lab.truth is not None:
            part(lab)
    report(len(parts), len(parts), "")
    return lab.rungs


def about(spec: RunSpec, effort: Effort, source: str) -> list[str]:
    """What is compared, in two lines."""
    rollout, policy = spec.rollout, spec.policy
    injected = "" if spec.mismatch.kind is Mismatch.none else f"; injected: {spec.mismatch.kind.value}"
    model = policy.path if policy.kind is PolicyKind.hf else policy.kind.value
    return [
        f"engine {rollout.engine.value} in {rollout.dtype.value}, trainer in {policy.dtype.value}, model {model}, "
        f"T={rollout.temperature:g}, seed {spec.seed}{injected}",
        f"{effort.prompts} prompts ({source}), {effort.group} responses each of up to {effort.tokens} tokens",
    ]
