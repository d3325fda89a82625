"""First part of the ladder: what the log-probs mean, on the engine's side and on the trainer's."""

from __future__ import annotations

from dataclasses import replace

from trimtab.errors import TrimtabError
from trimtab.lab.parity import sampler, trainers
from trimtab.lab.parity.chance import fitted_temperature
from trimtab.lab.parity.explain import difference
from trimtab.lab.parity.model import Cause, Rung, Section, Verdict, size_of
from trimtab.lab.parity.reference import Truth, fresh_tokenizer
from trimtab.lab.parity.state import Lab
from trimtab.spec import KvCacheDtype, LogprobsMode

SEMANTICS = Section.semantics


def climb(lab: Lab) -> None:
    """All rungs of this part; a failure of the engine to answer ends it."""
    settings(lab)
    tokenisation(lab)
    if not sampled(lab):
        return
    reported(lab)
    trainers.climb(lab)
    other_temperatures(lab)
    greedy(lab)
    trainers.mean_ratio(lab)


# -- settings, prompts ------------------------------------------------------------------------------------------------


def settings(lab: Lab) -> None:
    """What the engine says it runs against what was asked for."""
    spec, running = lab.bench.spec.rollout, lab.bench.engine.describe()
    wanted = {
        "dtype": spec.dtype.value,
        "logprobs_mode": f"{spec.logprobs_mode.value}_logprobs",
        "prefix_caching": spec.prefix_caching,
        "async_scheduling": spec.async_scheduling,
        "chunked_prefill": spec.chunked_prefill,
        "enforce_eager": spec.enforce_eager,
    }
    other = [
        f"{key}={running[key]} (asked for: {value})"
        for key, value in wanted.items()
        if key in running and str(running[key]) != str(value)
    ]
    if str(running.get("kv_cache_dtype", "auto")).startswith("fp8") and spec.kv_cache_dtype.value == "auto":
        other.append(f"kv_cache_dtype={running['kv_cache_dtype']} (asked for: auto)")
    compared = "settings read back from the engine, and those asked for"
    if not other:
        lab.add(Rung(SEMANTICS, "settings in force", compared, Verdict.equal, unit="settings", count=len(wanted)))
        return
    cause = Cause(
        "settings",
        f"the engine runs {', '.join(other)}",
        f"set rollout.* to what is meant (mismatch=none), "
        f"or have the engine run it: rollout.{other[0].partition('=')[0]}",
        "engine",
    )
    lab.add(
        Rung(
            SEMANTICS,
            "settings in force",
            compared,
            Verdict.differs,
            unit="settings",
            value=float(len(other)),
            count=len(wanted),
            cause=cause,
        )
    )


