"""Alarms of a live run: when each is raised, and what to run then (docs/alarms.md)."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from torch import Tensor

from trimtab.batch import Batch
from trimtab.spec import Engine, Level, Mismatch, MisSpec, OverTokens, RolloutMode, RunSpec, TisMode
from trimtab.stat import LOG_RATIO_CLAMP
from trimtab.train import thresholds as at

log = logging.getLogger(__name__)

EVERY = 100  # steps between two warnings of one kind


class Kind(Enum):
    """What an alarm is about; a step in which it holds logs ``alarm/<kind>``."""

    kl = "kl"
    abs_diff = "abs_diff"
    prob_diff = "prob_diff"
    kl_slope = "kl_slope"
    abs_diff_slope = "abs_diff_slope"
    ess = "ess"
    ess_drop = "ess_drop"
    stale = "stale"
    saturation = "saturation"
    missing = "missing"


# Options that no tool needs to measure a run's gap; and Hydra's own.
_LEFT_OUT = ("run_dir", "resume", "steps", "tracker", "shadow", "shadow_gradient_every", "evaluation", "checkpoint",
             "launcher", "launch", "wait", "dry_run", "runs_per_job", "sweep", "hydra")  # fmt: skip


def tool(kind: Kind) -> str:
    """The command that finds the cause: parity where the two sides may differ by a fault, probe where single tokens
    and responses are to be looked at."""
    match kind:
        case Kind.ess | Kind.ess_drop | Kind.saturation:
            return "probe"
        case Kind.kl | Kind.abs_diff | Kind.prob_diff | Kind.kl_slope | Kind.abs_diff_slope | Kind.stale | Kind.missing:
            return "parity"


def advice(kind: Kind, overrides: Iterable[str], run_dir: str = "") -> str:
    """The command line to run, with the run's own overrides and newest weights, ready for a shell."""
    kept = [given for given in overrides if given.lstrip("+~").split("=")[0].split(".")[0] not in _LEFT_OUT]
    weights = ["--weights", run_dir] if run_dir else []
    return shlex.join(["trimtab", tool(kind), *kept, *weights])


@dataclass(frozen=True)
class Gap:
    """A batch's gap token by token: ``tokens`` that both sides scored, how many of them are far apart (|Δp| > 0.1), and
    the effective sample size (Σw)² / (n Σw²) that unbounded token weights w = exp(clamp(d)) would have."""

    tokens: int
    far: int
    ess: float

    def metrics(self) -> dict[str, float]:
        """The share of far tokens and the effective sample size; nothing of no tokens."""
        if not self.tokens:
            return {}
        return {"train/prob_diff_share": self.far / self.tokens, "train/mis_ess_token": self.ess}


