"""Second part of the ladder: does the way an answer is computed change its log-probs?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.batch import Sample
from trimtab.errors import TrimtabError
from trimtab.lab.parity.contexts import contexts
from trimtab.lab.parity.explain import difference, explain
from trimtab.lab.parity.model import Cause, Rung, Section, Size, Verdict, measured, size_of
from trimtab.lab.parity.readings import slowly
from trimtab.lab.parity.state import Lab
from trimtab.spec import KvCacheDtype, RolloutSpec

PATH = Section.path


def climb(lab: Lab) -> None:
    """All rungs of this part."""
    batches(lab)
    scoring(lab)
    prefixes(lab)
    chunks(lab)
    running = lab.bench.engine.describe()
    switched(lab, "async scheduling", "async_scheduling", running, "vLLM switches it off on a CPU")
    cascade(lab, running)
    graph(lab, running)
    kv_dtype(lab, running)
    quantisation(lab, running)


def _rung(
    lab: Lab,
    name: str,
    compared: str,
    left: Tensor,
    right: Tensor,
    row_N: Tensor,
    mend: str,
    what: str,
    follows: bool = False,
) -> Rung:
    """Two answers of the engine to one question; in a coarse dtype they may differ by its rounding."""
    size = size_of(difference(left, right), row_N)
    bound = lab.engine_bound
    if not size.tokens:
        return lab.add(Rung(PATH, name, compared, Verdict.untestable, note="no token could be compared"))
    if size.within(bound):
        verdict = Verdict.equal if size.within(lab.fine) else Verdict.rounding
        return lab.add(measured(PATH, name, compared, verdict, size, bound))
    cause = Cause("path", f"{what} ({size.mean_abs:.3g} ± {size.error:.2g} nats)", mend, "engine")
    follows = follows or lab.noisy is not None
    return lab.add(measured(PATH, name, compared, Verdict.differs, size, bound, cause, follows))


def alike(left: Sequence[Sample], right: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Log-probs of both up to (and with) the last token that they share, their rows, and how many responses differ."""
    a, b, row, other = list[float](), list[float](), list[int](), 0
    for i, (one, two) in enumerate(zip(left, right, strict=False)):
        n = next(
            (k for k, (x, y) in enumerate(zip(one.ids, two.ids, strict=False)) if x != y),
            min(len(one.ids), len(two.ids)),
        )
        other += one.ids != two.ids
        a, b, row = [*a, *one.logps[:n]], [*b, *two.logps[:n]], [*row, *[i] * n]
    return torch.tensor(a).double(), torch.tensor(b).double(), torch.tensor(row, dtype=torch.int64), other


def batches(lab: Lab) -> None:
    """A prompt alone, and in the batch: its responses keep their seeds, so their tokens are the same."""
    group = lab.effort.group
    compared = "the first prompts' responses when sampled alone, and in a batch with short and long ones"
    name = "batch size"
    try:
        alone = lab.bench.engine.generate(lab.shorts[:2], lab.sampling())
        mixed = [*lab.shorts[:2], *lab.longs[:1], *lab.shorts[3:]]  # padding, where an engine pads
        whole = lab.bench.engine.generate(mixed, lab.sampling())[: 3 * group]
    except TrimtabError as error:
        lab.refused(PATH, name, compared, error)
        return
    left, right, row, other = alike(alone, whole[: 2 * group])
    rung = _rung(
        lab,
        name,
        compared,
        left,
        right,
        row,
        "mask padding and keep rows apart in the engine's batches",
        "log-probs depend on what else is in the batch",
    )
    if other and not lab.engine_bound.coarse and not rung.fault and other > 0.25 * len(alone):
        cause = Cause(
            "path",
            f"{other} of {len(alone)} responses differ when their prompt is sampled alone",
            "a seed for each request, by prompt and response; padding masked, and not counted in the positions",
            "engine",
        )
        rung = lab.rungs[-1] = replace(rung, verdict=Verdict.differs, cause=cause)
    if rung.fault and not rung.follows:
        _padded(lab, rung, whole)
    elif other:
        lab.rungs[-1] = replace(rung, note=f"{other} of {len(alone)} responses take another token somewhere")


def _padded(lab: Lab, rung: Rung, samples: Sequence[Sample]) -> None:
    """Name what the batch does to a row, if another prompt or other positions account for it."""
    truth = lab.sees(samples)
    tried = slowly(contexts(lab.reference, truth))
    found = explain(truth, truth.reported(), lab.expected(truth), tried, lab.engine_bound)
    if found is not None:
        lab.rungs[-1] = replace(rung, cause=found.cause("engine"))


