"""Options of engines and injected gaps: what is refused and its mend, what has no effect, what the hash sees."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from omegaconf import OmegaConf

from trimtab.config import check, compose, config_hash, from_dict, ignored, resolve
from trimtab.errors import ConfigError
from trimtab.spec import Dtype, Mismatch

ASYNC = ["rollout.mode=async"]
IN_PROCESS = ["rollout=transformers"]

REFUSED = [
    (
        ["mismatch.kind=kv_fp8", *IN_PROCESS],
        "mismatch.kind=kv_fp8 is refused; allowed: none with rollout=transformers; only rollout=vllm can make this "
        "gap; for example rollout=vllm (or mismatch=none)",
    ),
    (
        ["mismatch.kind=top_p", "mismatch.strength=1"],
        "mismatch.strength=1 is refused; allowed: >= 0 and < 1 with mismatch=top_p; for example mismatch.strength=0.05",
    ),
    (
        ["mismatch.kind=shift", "mismatch.strength=2"],
        "mismatch.strength=2 is refused; allowed: >= 0 and <= 1 with mismatch=shift; for example mismatch.strength=0.5",
    ),
    (
        ["mismatch.kind=stale", "mismatch.strength=1.5"],
        "mismatch.strength=1.5 is refused; allowed: a whole number of hand-overs with mismatch=stale; "
        "for example mismatch.strength=2",
    ),
    (
        [*ASYNC, *IN_PROCESS],
        "rollout.mode=async is refused; allowed: sync, one_step_off with rollout=transformers, which lives in the "
        "trainer's process; for example rollout=vllm (or rollout.mode=one_step_off)",
    ),
    (
        [*ASYNC, "mismatch.kind=stale", "mismatch.strength=2"],
        "mismatch.kind=stale is refused; allowed: another with rollout.mode=async; "
        "for example rollout.mode=one_step_off",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_the_message_and_its_mend(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose(overrides))
    assert str(caught.value).splitlines() == [message]
    mend = re.sub(r" \(or .*\)$", "", message.rpartition("for example ")[2])
    check(compose([*(o for o in overrides if o != mend.partition("=")[0]), *shlex.split(mend)]))


# Pairs that do the same.
SAME: list[tuple[list[str], list[str]]] = [
    ([], ["mismatch.strength=0.3"]),
    ([], ["mismatch.kind=temperature"]),
    ([], ["mismatch.dtype=float16"]),
    ([], ["mismatch.kind=raw_logprobs"]),  # raw and processed agree at temperature 1
    (["mismatch.kind=dtype"], ["mismatch.kind=dtype", "mismatch.strength=2"]),
    ([], ["rollout.cache_reset=salt"]),
    (
        ["rollout.mode=async", "rollout.prefix_caching=true"],
        ["rollout.mode=async", "rollout.prefix_caching=true", "rollout.cache_reset=salt"],
    ),
    ([], ["rollout.max_lag=7", "rollout.too_old=correct", "rollout.inflight_cache=keep"]),
    ([], ["rollout.fp32_head=true"]),
    (IN_PROCESS, [*IN_PROCESS, "rollout.chunked_prefill=false", "rollout.kv_cache_dtype=fp8"]),
]
# Pairs that do not.
DIFFERENT: list[tuple[list[str], list[str]]] = [
    ([], ["mismatch.kind=dtype"]),
    (["mismatch.kind=dtype"], ["mismatch.kind=dtype", "mismatch.dtype=float16"]),
    ([], ["mismatch.kind=raw_logprobs", "rollout.temperature=0.7"]),
    ([], ["rollout.prefix_caching=true"]),
    (["rollout.prefix_caching=true"], ["rollout.prefix_caching=true", "rollout.cache_reset=keep"]),
    ([], ASYNC),
    (ASYNC, [*ASYNC, "rollout.max_lag=7"]),
    ([], ["rollout.mode=one_step_off"]),
    ([], ["rollout.kv_cache_dtype=fp8"]),
    (["rollout.dtype=bfloat16"], ["rollout.dtype=bfloat16", "rollout.fp32_head=true"]),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_options_without_effect_do_not_change_the_hash(one: list[str], other: list[str]) -> None:
    assert config_hash(compose(one)) == config_hash(compose(other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_options_with_an_effect_do(one: list[str], other: list[str]) -> None:
    assert config_hash(compose(one)) != config_hash(compose(other))


NO_EFFECT = [
    ("mismatch.kind=stale", "mismatch.strength=0 injects nothing"),
    ("rollout.max_lag=3", "rollout.mode=sync hands weights over between responses"),
    ("rollout.cache_reset=salt", "rollout.prefix_caching=false keeps no prefixes"),
]


@pytest.mark.parametrize(("override", "reason"), NO_EFFECT)
def test_what_has_no_effect_is_said(override: str, reason: str) -> None:
    given = from_dict(OmegaConf.to_container(OmegaConf.from_dotlist([override])))  # type: ignore[arg-type]
    assert ignored(given) == [f"{reason}: {override} has no effect"]


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (["mismatch.kind=dtype"], 0.1),
        (["mismatch.kind=dtype", "mismatch.dtype=float16"], 0.02),
        (["rollout.dtype=bfloat16"], 0.1),
        ([], 1e-3),
    ],
)
def test_the_probe_expects_the_rounding_of_an_injected_dtype(overrides: list[str], bound: float) -> None:
    spec: Any = resolve(compose(overrides))
    assert spec.rollout.probe_bound == bound
    if spec.mismatch.kind is not Mismatch.none:
        assert spec.rollout.dtype is Dtype.float32, "the label says what was injected, the engine's option does not"
