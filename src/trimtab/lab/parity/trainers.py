"""Semantics on the trainer's side: what it makes of the sampled tokens, and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.batch import Sample
from trimtab.errors import DataError, TrimtabError
from trimtab.lab.bench import flat
from trimtab.lab.parity.explain import difference
from trimtab.lab.parity.model import Cause, Rung, Section, Verdict, clustered_error, measured, size_of
from trimtab.lab.parity.reference import Truth, load
from trimtab.lab.parity.state import TORCH, Lab

SEMANTICS = Section.semantics


def climb(lab: Lab) -> None:
    """The batch, then the trainer's scores."""
    laid_flat(lab)
    trainer(lab)


def laid_flat(lab: Lab) -> None:
    """Samples as the batch holds them."""
    compared = "token ids and log-probs in the flat batch, and in the samples"
    samples = lab.samples
    wrong = None
    try:
        batch = flat(samples)
    except DataError as error:
        lab.refused(SEMANTICS, "samples laid flat", compared, error, "trainer")
        return
    ids = [tuple(row.tolist()) for row in batch.ids_B]
    if ids != [(*s.prompt.ids, *s.ids) for s in samples] or batch.token_N.tolist() != [
        t for s in samples for t in s.ids
    ]:
        wrong = "the batch holds other token ids than were sampled"
    told = torch.tensor([x for s in samples for x in s.logps])
    if wrong is None and size_of(difference(batch.rollout_logp_N.double(), told.double())).largest > 1e-6:
        wrong = "the batch holds other log-probs than the engine reported"
    if wrong is None and (not bool(batch.mask_N.all()) or batch.length_B.tolist() != [len(s.ids) for s in samples]):
        wrong = "the batch's mask or lengths leave out sampled tokens"
    cause = (
        Cause("batch", wrong, "batch.pack: rows in the samples' order, every token with its own log-prob", "trainer")
        if wrong
        else None
    )
    lab.add(
        Rung(
            SEMANTICS,
            "samples laid flat",
            compared,
            Verdict.differs if wrong else Verdict.equal,
            unit="responses",
            count=len(samples),
            cause=cause,
        )
    )


