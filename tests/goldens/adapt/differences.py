"""The entries of docs/differences.md: which cases each covers, and what is right there."""

from __future__ import annotations

import math
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
    differ by ``within`` of the case, relative.
    """

    anchor: str
    applies: Callable[[Case], bool]
    right: Callable[[Case], dict[Path, Any]] = _nowhere
    theirs: Callable[[Case], dict[Path, Any]] = _nowhere
    loose: Callable[[Case], Sequence[Path]] = _none
    within: Callable[[Case], float] = lambda case: 0.0


GUARD = 1e-8  # what verl and NeMo-RL add to a count, which is at least 1
GUARDS = 4  # the most divisions by one that meet in a number: of weights, of a ratio, in a row, over rows


def _guarded(case: Case) -> Sequence[Path]:
    if case.system == "nemo_rl":
        return [("loss",), ("metrics", "loss"), ("grad_curr_logprobs",)]
    found = [("loss",), ("grad_log_prob",)] if "actor" in case.config else []
    block = case.config if "actor" not in case.config else case.config["rollout_correction"] or {}
    return [*found, ("weights",)] if block.get("rollout_is_batch_normalize") else found


def _guard_bound(case: Case) -> float:
    """A guard inside of an exponent changes the result by |exponent| times its own share: a mean over a row of
    log-ratios (NeMo-RL's GSPO, verl's GMPO), and of logs of weights, which GMPO takes as at least 1e-10."""
    if case.system == "nemo_rl" and case.config.get("sequence_level_importance_ratios"):
        return (GUARDS + _row_log_ratio(case, "curr_logprobs", "prev_logprobs", right.nemo_rl_mask(case))) * GUARD
    if case.function.endswith("geo_mean"):
        log_weight = -math.log(1e-10) if (case.config["rollout_correction"] or {}).get("rollout_is") else 0.0
        mask = right.rows(case, "response_mask")
        return (GUARDS + _row_log_ratio(case, "log_prob", "old_log_prob", mask) + log_weight) * GUARD
    return GUARDS * GUARD


def _row_log_ratio(case: Case, numerator: str, denominator: str, mask: right.Rows) -> float:
    """The largest of the rows' mean |log-ratio|."""
    a, b = right.rows(case, numerator), right.rows(case, denominator)
    means = [sum(abs(a[i][t] - b[i][t]) for t in at) / len(at) for i, at in enumerate(right.kept(mask)) if at]
    return max(means, default=0.0)


def _cast(case: Case) -> Sequence[Path]:
    return [("loss",), ("grad_log_probs",), ("pg_loss_tokens_before",), ("pg_loss_tokens_after",)]


def _overflows(case: Case) -> bool:
    """Whether a ratio (token, row, KL) is a NaN or overflows, which NeMo-RL makes 0; trimtab's saturates earlier."""
    config = case.config
    if case.system != "nemo_rl" or "use_importance_sampling_correction" not in config or "error" in case.outputs:
        return False
    mask, largest, found = right.nemo_rl_mask(case), right.LARGEST[case.data["dtype"]], [-math.inf]
    if config["use_importance_sampling_correction"]:
        sums = right.log_ratios(case, "prev_logprobs", "generation_logprobs", mask)
        found += sums if config["sequence_level_importance_ratios"] else _apart(case, "prev_logprobs", mask)
    if config["use_on_policy_kl_approximation"] and not config["use_kl_in_reward"]:
        found += _apart(case, "curr_logprobs", mask) if config["reference_policy_kl_penalty"] else []
    return not all(x <= largest - right.MARGIN for x in found)


def _apart(case: Case, numerator: str, mask: right.Rows) -> list[float]:
    a, b = right.rows(case, numerator), right.rows(case, "generation_logprobs")
    return [a[i][t] - b[i][t] for i, at in enumerate(right.kept(mask)) for t in at]


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
        within=_guard_bound,
    ),
    Difference(
        "a-loss-in-float32-inside-of-float64",
        lambda case: case.system == "miles" and "compute_policy_loss" in case.function,
        loose=_cast,
        within=lambda case: 2e-5,
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
