"""``mismatch=…``: each choice composes where it can be made; senseless ones are refused or have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import composed

from trimtab.config import config_hash
from trimtab.errors import ConfigError
from trimtab.report.sources.rows import injected_of
from trimtab.rollout.inject import label
from trimtab.spec import Mismatch, MismatchSpec, RunSpec

CONF = Path(__file__).parents[2] / "conf" / "mismatch"
WITH = {"kv_fp8": ["rollout=vllm"], "raw_logprobs": ["rollout.temperature=0.7"]}


def injected(kind: str, *more: str) -> RunSpec:
    engine = "vllm" if kind == "kv_fp8" else "transformers"
    return composed(f"mismatch={kind}", f"rollout={engine}", *WITH.get(kind, []), *more)


def test_every_kind_has_a_file_with_a_sensible_strength() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {kind.name for kind in Mismatch}
    expected = {"none": 0, "logit_noise": 0.1, "temperature": 0.1, "top_p": 0.05, "dtype": 0, "kv_fp8": 0,
                "quantised_weights": 1 / 127, "stale": 4, "raw_logprobs": 0, "shift": 0.1}  # fmt: skip
    for name, strength in expected.items():
        spec = injected(name).mismatch
        assert (spec.kind.name, spec.strength) == (name, strength)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("dtype", ["rollout.dtype=bfloat16"]),
        ("dtype", ["mismatch.dtype=float32"]),
        ("kv_fp8", ["rollout.kv_cache_dtype=fp8"]),
        ("raw_logprobs", ["rollout.temperature=1"]),
        ("stale", ["mismatch.strength=0"]),
    ],
)
def test_a_gap_that_is_there_already_is_none(kind: str, more: list[str]) -> None:
    spec = injected(kind, *more)
    assert spec.mismatch == MismatchSpec()
    without = [f"rollout={spec.rollout.engine.value}", *(m for m in more if not m.startswith("mismatch"))]
    assert config_hash(spec) == config_hash(composed(*without))


def test_the_dtype_that_computes_is_the_injected_one() -> None:
    assert injected("dtype", "rollout.fp32_head=true").rollout.fp32_head is True
    assert composed("rollout=transformers", "rollout.fp32_head=true").rollout.fp32_head is False
    assert injected("dtype").rollout.probe_bound == 0.1


@pytest.mark.parametrize("kind", ["temperature", "top_p"])
def test_a_gap_of_the_sampler_needs_its_own_log_probs(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"processed with mismatch={kind}.*rollout.logprobs_mode=processed"):
        injected(kind, "rollout.logprobs_mode=raw")


def test_labels_are_the_same_in_runs_and_reports() -> None:
    for kind in Mismatch:
        spec = injected(kind.name).mismatch
        flat = {"mismatch.kind": kind.value, "mismatch.strength": spec.strength, "mismatch.dtype": spec.dtype.value}
        assert injected_of(flat) == label(spec)