def scoring(lab: Lab) -> None:
    """Given rows: alone, together and in reverse order; and against the reference."""
    samples = lab.samples[:: max(1, len(lab.samples) // 8)][:8]
    rows = [(*s.prompt.ids, *s.ids) for s in samples]
    compared = "rows scored together, and alone in reverse order"
    try:
        together = lab.bench.engine.score(rows)
        alone = [(lab.bench.engine.score([row]) or [[]])[0] for row in reversed(rows)][::-1] if together else []
    except TrimtabError as error:
        lab.refused(PATH, "batch order", compared, error)
        return
    if together is None:
        lab.add(Rung(PATH, "batch order", compared, Verdict.untestable, note="this engine cannot score given rows"))
        return
    flat = [torch.tensor([x for row in those for x in row], dtype=torch.float64) for those in (together, alone)]
    row_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in together]))
    if len(flat[0]) == len(flat[1]):
        _rung(
            lab,
            "batch order",
            compared,
            flat[0],
            flat[1],
            row_N,
            "mask padding in the engine's scoring",
            "scores depend on the other rows of a batch",
        )
    logits = [lab.reference.logits(row[:-1]).double().log_softmax(-1) for row in rows]
    exact = torch.cat([l.gather(1, torch.tensor(row[1:])[:, None])[:, 0] for l, row in zip(logits, rows, strict=True)])  # noqa: E741
    if lab.versions.dtype == torch.float32 and len(exact) == len(flat[0]):
        _rung(
            lab,
            "engine's scoring of given rows",
            "prompt log-probs of the engine, and the reference at T=1",
            flat[0],
            exact,
            row_N,
            "the engine's prompt log-probs: T=1, aligned, whole vocabulary",
            "the engine's scores of given rows are off",
            follows=lab.engine_off and lab.reading is not None and lab.reading.slow,
        )


def long_rows(lab: Lab) -> Size:
    """How far the long prompts' responses are from the reference (as the engine's figures are understood)."""
    assert lab.truth is not None
    rows = [i for i, sample in enumerate(lab.samples) if sample.prompt in lab.longs]
    at = lab.truth.tokens_of(rows)
    gap = difference(lab.truth.reported(), lab.expected(lab.truth))[at]
    return size_of(gap, lab.truth.row_N[at])


def prefixes(lab: Lab) -> None:
    """Long prompts that share their first two thirds: cold, and warm where prefixes are cached."""
    name, compared = "prefix caching", "responses to prompts with one beginning, and the same again"
    running = lab.bench.engine.describe()
    if not lab.longs:
        lab.add(
            Rung(PATH, name, compared, Verdict.untestable, note="rollout.max_model_len leaves no room for a prefix")
        )
        return
    cold = lab.bench.engine.generate(lab.longs, lab.sampling(group=2, seed=5))
    warm = lab.bench.engine.generate(lab.longs, lab.sampling(group=2, seed=5))
    left, right, row, _ = alike(cold, warm)
    rung = _rung(
        lab, name, compared, left, right, row, "rollout.prefix_caching=false", "a warm cache changes log-probs"
    )
    if not running.get("prefix_caching") and not rung.fault:
        lab.rungs[-1] = replace(
            rung, verdict=Verdict.off, note="rollout.prefix_caching=false; repeated prompts are equal"
        )


def chunks(lab: Lab) -> None:
    """So many long prompts that they do not fit into one step of the engine."""
    name, compared = "chunked prefill", "first tokens of prompts beyond one step's budget, and the reference"
    running = lab.bench.engine.describe()
    budget = running.get("max_num_batched_tokens")
    if not running.get("chunked_prefill") or not isinstance(budget, int):
        note = (
            "this engine prefills whole prompts"
            if "chunked_prefill" not in running
            else "rollout.chunked_prefill=false"
        )
        lab.add(Rung(PATH, name, compared, Verdict.off, note=note))
        return
    length = len(lab.longs[0].ids) if lab.longs else 0
    count = budget // max(length, 1) + 2
    if not length or count > 200:
        lab.add(
            Rung(
                PATH,
                name,
                compared,
                Verdict.untestable,
                note=f"a step holds {budget} tokens, more than the prompts here; raise rollout.max_model_len",
            )
        )
        return
    prompts = [lab.longs[i % len(lab.longs)] for i in range(count)]
    samples = lab.bench.engine.generate(prompts, replace(lab.sampling(group=1, seed=6), max_tokens=1))
    truth = lab.sees(samples)
    _rung(
        lab,
        name,
        compared,
        truth.reported(),
        lab.expected(truth),
        truth.row_N,
        "rollout.chunked_prefill=false",
        "prompts that are prefilled in parts give other log-probs",
    )


def switched(lab: Lab, name: str, key: str, running: dict[str, Any], why: str) -> None:
    """An option that is on or off; on, the first part of the ladder has measured with it."""
    compared = f"responses with {name}, and the reference"
    on_cpu = running.get("device") == "cpu"
    if key not in running:
        lab.add(Rung(PATH, name, compared, Verdict.untestable, note=f"the {running.get('engine')} engine has none"))
    elif not running[key]:
        note = f"rollout.{key}=false" + (f"; {why}" if on_cpu else "")
        lab.add(Rung(PATH, name, compared, Verdict.off, note=note))
    else:
        in_force(lab, name, compared, {key: False})


