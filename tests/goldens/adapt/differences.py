"""The entries of docs/differences.md: which cases each covers, and what is right there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapt import right
from adapt.shared import Case

Path = tuple[str, ...]


def _nowhere(case: Case) -> dict[Path, Any]:
    return {}


def _none(case: Case) -> Sequence[Path]:
    return ()


@dataclass(frozen=True)
class Difference:
    """``right``: values by loops of their own (``right.py``) that stand in for the system's.

    ``theirs``: what the entry says the system computes there, which the case must hold. ``loose``: entries that may
    differ by ``within``, relative.
    """

    anchor: str
    applies: Callable[[Case], bool]
    right: Callable[[Case], dict[Path, Any]] = _nowhere
    theirs: Callable[[Case], dict[Path, Any]] = _nowhere
    loose: Callable[[Case], Sequence[Path]] = _none
    within: float = 0.0


GUARD = 1e-8  # what verl and NeMo-RL add to a count, which is at least 1
GUARDS = 4  # the most divisions by one that meet in a number: of weights, of a ratio, in a row, over rows


def _guarded(case: Case) -> Sequence[Path]:
    if case.system == "nemo_rl":
        return [("loss",), ("metrics", "loss"), ("grad_curr_logprobs",)]
    found = [("loss",), ("grad_log_prob",)] if "actor" in case.config else []
    block = case.config if "actor" not in case.config else case.config["rollout_correction"] or {}
    return [*found, ("weights",)] if block.get("rollout_is_batch_normalize") else found


def _cast(case: Case) -> Sequence[Path]:
    return [("loss",), ("grad_log_probs",), ("pg_loss_tokens_before",), ("pg_loss_tokens_after",)]


def _overflows(case: Case) -> bool:
    if case.system != "nemo_rl" or case.config.get("truncated_importance_sampling_type") != "tis":
        return False
    ratio = (case.numbers("prev_logprobs") - case.numbers("generation_logprobs")).exp()
    return bool((ratio.isinf() & case.flags("token_mask")).any())


def _broadcasts(case: Case) -> bool:
    config = case.config
    if case.system != "trl" or config.get("loss_type") != "luspo":
        return False
    by_token = (config["vllm_importance_sampling_mode"] or "").startswith("token")
    return by_token or config["beta"] != 0 or config["importance_sampling_level"] == "token"


def _normalises(case: Case) -> bool:
    return case.system in ("miles", "slime") and bool(case.config.get("tis_batch_normalize")) and case.config["use_tis"]


def _clamps_by_max(case: Case) -> bool:
    rule = case.config.get("rejection_sampling") if case.system == "areal" else None
    wanted = {"action": "clamp", "level": "sequence", "agg": "max"}
    return bool(rule) and wanted.items() <= rule.items() and rule.get("lower") is not None


def _error(case: Case, system: str, kind: str) -> bool:
    return case.system == system and case.outputs.get("error") == kind


def _empty(case: Case) -> bool:
    return _error(case, "verl", "ValueError") and not case.flags("response_mask").any()


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "guards-in-denominators",
        lambda case: case.system in ("verl", "nemo_rl"),
        loose=_guarded,
        within=GUARDS * GUARD,
    ),
    Difference(
        "a-loss-in-float32-inside-of-float64",
        lambda case: case.system == "miles" and "compute_policy_loss" in case.function,
        loose=_cast,
        within=2e-5,
    ),
    Difference(
        "a-ratio-that-overflows", _overflows, right.nemo_rl_overflow, partial(right.nemo_rl_overflow, theirs=True)
    ),
    Difference("luspo-with-a-term-for-each-token", _broadcasts, right.luspo, partial(right.luspo, theirs=True)),
    Difference("metrics-that-divide-by-zero", lambda c: _error(c, "verl", "ZeroDivisionError"), right.verl_overflow),
    Difference("a-batch-without-valid-tokens", _empty, right.nothing_valid),
    Difference(
        "the-mean-that-weights-are-divided-by",
        _normalises,
        right.miles_normalised,
        partial(right.miles_normalised, theirs=True),
    ),
    Difference(
        "a-clamp-that-looks-at-the-largest-token",
        _clamps_by_max,
        right.areal_clamp,
        partial(right.areal_clamp, theirs=True),
    ),
    Difference(
        "sequence-ratios-of-rows-that-are-not-packed",
        lambda case: _error(case, "pipelinerl", "ValueError") and not case.raw("is_packed"),
        right.unpacked_gspo,
    ),
)
