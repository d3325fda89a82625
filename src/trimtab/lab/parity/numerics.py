"""Last part of the ladder: what the number formats cost, on each side and between them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trimtab.lab.bench import flat
from trimtab.lab.parity.explain import difference
from trimtab.lab.parity.model import Bound, Cause, Rung, Section, Size, Verdict, size_of
from trimtab.lab.parity.state import TORCH, Lab
from trimtab.policy.model import CausalPolicy
from trimtab.spec import Dtype

NUMERICS = Section.numerics


def climb(lab: Lab) -> None:
    """All rungs of this part."""
    side(
        lab,
        "dtype of the engine",
        "engine",
        lab.engine_size,
        lab.engine_bound,
        lab.bench.spec.rollout.dtype,
        lab.engine_off,
    )
    side(
        lab,
        "dtype of the trainer",
        "trainer",
        lab.trainer_size,
        lab.trainer_bound,
        lab.bench.spec.policy.dtype,
        lab.trainer_off,
    )
    between(lab)
    attention(lab)
    trainer_head(lab)
    engine_head(lab)
    log_softmax(lab)


def side(lab: Lab, name: str, who: str, size: Size, bound: Bound, dtype: Dtype, off: bool) -> None:
    """How far a side is from float32."""
    compared = f"the {who} in {dtype.value}, and the reference in float32"
    verdict = Verdict.differs if off else Verdict.rounding if bound.coarse else Verdict.equal
    key = "policy.dtype" if who == "trainer" else "rollout.dtype"
    note = f"root mean square {size.rms:.2g} nats" + (
        f"; {key}=float32 takes it away" if bound.coarse and not off else ""
    )
    lab.add(
        Rung(
            NUMERICS,
            name,
            compared,
            verdict,
            value=size.mean_abs,
            error=size.error,
            bound=bound.mean,
            count=size.tokens,
            follows=off,
            note="follows from the above" if off else note,
        )
    )


def between(lab: Lab) -> None:
    """Trainer against engine, without the reference: what a correction would have to mend."""
    truth, told, scores = lab.truth, None, lab.trainer_scores
    if truth is None or scores is None:
        return
    told = truth.reported()
    size = size_of(difference(scores, told), truth.row_N)
    coarse = lab.engine_bound.coarse or lab.trainer_bound.coarse
    bound = lab.engine_bound.mean + lab.trainer_bound.mean
    off = not size.mean_abs <= bound
    dp = (scores.exp() - told.exp()).abs()
    note = (
        f"std of the log-ratio {size.rms:.2g}; |Δp| >= 0.01 on {float((dp >= 0.01).double().mean()):.1%} of the tokens"
    )
    lab.add(
        Rung(
            NUMERICS,
            "trainer against engine",
            "both sides' log-probs of the same tokens",
            Verdict.differs if off else Verdict.rounding if coarse else Verdict.equal,
            value=size.mean_abs,
            error=size.error,
            bound=bound,
            count=size.tokens,
            follows=off,
            note=note,
        )
    )


def attention(lab: Lab) -> None:
    """Two implementations of attention, all else equal."""
    dtype = lab.bench.spec.policy.dtype
    if dtype is Dtype.float32:
        size, bound, verdict = lab.attention_size, lab.fine, Verdict.equal
        note = "within float32 this is what noise is measured by"
    else:
        size, bound = lab.own_noise(TORCH[dtype], "sdpa"), lab.trainer_bound
        verdict, note = Verdict.rounding, f"sdpa in {dtype.value} against eager in float32"
    lab.add(
        Rung(
            NUMERICS,
            "attention implementation",
            "transformers with sdpa, and with eager attention",
            verdict if size.within(bound) else Verdict.rounding,
            value=size.mean_abs,
            error=size.error,
            bound=bound.mean,
            count=size.tokens,
            note=note,
        )
    )


def trainer_head(lab: Lab) -> None:
    """The trainer's logits in float32 or not, all else equal."""
    name, compared = "fp32 head of the trainer", "the trainer's scores with the other setting of policy.fp32_head"
    spec, policy = lab.bench.spec.policy, lab.bench.policy
    if spec.dtype is Dtype.float32:
        lab.add(Rung(NUMERICS, name, compared, Verdict.off, note="policy.dtype=float32 has it"))
        return
    few = lab.samples[:: max(1, len(lab.samples) // 12)][:12]
    other = CausalPolicy(policy.model, policy.tokenizer, replace(spec, fp32_head=not spec.fp32_head))
    truth = lab.sees(few)
    heat = lab.heat or 1.0
    now, then = (
        size_of(difference(p.score(flat(few), heat).logp_N.double(), truth.logp_N), truth.row_N)
        for p in (policy, other)
    )
    change = then.mean_abs - now.mean_abs
    other_way = str(not spec.fp32_head).lower()
    better = f"policy.fp32_head={other_way} would leave {then.mean_abs:.2g} instead of {now.mean_abs:.2g}"
    lab.add(
        Rung(
            NUMERICS,
            name,
            compared,
            Verdict.rounding,
            value=abs(change),
            error=then.error,
            count=now.tokens,
            note=better,
        )
    )


def engine_head(lab: Lab) -> None:
    """Whether the engine's head is in float32, as it says itself."""
    name, compared = "fp32 head of the engine", "rollout.fp32_head, and what the engine says it runs"
    spec, running = lab.bench.spec.rollout, lab.bench.engine.describe()
    if spec.dtype is Dtype.float32:
        lab.add(Rung(NUMERICS, name, compared, Verdict.off, note="rollout.dtype=float32 has it"))
    elif "fp32_head" not in running:
        lab.add(Rung(NUMERICS, name, compared, Verdict.untestable, note="this engine does not say"))
    elif bool(running["fp32_head"]) != spec.fp32_head:
        cause = Cause(
            "fp32_head",
            f"rollout.fp32_head={spec.fp32_head} was asked for, the engine runs {running['fp32_head']}",
            "rollout.fp32_head",
            "engine",
        )
        lab.add(Rung(NUMERICS, name, compared, Verdict.differs, cause=cause))
    else:
        note = "in force" if spec.fp32_head else "rollout.fp32_head=true takes the head's part of the rounding away"
        lab.add(Rung(NUMERICS, name, compared, Verdict.off if not spec.fp32_head else Verdict.rounding, note=note))


def log_softmax(lab: Lab) -> None:
    """Figures that all are numbers of a short format come from a log-softmax, or a wire, in that format."""
    name, compared = "log-softmax dtype", "reported log-probs, and the nearest numbers in 16 bits"
    found: Cause | None = None
    seen = 0
    for who, told in (("engine", lab.truth.reported() if lab.truth else None), ("trainer", lab.trainer_scores)):
        if told is None:
            continue
        told = told[told.isfinite() & (told.abs() > 1e-3)]
        seen += len(told)
        for dtype, text in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
            if len(told) >= 8 and _share(told, dtype) > 0.9:
                found = found or Cause(
                    "log_softmax_dtype",
                    f"every log-prob of the {who} is a number of {text}: the "
                    "log-softmax is computed, or its result stored, in that format",
                    "compute and keep log-probs in float32",
                    who,
                )
    told_already = any(
        r.fault and r.cause and r.cause.name in ("log_softmax_dtype", "rounded_values") for r in lab.rungs
    )
    lab.add(
        Rung(
            NUMERICS,
            name,
            compared,
            Verdict.differs if found else Verdict.equal,
            unit="log-probs",
            count=seen,
            cause=found,
            follows=bool(found) and told_already,
        )
    )


def _share(told: Tensor, dtype: torch.dtype) -> float:
    return float((told.float().to(dtype).float() == told.float()).double().mean())