def trainer(lab: Lab) -> None:
    """The trainer's log-probs of the same tokens at the run's temperature and another, in other batches."""
    lab.reference.use(lab.versions.weights(0))
    truth = lab.truth if lab.versions.dtype == torch.float32 else lab.sees(lab.samples)
    assert truth is not None
    lab.trainer_truth = truth
    heat = lab.heat or 1.0
    try:
        scores = lab.bench.score(lab.samples, heat, entropy=True)
    except TrimtabError as error:
        lab.refused(SEMANTICS, "trainer's log-probs", "the trainer, and the reference", error, "trainer")
        return
    told = scores.logp_N.detach().double()
    off = not size_of(difference(told, truth.logp_N), truth.row_N).within(lab.trainer_bound)
    changing = _changing(lab, told, heat) if off else None
    rung, found = lab.judge(
        SEMANTICS,
        "trainer's log-probs",
        f"the trainer at T={heat:g}, and the reference",
        truth,
        told,
        truth.logp_N,
        "trainer",
        lab.trainer_bound,
        guesses=None if changing is None else (),
        other="the engine is judged by the same reference above",
    )
    if rung.fault and changing is not None:
        rung = lab.rungs[-1] = replace(rung, cause=changing)
    lab.trainer_off = rung.fault
    lab.trainer_scores, lab.trainer_size = told, size_of(difference(told, truth.logp_N), truth.row_N)
    lab.trainer_reading = found.guess if found is not None and not found.where else None
    if scores.entropy_N is not None:
        _entropy(lab, truth, scores.entropy_N.double(), search=not rung.fault)
    few = lab.samples[:: max(1, len(lab.samples) // 12)][:12]
    other_heat = 0.7 if heat == 1.0 else 1.0
    part = lab.sees(few, other_heat)
    lab.judge(
        SEMANTICS,
        f"trainer's log-probs at T={other_heat:g}",
        f"the trainer at T={other_heat:g}, and the reference",
        part,
        lab.bench.score(few, other_heat).logp_N.double(),
        part.logp_N,
        "trainer",
        lab.scaled(lab.trainer_bound, other_heat),
        search=not rung.fault,
    )
    _same_in_any_batch(lab, few, heat)
    gradient(lab, few[:3], heat)
    lab.reference.use(lab.versions.base)  # the engine has the folder's weights until the first hand-over


def _entropy(lab: Lab, truth: Truth, told_N: Tensor, search: bool) -> None:
    entropy = -torch.special.xlogy(truth.logp_NV.exp(), truth.logp_NV.exp()).sum(1)
    lab.judge(
        SEMANTICS,
        "trainer's entropy",
        "the trainer's entropy, and the reference's",
        truth,
        told_N,
        entropy,
        "trainer",
        lab.trainer_bound,
        guesses=(),
        search=search,
    )


def _changing(lab: Lab, told_N: Tensor, heat: float) -> Cause | None:
    """Whether the same tokens get other log-probs in a second pass."""
    again_N = lab.bench.score(lab.samples, heat, entropy=True).logp_N.detach().double()
    size = size_of(difference(again_N, told_N))
    if size.within(lab.fine):
        return None
    text = f"two passes of the trainer over the same tokens differ by {size.mean_abs:.3g} nats: dropout, or train mode"
    return Cause("dropout", text, "score in evaluation mode, every dropout probability at 0", "trainer")


def _same_in_any_batch(lab: Lab, few: list[Sample], heat: float) -> None:
    together = lab.bench.policy.score(flat(few), heat)
    graded = lab.bench.policy.score(flat(few), heat, grad=True).logp_N.detach()
    alone = torch.cat([lab.bench.policy.score(flat([sample]), heat).logp_N for sample in few])
    truth = lab.sees(few)
    bound = lab.trainer_bound
    for name, compared, told in (
        ("trainer: one response at a time", "responses alone, and padded in a batch", alone),
        ("trainer: with gradients", "scoring for the loss, and without gradients", graded),
    ):
        gap = difference(told.double(), together.logp_N.double())
        size = size_of(gap, truth.row_N)
        if size.within(bound):
            small = size.mean_abs <= lab.fine.mean
            lab.add(measured(SEMANTICS, name, compared, Verdict.equal if small else Verdict.rounding, size, bound))
            continue
        text = (
            f"the trainer's log-probs depend on what else is in the batch (by {size.mean_abs:.3g})"
            if "time" in name
            else f"scoring with gradients differs by {size.mean_abs:.3g} (dropout, or another forward pass)"
        )
        mend = "mask padding, positions from 0; score in evaluation mode, with the same options in both passes"
        cause = Cause("batch_dependence", text, mend, "trainer")
        follows = any(rung.cause is not None and rung.cause.name == "dropout" for rung in lab.rungs)
        lab.add(measured(SEMANTICS, name, compared, Verdict.differs, size, bound, cause, follows))


def gradient(lab: Lab, few: list[Sample], heat: float) -> None:
    """The gradient of the summed log-probs, against autograd through the reference."""
    policy, model = lab.bench.policy, lab.reference.model
    with torch.enable_grad():
        policy.score(flat(few), heat, grad=True).logp_N.sum().backward()
    ours = {name: p.grad.float().clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    theirs, allowed = _gradients(model, few, heat), 3e-3
    if lab.trainer_bound.coarse:  # confident responses have a small gradient, in which rounding weighs more
        rounded = _gradients(load(lab.bench.folder, TORCH[lab.bench.spec.policy.dtype]), few, heat)
        allowed = max(0.3, 2.5 * _apart(rounded, theirs)[0])
    whole, parts = _apart(ours, theirs)
    cause = None
    if not whole <= allowed:
        worst = max(parts, key=lambda part: part[0])
        text = f"the trainer's gradient is off by {whole:.2%} of its length, most in {worst[2]}"
        cause = Cause("gradient", text, "the backward pass of the trainer's scoring", "trainer")
    lab.add(
        Rung(
            SEMANTICS,
            "trainer's gradient",
            "gradient of the summed log-probs, and autograd through the reference",
            Verdict.differs if cause else Verdict.rounding if lab.trainer_bound.coarse else Verdict.equal,
            value=whole,
            bound=allowed,
            unit="share of its length",
            count=sum(len(s.ids) for s in few),
            cause=cause,
            follows=lab.trainer_off and cause is not None,
        )
    )


Gradients = dict[str, Tensor]


def _gradients(model: Any, few: list[Sample], heat: float) -> Gradients:
    """Autograd of the summed log-probs, row by row."""
    model.requires_grad_(True)
    with torch.enable_grad():
        for sample in few:
            ids = torch.tensor([(*sample.prompt.ids, *sample.ids)])
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(sample.prompt.ids) - 1 :]
            (logits.double() / heat).log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None]).sum().backward()
    made = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    return made


def _apart(ours: Gradients, theirs: Gradients) -> tuple[float, list[tuple[float, float, str]]]:
    """Length of the difference over that of ``theirs``; both lengths for each tensor."""
    parts = [
        (float((ours.get(name, torch.zeros_like(g)) - g).norm()), float(g.norm()), name) for name, g in theirs.items()
    ]
    return math.sqrt(sum(a**2 for a, _, _ in parts) / max(sum(b**2 for _, b, _ in parts), 1e-300)), parts


def mean_ratio(lab: Lab) -> None:
    """E[trainer / rollout] = 1 for tokens sampled from the whole support; it needs no reference."""
    if lab.heat == 0 or lab.truth is None:
        return
    told = lab.truth.reported()
    scores = lab.trainer_scores
    if scores is None:
        return
    kept = told.isfinite() & scores.isfinite()
    ratio = (scores[kept] - told[kept]).clamp(-20, 20).exp()
    size = size_of(ratio - 1, lab.truth.row_N[kept])
    error = clustered_error(ratio, lab.truth.row_N[kept])
    off = not abs(size.mean) <= 6 * error + 2 * max(lab.engine_bound.mean, lab.trainer_bound.mean)
    seen = any(rung.fault for rung in lab.rungs)
    cause = (
        Cause(
            "mean_ratio",
            f"trainer's probability over the engine's is {1 + size.mean:.4g} ± {error:.2g} on average, "
            "not 1: what is reported is not what was sampled from, on the whole vocabulary",
            "the semantics of log-probs on either side",
            "engine",
        )
        if off
        else None
    )
    lab.add(
        Rung(
            SEMANTICS,
            "mean probability ratio",
            "trainer's probability over the engine's, averaged, and 1",
            Verdict.differs if off else Verdict.equal,
            value=1 + size.mean,
            error=error,
            unit="ratio",
            count=len(ratio),
            cause=cause,
            follows=off and seen,
            note="follows from the above" if off and seen else "",
        )
    )
