"""Warnings about a step's numbers, said when they begin and at most every hundred steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from trimtab.batch import Batch
from trimtab.spec import Level, MisSpec, OverTokens, TisMode
from trimtab.stat import LOG_RATIO_CLAMP

log = logging.getLogger(__name__)

EVERY = 100


def missing_rows(batch: Batch) -> float:
    """Share of the rows that hold a valid token without a rollout log-prob."""
    missing_N = batch.mask_N & batch.rollout_logp_N.isnan()
    return len(batch.row_N[missing_N].unique()) / batch.rows


def concerns(mis: MisSpec, batch: Batch, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """(kind, text) of what a person should look at.

    saturation: a sequence's log-weight is about length x KL; it is warned of from half the clamp on, where most of the
    weights will soon be clamped and the effective sample size collapses.
    """
    share = missing_rows(batch)
    if share > 0:
        count = int(metrics.get("train/mis_missing_logprob_count", 0))
        yield (
            "missing",
            f"{share:.0%} of the rows hold tokens without a rollout log-prob ({count}); they are taken as on-policy. "
            "A share that doesn't vanish points at the engine's dtype or rollout.logprobs_mode",
        )
    weighted = mis.tis_mode is not TisMode.off and mis.tis_level is Level.sequence
    summed = any(rule.over_tokens is OverTokens.sum for rule in mis.reject)
    whole = weighted or summed or (mis.use_rs and mis.rs_level is Level.sequence)
    predicted = metrics.get("train/mis_k3_kl", 0.0) * metrics.get("train/response_length", 0.0)
    if whole and predicted > LOG_RATIO_CLAMP / 2:
        yield (
            "saturation",
            f"length x KL is {predicted:.3g} nats, more than half of the clamp ({LOG_RATIO_CLAMP:g}): sequence weights "
            "saturate. Use level=geometric or level=token, or mend the mismatch at its source",
        )


class Watch:
    """Logs concerns without repeating them each step."""

    def __init__(self, mis: MisSpec) -> None:
        self._mis, self._said = mis, dict[str, int]()

    def __call__(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> None:
        for kind, text in concerns(self._mis, batch, metrics):
            if step - self._said.get(kind, -EVERY) >= EVERY:
                self._said[kind] = step
                log.warning("step %d: %s", step, text)