def gap_of(trainer_N: Tensor, rollout_N: Tensor, valid_N: Tensor) -> Gap:
    """The gap of log-probs (nats) of the same tokens; NaN on either side is left out, -inf is a probability of 0."""
    both_N = valid_N & ~trainer_N.isnan() & ~rollout_N.isnan()
    trainer_N, rollout_N = trainer_N.detach()[both_N].double(), rollout_N[both_N].double()
    count = int(both_N.sum())
    if count == 0:
        return Gap(0, 0, math.nan)
    far = int(((trainer_N.exp() - rollout_N.exp()).abs() > at.FAR_APART).sum())
    d_N = (trainer_N - rollout_N).nan_to_num(0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    weight_N = d_N.exp()
    return Gap(count, far, float(weight_N.sum().square() / (count * weight_N.square().sum())))


def missing_rows(batch: Batch) -> float:
    """Share of the rows that hold a valid token without a rollout log-prob."""
    missing_N = batch.mask_N & batch.rollout_logp_N.isnan()
    return len(batch.row_N[missing_N].unique()) / batch.rows


def _missing(batch: Batch, metrics: Mapping[str, float]) -> Iterator[tuple[Kind, str]]:
    share = missing_rows(batch)
    if share > 0:
        count = int(metrics.get("train/mis_missing_logprob_count", 0))
        yield (
            Kind.missing,
            f"{share:.0%} of the rows hold tokens without a rollout log-prob ({count}); they are taken as on-policy. "
            "A share that doesn't vanish points at the engine's dtype or rollout.logprobs_mode",
        )


def _saturation(mis: MisSpec, metrics: Mapping[str, float]) -> Iterator[tuple[Kind, str]]:
    """A sequence's log-weight is about length x KL; it is warned of from half the clamp on, where most of the weights
    will soon be clamped and the effective sample size collapses."""
    weighted = mis.tis_mode is not TisMode.off and mis.tis_level is Level.sequence
    summed = any(rule.over_tokens is OverTokens.sum for rule in mis.reject)
    whole = weighted or summed or (mis.use_rs and mis.rs_level is Level.sequence)
    predicted = metrics.get("train/mis_k3_kl", 0.0) * metrics.get("train/response_length", 0.0)
    if whole and predicted > LOG_RATIO_CLAMP / 2:
        yield (
            Kind.saturation,
            f"length x KL is {predicted:.3g} nats, more than half of the clamp ({LOG_RATIO_CLAMP:g}): sequence weights "
            "saturate. Use level=geometric or level=token, or mend the mismatch at its source",
        )


class Past:
    """The last values of each figure, oldest first; plain JSON, as it is part of a checkpoint."""

    def __init__(self, values: Mapping[str, Sequence[float]] | None = None) -> None:
        self.values: dict[str, list[float]] = {name: list(row) for name, row in (values or {}).items()}

    def keep(self, name: str, value: float, most: int) -> list[float]:
        """Add a value and return the last ``most``."""
        self.values[name] = [*self.values.get(name, []), value][-most:]
        return self.values[name]

    def above(self, name: str, value: float, bound: float) -> bool:
        """Whether the figure was above its bound, which may change from step to step, often enough of late."""
        return sum(x > 1 for x in self.keep(f"{name} over bound", value / bound, at.WINDOW)) >= at.NEEDED

    def far(self, name: str, gap_far: float, tokens: float, bound: float) -> bool:
        """Whether more tokens are far apart, of the last batches together, than a share of ``bound`` explains."""
        counts = self.keep(name, gap_far, at.WINDOW)
        allowed = self.keep(f"{name} allowed", tokens * bound, at.WINDOW)
        often = sum(count > most for count, most in zip(counts, allowed, strict=True)) >= at.NEEDED
        return often and sum(counts) > sum(allowed) + at.SIGMAS * math.sqrt(sum(allowed))

    def grows(self, name: str, value: float, growth: float, floor: float) -> bool:
        """Whether the medians of the trend's thirds rise, the last to ``growth`` times the first and to the floor."""
        past, third = self.keep(name, value, at.TREND), at.TREND // 3
        if len(past) < at.TREND:
            return False
        first, middle, last = (median(past[i : i + third]) for i in range(0, at.TREND, third))
        return first < middle < last and last >= growth * first and last >= floor

    def drops(self, name: str, value: float) -> float | None:
        """The median of the values before, if this one is less than half of it."""
        before = self.values.get(name, [])[-at.ESS_MEMORY :]
        self.keep(name, value, at.ESS_MEMORY)
        usual = median(before) if len(before) >= at.ESS_LEAST else 0.0
        return usual if value < at.ESS_DROP * usual else None


class Alarms:
    """Looks at each step's numbers. What it remembers is part of a checkpoint, so that a resumed run logs the same."""

    def __init__(self, spec: RunSpec, overrides: Sequence[str] = ()) -> None:
        self._spec, self._overrides = spec, tuple(overrides)
        self._bounds = at.rounding(spec)
        self._said: dict[Kind, int] = {}
        self._past = Past()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON."""
        return dict(self._past.values)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's ``state``."""
        self._past = Past(state)

    def __call__(
        self, step: int, batch: Batch, valid_N: Tensor, first_N: Tensor, metrics: Mapping[str, float], moved: bool
    ) -> dict[str, float]:
        """Metrics of the step's alarms. ``metrics``: the step's others; ``first_N``: the trainer's log-probs, nats.

        ``moved``: the policy's own steps are part of the gap (stale rollouts; several updates without a proximal
        forward), so that it may be wider than rounding makes it.
        """
        gap = gap_of(first_N, batch.rollout_logp_N, valid_N)
        found: dict[Kind, str] = {}
        parts = (
            self._levels(metrics, gap, moved),
            self._probed(metrics),
            self._sample_size(metrics, gap),
            self._stale(metrics),
            _saturation(self._spec.mis, metrics),
            _missing(batch, metrics),
        )
        for kind, text in (pair for part in parts for pair in part):
            found.setdefault(kind, text)
        for kind, text in found.items():
            self._say(step, kind, text)
        return gap.metrics() | {"train/alarms": len(found)} | {f"alarm/{kind.value}": 1.0 for kind in found}

    def _say(self, step: int, kind: Kind, text: str) -> None:
        if step - self._said.get(kind, -EVERY) < EVERY:
            return
        self._said[kind] = step
        injected = self._spec.mismatch.kind
        meant = "" if injected is Mismatch.none else f" (mismatch={injected.value} makes a gap on purpose)"
        saved = 0 < self._spec.checkpoint.every < step
        what = advice(kind, self._overrides, self._spec.run_dir if saved else "")
        log.warning("step %d: alarm %s: %s%s. Run: %s", step, kind.value, text, meant, what)

    # -- the gap -----------------------------------------------------------------------------------------------------

    def _levels(self, metrics: Mapping[str, float], gap: Gap, moved: bool) -> Iterator[tuple[Kind, str]]:
        bounds, past = at.MOVED if moved else self._bounds, self._past
        floor = at.FLOOR_MOVED if moved else at.FLOOR
        often = f"in {at.NEEDED} of the last {at.WINDOW} steps"
        kl, size = metrics.get("train/mis_k3_kl"), metrics.get("train/train_rollout_logprob_abs_diff")
        if kl is not None and math.isfinite(kl):
            if past.above("kl", kl, bounds.kl):
                yield Kind.kl, f"mismatch KL (k3) is {kl:.3g} nats a token, above {bounds.kl:g} {often}"
            if past.grows("kl", kl, at.GROWTH_KL, floor * bounds.kl):
                yield Kind.kl_slope, f"mismatch KL (k3) has grown to {kl:.3g} nats a token over {at.TREND} steps"
        if size is not None and math.isfinite(size):
            if past.above("abs_diff", size, bounds.abs_diff):
                yield Kind.abs_diff, f"mean |log-ratio| is {size:.3g} nats, above {bounds.abs_diff:g} {often}"
            if past.grows("abs_diff", size, at.GROWTH_ABS, floor * bounds.abs_diff):
                yield Kind.abs_diff_slope, f"mean |log-ratio| has grown to {size:.3g} nats over {at.TREND} steps"
        if gap.tokens and past.far("far", gap.far, gap.tokens, bounds.far):
            yield (
                Kind.prob_diff,
                f"{gap.far / gap.tokens:.1%} of the tokens have probabilities more than {at.FAR_APART:g} apart on the "
                f"two sides, and over the last {at.WINDOW} steps more than {bounds.far:.0%}",
            )

    def _probed(self, metrics: Mapping[str, float]) -> Iterator[tuple[Kind, str]]:
        """The proximal probe's figures: the policy has not moved yet, so rounding's bounds hold."""
        tokens = metrics.get("train/probe_proximal_tokens")
        if not tokens:
            return
        kl, size = metrics["train/probe_proximal_k3_kl"], metrics["train/probe_proximal_abs_diff"]
        share, bounds = metrics["train/probe_proximal_prob_diff_share"], self._bounds
        where = f"before the first update, in {at.NEEDED} of the last {at.WINDOW} probes"
        if self._past.above("probed kl", kl, bounds.kl):
            yield Kind.kl, f"mismatch KL (k3) is {kl:.3g} nats a token, above {bounds.kl:g} {where}"
        if self._past.above("probed abs_diff", size, bounds.abs_diff):
            yield Kind.abs_diff, f"mean |log-ratio| is {size:.3g} nats, above {bounds.abs_diff:g} {where}"
        if self._past.far("probed far", share * tokens, tokens, bounds.far):
            text = f"{share:.1%} of the probed tokens have probabilities more than {at.FAR_APART:g} apart"
            yield Kind.prob_diff, text

    def _sample_size(self, metrics: Mapping[str, float], gap: Gap) -> Iterator[tuple[Kind, str]]:
        """Of the weights that are applied, or that token weights would have if that is less."""
        applied = metrics.get("train/mis_ess")
        if applied is None or not gap.tokens:
            return
        ess = min(applied, gap.ess)
        usual = self._past.drops("ess", ess)
        if usual is not None:
            yield (
                Kind.ess_drop,
                f"the effective sample size fell to {ess:.0%}, from {usual:.0%} in the steps before: a few tokens "
                "carry the step",
            )
        if self._past.above("1 / ess", 1 / max(ess, 1e-9), 1 / at.ESS_LEVEL):
            yield Kind.ess, f"the effective sample size is {ess:.0%}, below {at.ESS_LEVEL:.0%}"

    def _stale(self, metrics: Mapping[str, float]) -> Iterator[tuple[Kind, str]]:
        """Tokens of older versions than the mode allows; an engine whose scores a hand-over does not move."""
        if self._spec.rollout.engine is Engine.replay:
            return
        oldest, allowed = metrics.get("train/lag_max", 0.0), self._oldest_allowed()
        late = self._past.keep("late", float(oldest > allowed), at.WINDOW)
        if sum(late) >= at.LATE:
            yield (
                Kind.stale,
                f"tokens of policy versions up to {max(oldest, allowed + 1):g} old are trained on, "
                f"rollout.mode={self._spec.rollout.mode.value} allows {allowed}: the engine samples from stale weights",
            )
        gap, moved = metrics.get("train/probe_mean_abs"), metrics.get("train/probe_engine_moved")
        if gap is not None and moved is not None and gap > self._bounds.abs_diff and moved < at.STUCK * gap:
            yield (
                Kind.stale,
                f"a hand-over moved the engine's log-probs by {moved:.3g} nats and left a gap of {gap:.3g}: it was not "
                "taken, and the engine samples from stale weights",
            )

    def _oldest_allowed(self) -> int:
        rollout = self._spec.rollout
        if rollout.mode is RolloutMode["async"]:
            return rollout.max_lag
        return 0 if rollout.mode is RolloutMode["sync"] else 1