def cascade(lab: Lab, running: dict[str, Any]) -> None:
    vllm = running.get("engine") == "vllm"
    why = (
        "vLLM has no cascade attention on a CPU"
        if vllm and running.get("device") == "cpu"
        else ("it is vLLM's own choice by batch; not switched from here" if vllm else "this engine has none")
    )
    lab.add(
        Rung(
            PATH, "cascade attention", "shared prefixes attended once, and each by itself", Verdict.untestable, note=why
        )
    )


def graph(lab: Lab, running: dict[str, Any]) -> None:
    name, compared = "graph or eager", "the engine with graphs or compilation, and without"
    if "enforce_eager" not in running:
        lab.add(Rung(PATH, name, compared, Verdict.untestable, note="this engine is always eager"))
    elif running["enforce_eager"]:
        lab.add(Rung(PATH, name, compared, Verdict.off, note="rollout.enforce_eager=true"))
    else:
        in_force(lab, name, compared, {"enforce_eager": True})


def kv_dtype(lab: Lab, running: dict[str, Any]) -> None:
    name, compared = "KV-cache dtype", "the engine with this KV cache, and with one in the weights' dtype"
    kind = str(running.get("kv_cache_dtype", "auto"))
    if kind.startswith("fp8") and not lab.engine_off and lab.bench.spec.rollout.kv_cache_dtype is not KvCacheDtype.auto:
        _asked_for(lab, name, compared)
        return
    if kind.startswith("fp8"):
        in_force(lab, name, compared, {"kv_cache_dtype": KvCacheDtype.auto})
        return
    lab.add(Rung(PATH, name, compared, Verdict.off, note=f"keys and values in the weights' dtype ({kind})"))


def quantisation(lab: Lab, running: dict[str, Any]) -> None:
    lab.add(
        Rung(
            PATH,
            "quantisation",
            "quantised weights, and those handed over",
            Verdict.off,
            note="no option of the engine quantises; rounding at the hand-over shows in the rungs on weights",
        )
    )


def _without(lab: Lab, plain: dict[str, Any]) -> Size:
    """How far another engine, with ``plain`` options and without an injected gap, is from the reference."""
    kept, told = lab.bench.spec, lab.bench.spec.mismatch
    options: RolloutSpec = replace(kept.rollout, **plain)
    lab.bench.restart(options, replace(told, kind=type(told.kind).none))
    try:
        samples = lab.bench.engine.generate([*lab.shorts[:8], *lab.longs], lab.sampling(group=2, seed=7))
    finally:
        lab.bench.restart(kept.rollout, kept.mismatch)
    lab.bench.version = 0
    truth = lab.sees(samples)
    return size_of(difference(truth.reported(), truth.logp_N), truth.row_N)


def _asked_for(lab: Lab, name: str, compared: str) -> None:
    """8-bit keys and values that were asked for: their cost is rounding, if it is gone without them."""
    with_it, size = lab.engine_size, _without(lab, {"kv_cache_dtype": KvCacheDtype.auto})
    note = f"8 bits, as asked for; without them the gap is {size.mean_abs:.2g} nats (rollout.kv_cache_dtype=auto)"
    if size.within(lab.bound_of(lab.bench.spec.rollout.dtype)):
        lab.add(measured(PATH, name, compared, Verdict.rounding, with_it, lab.engine_bound, note=note))
        return
    text = f"the gap of {with_it.mean_abs:.2g} nats is not that of 8-bit keys and values: {size.mean_abs:.2g} stay"
    cause = Cause("unexplained", text, "the engine's computation of log-probs; nothing tried explains it", "engine")
    lab.add(measured(PATH, name, compared, Verdict.differs, with_it, lab.engine_bound, cause))


def in_force(lab: Lab, name: str, compared: str, plain: dict[str, Any]) -> None:
    """An option in force: equal if the engine agrees with the reference; if not, another engine without it decides."""
    key = next(iter(plain))
    if not lab.engine_off or lab.reading is not None:
        size = long_rows(lab) if lab.longs else lab.engine_size
        verdict = Verdict.rounding if lab.engine_bound.coarse else Verdict.equal
        note = f"rollout.{key} is in force, and the engine agrees with the reference"
        lab.add(measured(PATH, name, compared, verdict, size, lab.engine_bound, note=note))
        return
    with_it, size = lab.engine_size, _without(lab, plain)
    if size.within(lab.engine_bound):
        value = next(iter(plain.values()))
        shown = str(value).lower() if isinstance(value, bool) else value.value
        cause = Cause(
            key,
            f"without it the gap is {size.mean_abs:.2g} nats instead of {with_it.mean_abs:.2g}",
            f"rollout.{key}={shown}",
            "engine",
        )
        change = replace(with_it, mean_abs=with_it.mean_abs - size.mean_abs)
        lab.add(measured(PATH, name, compared, Verdict.differs, change, lab.engine_bound, cause))
        lab.blame(cause)
        return
    change = replace(with_it, mean_abs=abs(with_it.mean_abs - size.mean_abs))
    lab.add(measured(PATH, name, compared, Verdict.equal, change, note="the gap is the same without it"))
