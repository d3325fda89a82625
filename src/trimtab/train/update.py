"""One rollout batch: score, correct, and take the optimiser steps. Branches on ``algo`` are explicit and here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.batch import Batch, Scores
from trimtab.correction import Correction, CorrectionStats, correct, measure
from trimtab.objective.aggregate import coefficients
from trimtab.objective.loss import Loss, Terms, combine
from trimtab.objective.surrogate import Surrogate, ppo_clip, reinforce
from trimtab.protocol import Policy
from trimtab.spec import Algo, Denominator, RejectTerms, RunSpec
from trimtab.train.clock import Clock
from trimtab.train.means import Means
from trimtab.train.optim import Optimizer
from trimtab.train.plan import microbatches, minibatches, rows_with, rules_of
from trimtab.train.scored import Scored, fresh
from trimtab.train.seeds import derive


@dataclass(frozen=True)
class Outcome:
    """What became of a batch: optimiser steps applied, left out as non-finite, left out as fully rejected.

    ``proximal_N`` is kept for the recording; None where the algorithm doesn't compute it.
    """

    applied: int
    nonfinite: int
    all_rejected: int
    metrics: dict[str, float]
    proximal_N: Tensor | None = None


class Tally:
    """What the updates of one batch add up to."""

    def __init__(self) -> None:
        self.means = Means()
        self.correction: CorrectionStats | None = None
        self.applied = self.nonfinite = self.all_rejected = 0
        self.losses: list[float] = []

    def add_correction(self, correction: Correction) -> None:
        stats = measure(correction)
        self.correction = stats if self.correction is None else self.correction.merge(stats)


class Updater:
    """Takes a packed batch and its advantages through one training step."""

    def __init__(self, policy: Policy, optimizer: Optimizer, spec: RunSpec) -> None:
        self._policy, self._optimizer, self._spec = policy, optimizer, spec
        self._rules = rules_of(spec.mis)
        self._recomputes = spec.algo.name in (Algo.standard, Algo.decoupled)
        normalises = self._rules.weight is not None and self._rules.weight.batch_normalize
        # A current/rollout correction is known only at the forward; these two need all of it before any backward.
        self._needs_whole = not self._recomputes and (normalises or spec.loss.denominator is Denominator.kept)

    # -- scoring and correcting ------------------------------------------------------------------------------------

    def _logp(self, batch: Batch, rows: Sequence[int], *, reference: bool = False) -> Tensor:
        """Log-probs of the tokens of ``rows`` without gradient, float32; NaN elsewhere."""
        logp_N = torch.full((batch.tokens,), math.nan)
        score = self._policy.score_reference if reference else self._policy.score
        with torch.no_grad():
            for cut in microbatches(batch, rows, self._spec.optim.microbatch_tokens):
                scores = score(batch.select(cut), temperature=self._spec.rollout.temperature)
                logp_N[batch.positions_of(cut)] = scores.logp_N.cpu()
        return logp_N

    def _forward(self, batch: Batch) -> Scores:
        return self._policy.score(batch, temperature=self._spec.rollout.temperature, grad=True, entropy=True)

    def _correct(self, part: Scored, numerator_N: Tensor, tally: Tally | None) -> Scored:
        """Apply the correction with this numerator (metrics_only: measure, apply nothing)."""
        batch, rules = part.batch, self._rules
        correction = correct(
            numerator_N,
            batch.rollout_logp_N,
            part.valid_N,
            batch.length_B,
            weight=rules.weight,
            reject=rules.reject,
            veto=rules.veto,
            row_N=batch.row_N,
        )
        if tally is not None:
            tally.add_correction(correction)
        return part if self._spec.algo.metrics_only else part.with_correction(correction)

    def _score(self, batch: Batch, advantage_B: Tensor, dropped_B: Tensor, clock: Clock) -> Scored:
        """Everything that is fixed before the first update."""
        optim = self._spec.optim
        valid_N = batch.mask_N & ~dropped_B[batch.row_N]
        rows = rows_with(valid_N, batch)
        first, proximal_N, reference_N = None, None, None
        if self._recomputes:
            one_update = optim.epochs * optim.minibatches == 1 and len(rows) == batch.rows
            if one_update and len(microbatches(batch, rows, optim.microbatch_tokens)) == 1:
                # The only update's only forward is made with the proximal weights: one pass serves as both.
                with clock("forward"):
                    first = self._forward(batch)
                    proximal_N = first.logp_N.detach().cpu()
            else:
                with clock("proximal"):
                    proximal_N = self._logp(batch, rows)
        if self._spec.loss.kl_coef != 0.0:
            with clock("reference"):
                reference_N = self._logp(batch, rows, reference=True)
        return fresh(batch, valid_N, advantage_B.float()[batch.row_N], proximal_N, reference_N, first)

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def _with_coefficients(self, part: Scored) -> Scored:
        """Denominators of the policy term, and of the KL and entropy terms, from the whole minibatch."""
        loss, batch = self._spec.loss, part.batch
        constant = float(loss.sum_constant if loss.sum_constant is not None else self._spec.rollout.max_tokens)

        def of(counted_N: Tensor) -> Tensor:
            return coefficients(counted_N, batch.row_N, batch.rows, aggregate=loss.aggregate, constant=constant).float()

        all_N = of(part.valid_N)
        match loss.denominator:
            case Denominator.all:
                return part.with_coefficients(all_N, all_N)
            case Denominator.kept:
                kept_N = of(part.valid_N & part.keep_N)
                return part.with_coefficients(kept_N, kept_N if loss.reject_terms is RejectTerms.all else all_N)

    def _anchor(self, part: Scored, current_N: Tensor) -> Tensor:
        """Denominator of the PPO ratio; a token without a rollout log-prob counts as on-policy."""
        if part.proximal_N is not None:
            return part.proximal_N
        rollout_N = part.batch.rollout_logp_N
        return torch.where(rollout_N.isnan(), current_N.detach(), rollout_N)

    def _surrogate(self, part: Scored, current_N: Tensor, log_ratio_N: Tensor) -> Surrogate:
        loss = self._spec.loss
        match self._spec.algo.name:
            case Algo.standard | Algo.decoupled | Algo.bypass:
                return ppo_clip(
                    log_ratio_N,
                    part.advantage_N,
                    clip_low=loss.clip_low,
                    clip_high=loss.clip_high,
                    dual_clip=loss.dual_clip,
                )
            case Algo.reinforce:
                return reinforce(current_N, part.advantage_N)

    def _loss(self, part: Scored, scores: Scores, current_N: Tensor, means: Means) -> Loss:
        """Loss of one micro-batch; inputs at invalid positions are replaced before anything is computed from them."""
        valid_N = part.valid_N
        log_ratio_N = torch.where(valid_N, current_N - self._anchor(part, current_N), 0.0)
        surrogate = self._surrogate(part, current_N, log_ratio_N)
        entropy_N = None if scores.entropy_N is None else torch.where(valid_N, scores.entropy_N.cpu(), 0.0)
        means.add("train/clip_fraction_low", surrogate.clipped_low_N, valid_N)
        means.add("train/clip_fraction_high", surrogate.clipped_high_N, valid_N)
        means.add("train/dual_clip_fraction", surrogate.dual_clipped_N, valid_N)
        means.add("train/ppo_kl", -log_ratio_N, valid_N & log_ratio_N.isfinite())
        if part.proximal_N is not None:
            means.add("train/ois", log_ratio_N.double().exp(), valid_N)
        if entropy_N is not None:
            means.add("train/entropy", entropy_N, valid_N)
        terms = Terms(
            surrogate,
            part.weight_N,
            part.keep_N,
            valid_N,
            part.policy_coefficient_N,
            part.term_coefficient_N,
        )
        return combine(
            terms,
            self._spec.loss,
            current_N=current_N,
            reference_N=None if part.reference_N is None else torch.where(valid_N, part.reference_N, 0.0),
            rollout_N=part.batch.rollout_logp_N,
            entropy_N=entropy_N,
        )

    def _update(self, scored: Scored, rows: Sequence[int], measured: Tally | None, tally: Tally, clock: Clock) -> None:
        """Forward, backward, clip and step over ``rows``; ``measured`` collects the correction's statistics or not."""
        part = scored.select(rows)
        if self._needs_whole:
            with clock("proximal"):
                current_N = self._logp(part.batch, rows_with(part.valid_N, part.batch))
            part = self._correct(part, current_N, measured)
        with clock("loss"):
            part = self._with_coefficients(part)
        total = kept = policy = kl = 0.0
        for cut in microbatches(part.batch, rows_with(part.valid_N, part.batch), self._spec.optim.microbatch_tokens):
            micro = part.select(cut)
            with clock("forward"):
                scores = micro.first if micro.first is not None else self._forward(micro.batch)
            with clock("loss"):
                current_N = torch.where(micro.valid_N, scores.logp_N.cpu(), 0.0)
                if not self._recomputes and not self._needs_whole:
                    micro = self._correct(micro, current_N.detach(), measured)
                loss = self._loss(micro, scores, current_N, tally.means)
                total += float(loss.total.detach())
                policy, kl = policy + float(loss.policy), kl + float(loss.kl)
                kept += int((micro.keep_N & micro.valid_N).sum())
            with clock("backward"):
                loss.total.backward()
        tally.means.add_sum("train/pg_loss", policy, 1)
        if self._spec.loss.kl_coef != 0.0:
            tally.means.add_sum("train/kl_loss", kl, 1)
        with clock("optimizer"):
            self._apply(total, kept, tally)

    def _apply(self, loss: float, kept: float, tally: Tally) -> None:
        if kept == 0:
            self._optimizer.discard()
            tally.all_rejected += 1
            return
        tally.losses.append(loss)
        norm = self._optimizer.step() if math.isfinite(loss) else None
        if norm is None:
            self._optimizer.discard()
            tally.nonfinite += 1
            return
        tally.means.add_sum("train/grad_norm", norm, 1)
        tally.applied += 1

    # -- the whole step --------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch, advantage_B: Tensor, dropped_B: Tensor, step: int, clock: Clock) -> Outcome:
        """Train on one batch. ``dropped_B`` rows (groups of equal reward, by option) take no part at all."""
        optim, tally = self._spec.optim, Tally()
        lr = self._optimizer.lr
        scored = self._score(batch, advantage_B, dropped_B, clock)
        if scored.proximal_N is not None:
            with clock("correction"):
                if bool(scored.proximal_N[scored.valid_N].isnan().any()):
                    return Outcome(0, 1, 0, {"train/loss": math.nan, "train/lr": lr})
                scored = self._correct(scored, scored.proximal_N, tally)
        rows = list(range(batch.rows))
        for epoch in range(optim.epochs):
            for part in minibatches(rows, optim.minibatches, derive(self._spec.seed, "minibatch", step, epoch)):
                self._update(scored, part, tally if epoch == 0 else None, tally, clock)
        metrics = tally.means.as_dict() | {"train/lr": lr}
        metrics["train/loss"] = sum(tally.losses) / max(len(tally.losses), 1)
        if tally.correction is not None:
            metrics |= {f"train/{name}": value for name, value in tally.correction.as_dict().items()}
        return Outcome(tally.applied, tally.nonfinite, tally.all_rejected, metrics, scored.proximal_N)