def tokenisation(lab: Lab) -> None:
    """The prompts' ids against a tokenizer loaded anew; begin tokens; decoding."""
    fresh, policy = fresh_tokenizer(lab.bench.folder), lab.bench.policy.tokenizer
    compared = "prompt ids of the trainer's tokenizer, and of one loaded anew from the model's folder"
    wrong: Cause | None = None
    for prompt in lab.shorts:
        text = prompt.problem.prompt
        if isinstance(text, str):
            ids = tuple(fresh(text)["input_ids"])
        else:
            ids = tuple(fresh.apply_chat_template(text, add_generation_prompt=True, return_dict=False))
        bos = fresh.bos_token_id
        if prompt.ids != ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(prompt.ids, ids, strict=False)) if a != b),
                min(len(ids), len(prompt.ids)),
            )
            text = (
                f"prompt {prompt.problem.id} has other ids than a fresh tokenizer gives, from token {at + 1} on "
                f"({prompt.ids[at : at + 3]} for {ids[at : at + 3]})"
            )
            wrong = Cause("tokenisation", text, "one tokenizer, from the model's folder, for both sides", "prompts")
        if bos is not None and bos != fresh.eos_token_id and prompt.ids[:2] == (bos, bos):
            wrong = Cause(
                "double_bos",
                f"prompt {prompt.problem.id} begins with two begin tokens",
                "encode chat templates without adding special tokens again",
                "prompts",
            )
        if isinstance(text, str) and policy.decode(prompt.ids) != fresh.decode(
            list(prompt.ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        ):
            wrong = wrong or Cause(
                "decoding",
                f"prompt {prompt.problem.id} decodes to another text than with a fresh tokenizer",
                "the tokenizer's decode: skip special tokens, clean up nothing",
                "prompts",
            )
    lab.add(
        Rung(
            SEMANTICS,
            "tokenisation",
            compared,
            Verdict.differs if wrong else Verdict.equal,
            unit="prompts",
            count=len(lab.shorts),
            cause=wrong,
        )
    )


# -- the engine's figures ---------------------------------------------------------------------------------------------


def sampled(lab: Lab) -> bool:
    """Sample the prompts; False when the engine gives no answer that could be looked at."""
    compared = "the form of each response: end token and its log-prob, finish reason, lengths, versions"
    bench = lab.bench
    try:
        samples = bench.engine.generate(lab.shorts, lab.sampling())
        more = bench.engine.generate(lab.longs, lab.sampling(group=2, seed=1)) if lab.longs else []
    except TrimtabError as error:
        lab.refused(SEMANTICS, "finish reasons and end tokens", compared, error)
        return False
    asked = len(lab.shorts) * lab.effort.group + 2 * len(lab.longs)
    found = sampler.structure([*samples, *more], bench.stop_ids, lab.effort.tokens, 0)
    if len(samples) + len(more) != asked:
        found.insert(
            0,
            Cause(
                "count",
                f"{len(samples) + len(more)} responses to {asked} requests",
                "one response for each request, prompt by prompt",
                "engine",
            ),
        )
    wrong = [
        p
        for p, s in zip([p for p in lab.shorts for _ in range(lab.effort.group)], samples, strict=False)
        if p.ids != s.prompt.ids
    ]
    if wrong:
        found.insert(
            0,
            Cause(
                "prompt_ids",
                f"the response to prompt {wrong[0].problem.id} carries other prompt ids than were given",
                "token-in, token-out: never encode a prompt twice",
                "engine",
            ),
        )
    name = "finish reasons and end tokens"
    for cause in found:
        lab.add(Rung(SEMANTICS, name, compared, Verdict.differs, unit="responses", count=len(samples), cause=cause))
    if not found:
        lab.add(Rung(SEMANTICS, name, compared, Verdict.equal, unit="responses", count=len(samples)))
    usable = [sample for sample in (*samples, *more) if sample.ids and len(sample.logps) == len(sample.ids)]
    lab.samples = usable
    if not usable:
        return False
    lab.truth = lab.sees(usable)
    return True


def reported(lab: Lab) -> None:
    """The engine's log-probs at the run's temperature, and what its tokens follow."""
    truth = lab.truth
    assert truth is not None
    told = truth.reported()
    lab.measure_noise(truth)
    known = lab.known_lossy()
    rung, found = lab.judge(
        SEMANTICS,
        "log-probs of the sampled tokens",
        f"the engine's report at T={lab.heat:g}, and the reference",
        truth,
        told,
        truth.logp_N,
        "engine",
        lab.engine_bound,
        other="the same tokens in the trainer: see below",
        known=known,
    )
    if known is not None and rung.cause is known and lab.bench.spec.rollout.kv_cache_dtype is not KvCacheDtype.auto:
        note = "8-bit keys and values, as asked for: see the rung on the KV cache's dtype"
        rung = lab.rungs[-1] = replace(rung, verdict=Verdict.rounding, cause=None, bound=None, note=note)
        lab.engine_bound = lab.coarse(size_of(difference(told, truth.logp_N), truth.row_N))
    if found is not None:
        lab.reading = found.guess if not found.where else None
        if found.guess.name == "raw_logprobs" and _sampled_cold(truth):
            text = (
                f"the temperature is not applied: tokens are sampled, and log-probs reported, at T=1, not {lab.heat:g}"
            )
            cause = Cause("temperature_ignored", text, "hand rollout.temperature to the engine's sampler", "engine")
            lab.rungs[-1] = rung = replace(rung, cause=cause)
    elsewhere = found is not None and found.guess.slow  # other weights or positions: tokens follow them, not ours
    if rung.cause is not None and (elsewhere or rung.cause.name in ("noise", "dtype", "kv_cache_dtype", *CONTEXT)):
        lab.noisy = rung.cause
    lab.engine_off = rung.fault
    lab.engine_size = size_of(difference(told, truth.logp_N), truth.row_N)
    tests = (
        ("support", sampler.support),  # a cut makes responses alike
        ("responses are independent", sampler.start),  # the tests that follow take them to be
        ("sampled tokens follow the distribution", sampler.distribution),
        ("end tokens as often as predicted", sampler.ends),
    )
    named = False
    for name, test in tests:
        tested = sampler.rung(
            lab,
            name,
            f"{len(told)} sampled tokens, and the reference's distribution at T={lab.heat:g}",
            test(truth),
            len(told),
            follows=named or lab.noisy is not None or (found is not None and found.guess.name in SHAPES),
        )
        named = named or (tested.fault and test in (sampler.support, sampler.start))
    _seeds(lab, truth)


def _sampled_cold(truth: Truth) -> bool:
    """Whether the tokens fit T=1 clearly better than the temperature asked for."""
    found, error = fitted_temperature(truth.logits_NV, truth.token_N)
    return abs(found - truth.temperature) > 4 * error > abs(found - 1)


HOT = 2.0
SHAPES = (
    "top_p", "top_k", "min_p", "end_masked", "token_masked", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "softcap", "logit_bias",
)  # fmt: skip
"""Readings that say what is sampled from, too."""
CONTEXT = ("positions", "unexplained", "double_bos", "bos_dropped", "padding_seen", "prompt_cut", "other_prompt")


def _seeds(lab: Lab, truth: Truth) -> None:
    few = lab.shorts[: max(1, 32 // lab.effort.group)]
    base = [sample for sample in lab.samples[: len(few) * lab.effort.group] if sample.prompt in few]
    if lab.heat == 0 or not base:
        return
    again = lab.bench.engine.generate(lab.shorts, lab.sampling())[: len(base)]
    other = lab.bench.engine.generate(few, lab.sampling(seed=77))[: len(base)]
    sampler.rung(
        lab,
        "seeds",
        "the same prompts again with the same seed, and with another one",
        sampler.seeds(again, other, base, truth),
        len(base),
    )


def other_temperatures(lab: Lab) -> None:
    """Where raw and processed log-probs differ; and where unlikely tokens come, so that a cut or a bias shows."""
    another_temperature(lab, 0.7 if lab.heat in (0.0, 1.0) else 1.0, seed=2)
    another_temperature(lab, HOT, seed=8)


def another_temperature(lab: Lab, heat: float, seed: int) -> None:
    """The engine's report, and what its tokens follow, at this temperature."""
    compared = f"the engine's report at T={heat:g}, and the reference"
    name = f"log-probs at T={heat:g}"
    try:
        samples = lab.bench.engine.generate(
            lab.shorts, lab.sampling(heat, group=max(2, lab.effort.group // 2), seed=seed)
        )
    except TrimtabError as error:
        lab.refused(SEMANTICS, name, compared, error)
        return
    truth = lab.sees(samples, heat)
    told = truth.reported()
    raw = lab.bench.spec.rollout.logprobs_mode is LogprobsMode.raw
    expected = truth.own(truth.at(1.0)) if raw else lab.expected(truth)
    bound = lab.scaled(lab.engine_bound, heat)
    rung, found = lab.judge(
        SEMANTICS,
        name,
        compared + (" at T=1, as rollout.logprobs_mode=raw says" if raw else ""),
        truth,
        told,
        expected,
        "engine",
        bound,
        search=not lab.engine_off and not any(r.fault and r.name.startswith("log-probs at T=") for r in lab.rungs),
    )
    if found is not None and lab.heat == 1.0:
        lab.rungs[-1] = replace(
            rung, note="this run samples at T=1, where the figures agree; it bites at other temperatures"
        )
    bad = lab.engine_off or any(r.fault and r.name.startswith("log-probs at T=") for r in lab.rungs)
    tests = (
        ("sampled tokens follow the distribution", sampler.distribution),
        ("support", sampler.support),
        ("end tokens as often as predicted", sampler.ends),
    )
    for what, test in tests:
        sampler.rung(
            lab,
            f"{what} (T={heat:g})",
            f"{len(told)} sampled tokens, and the reference at T={heat:g}",
            test(truth),
            len(told),
            follows=bad,
        )


def greedy(lab: Lab) -> None:
    """Temperature 0, as evaluation samples: the likeliest token, with its log-prob at T=1."""
    compared = "greedy responses, and the reference's likeliest tokens"
    try:
        samples = lab.bench.engine.generate(lab.shorts[:8], lab.sampling(0.0, group=1, seed=3))
    except TrimtabError as error:
        lab.refused(SEMANTICS, "greedy sampling", compared, error)
        return
    truth = lab.sees(samples, 0.0)
    short = truth.logits_NV.max(1).values - truth.logits_NV.gather(1, truth.token_N[:, None])[:, 0]
    allowed = 4 * lab.engine_bound.each if lab.engine_bound.coarse else 1e-3
    worst = float(short.max()) if len(short) else 0.0
    if worst > allowed:
        cause = Cause(
            "not_greedy",
            f"a greedy response holds a token whose logit is {worst:.3g} below the largest",
            "temperature 0 must take the largest logit",
            "engine",
        )
        lab.add(
            Rung(
                SEMANTICS,
                "greedy sampling",
                compared,
                Verdict.differs,
                value=worst,
                bound=allowed,
                unit="logits",
                count=len(short),
                cause=cause,
                follows=lab.engine_off,
            )
        )
        return
    lab.judge(
        SEMANTICS,
        "greedy sampling",
        compared,
        truth,
        truth.reported(),
        truth.logp_N,
        "engine",
        lab.engine_bound,
        search=not lab.engine_off,
    )
