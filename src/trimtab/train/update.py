"""One rollout batch: score, correct, and take the optimiser steps. Branches on ``algo`` are explicit and here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.batch import Batch, Scores
from trimtab.correction import Correction, CorrectionStats, measure
from trimtab.method import (
    Inputs,
    Result,
    apply_stage,
    denominators,
    loss_of,
    needs_reference,
    needs_whole,
    recomputes,
    stages,
    with_top,
)
from trimtab.protocol import Policy
from trimtab.spec import MethodSpec, RunSpec
from trimtab.train.clock import Clock
from trimtab.train.means import Means
from trimtab.train.optim import Optimizer
from trimtab.train.plan import microbatches, minibatches, rows_with
from trimtab.train.scored import Scored, blank, fresh
from trimtab.train.seeds import derive


@dataclass(frozen=True)
class Outcome:
    """What became of a batch: optimiser steps applied, left out as non-finite, left out as fully rejected.

    ``first_N``: the trainer's log-probs of each token at its first forward, NaN at tokens that took no part; those of
    the proximal policy where the algorithm recomputes it (``recomputed``) or takes one update a batch.
    """

    applied: int
    nonfinite: int
    all_rejected: int
    metrics: dict[str, float]
    first_N: Tensor
    recomputed: bool


class Tally:
    """What the updates of one batch add up to."""

    def __init__(self) -> None:
        self.means = Means()
        self.correction: CorrectionStats | None = None
        self.applied = self.nonfinite = self.all_rejected = 0
        self.losses: list[float] = []
        self.weighted_reward = self.reward_weight = 0.0

    def add_correction(self, correction: Correction) -> None:
        stats = measure(correction)
        self.correction = stats if self.correction is None else self.correction.merge(stats)

    def add_rewards(self, part: Scored) -> None:
        """Rewards by the weight that the correction leaves a row: the mean of weight times keep over its tokens."""
        applied_N = torch.where(part.valid_N & part.applied.keep_N, part.applied.weight_N.double(), 0.0)
        none_B = torch.zeros(part.batch.rows, dtype=torch.float64)
        count_B = none_B.index_add(0, part.batch.row_N, part.valid_N.double()).clamp(min=1)
        weight_B = none_B.index_add(0, part.batch.row_N, applied_N) / count_B
        self.weighted_reward += float((weight_B * part.batch.reward_B.double()).sum())
        self.reward_weight += float(weight_B.sum())


class Updater:
    """Takes a packed batch and its advantages through one training step."""

    def __init__(self, policy: Policy, optimizer: Optimizer, spec: RunSpec) -> None:
        self._policy, self._optimizer, self._spec = policy, optimizer, spec
        self._method = method = MethodSpec(spec.algo, spec.mis, spec.loss)
        self._stages = stages(method)
        self._recomputes = recomputes(method)
        self._needs_whole = needs_whole(method)

    # -- scoring and correcting ------------------------------------------------------------------------------------

    def _scores(self, batch: Batch, rows: Sequence[int], *, entropy: bool = False) -> Scores:
        """Log-probs, and entropies if asked, of the tokens of ``rows`` without gradient, float32; NaN elsewhere."""
        logp_N, entropy_N = blank(batch.tokens), blank(batch.tokens) if entropy else None
        with torch.no_grad():
            for cut in microbatches(batch, rows, self._spec.optim.microbatch_tokens):
                at = batch.positions_of(cut)
                scores = self._policy.score(
                    batch.select(cut), temperature=self._spec.rollout.temperature, entropy=entropy
                )
                logp_N[at] = scores.logp_N.cpu()
                if entropy_N is not None and scores.entropy_N is not None:
                    entropy_N[at] = scores.entropy_N.cpu()
        return Scores(logp_N, entropy_N)

    def _reference(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """The reference's log-probs of the tokens of ``rows``, float32; NaN elsewhere."""
        logp_N = blank(batch.tokens)
        with torch.no_grad():
            for cut in microbatches(batch, rows, self._spec.optim.microbatch_tokens):
                scores = self._policy.score_reference(batch.select(cut), temperature=self._spec.rollout.temperature)
                logp_N[batch.positions_of(cut)] = scores.logp_N.cpu()
        return logp_N

    def _forward(self, batch: Batch) -> Scores:
        return self._policy.score(batch, temperature=self._spec.rollout.temperature, grad=True, entropy=True)

    def _correct(self, part: Scored, inputs: Inputs, moving: bool, tally: Tally | None) -> Scored:
        """Apply the fixed or the moving stages (metrics_only: measure, apply nothing)."""
        applied = part.applied
        for stage in self._stages:
            if stage.moving is not moving:
                continue
            correction = apply_stage(stage, inputs)
            if tally is not None and stage is self._stages[0]:
                tally.add_correction(correction)
            applied = applied.then(correction, measured_only=self._spec.algo.metrics_only)
        return replace(part, applied=applied)

    def _score(self, batch: Batch, advantage_B: Tensor, dropped_B: Tensor, lag_N: Tensor, clock: Clock) -> Scored:
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
                    proximal_N = self._scores(batch, rows).logp_N
        if needs_reference(self._spec.loss):
            with clock("reference"):
                reference_N = self._reference(batch, rows)
        return fresh(batch, valid_N, advantage_B.float(), lag_N, proximal_N, reference_N, first)

    # -- one optimiser step ------------------------------------------------------------------------------------------

    def _loss(self, part: Scored, inputs: Inputs, means: Means) -> Result:
        """Loss of one micro-batch, and the means of what happens to its tokens."""
        assert part.coefficients is not None
        result, valid_N = loss_of(self._method, inputs, part.applied, part.coefficients), part.valid_N
        surrogate, x_N = result.surrogate, result.log_ratio_N
        means.add("train/clip_fraction_low", surrogate.clipped_low_N, valid_N)
        means.add("train/clip_fraction_high", surrogate.clipped_high_N, valid_N)
        means.add("train/dual_clip_fraction", surrogate.dual_clipped_N, valid_N)
        means.add("train/kept_fraction", part.applied.keep_N.double(), valid_N)
        means.add("train/ppo_kl", -x_N, valid_N & x_N.isfinite())
        if self._recomputes:
            means.add("train/ois", x_N.double().exp(), valid_N)
        if inputs.entropy_N is not None:
            means.add("train/entropy", inputs.entropy_N, valid_N)
        return result

    def _update(self, scored: Scored, rows: Sequence[int], first_N: Tensor | None, tally: Tally, clock: Clock) -> None:
        """Forward, backward, clip and step over ``rows``. ``first_N``: where log-probs of a first pass are written to;
        such a pass is also the one that the correction's statistics are of."""
        part, measured = scored.select(rows), None if first_N is None else tally
        if self._needs_whole:
            with clock("proximal"):
                scores = self._scores(part.batch, rows_with(part.valid_N, part.batch), entropy=True)
            inputs = part.inputs(scores.logp_N, scores.entropy_N)
            part = self._correct(part, inputs, True, measured)
            part = replace(part, applied=with_top(self._method, inputs, part.applied))
        with clock("loss"):
            unscored = part.inputs(blank(part.batch.tokens))
            part = replace(part, coefficients=denominators(self._spec.loss, unscored, part.applied.keep_N))
        total = kept = policy = kl = pull = nll = 0.0
        positions = scored.batch.positions_of(rows) if first_N is not None else None
        for cut in microbatches(part.batch, rows_with(part.valid_N, part.batch), self._spec.optim.microbatch_tokens):
            micro = part.select(cut)
            with clock("forward"):
                scores = micro.first if micro.first is not None else self._forward(micro.batch)
            with clock("loss"):
                inputs = micro.inputs(scores.logp_N.cpu(), None if scores.entropy_N is None else scores.entropy_N.cpu())
                if first_N is not None and positions is not None:
                    first_N[positions[part.batch.positions_of(cut)]] = inputs.current_N.detach()
                if not self._needs_whole:
                    micro = self._correct(micro, inputs, True, measured)
                if measured is not None:
                    measured.add_rewards(micro)
                loss = self._loss(micro, inputs, tally.means).loss
                total += float(loss.total.detach())
                policy, kl = policy + float(loss.policy), kl + float(loss.kl)
                pull, nll = pull + float(loss.pull), nll + float(loss.nll)
                kept += int((micro.applied.keep_N & micro.valid_N).sum())
            with clock("backward"):
                loss.total.backward()
        tally.means.add_sum("train/pg_loss", policy, 1)
        if self._spec.loss.kl_coef != 0.0:
            tally.means.add_sum("train/kl_loss", kl, 1)
        if self._spec.loss.log_ratio_penalty != 0.0:
            tally.means.add_sum("train/log_ratio_penalty", pull, 1)
        if self._spec.loss.positive_nll_coef != 0.0:
            tally.means.add_sum("train/positive_nll", nll, 1)
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

    def __call__(
        self, batch: Batch, advantage_B: Tensor, dropped_B: Tensor, lag_N: Tensor, step: int, clock: Clock
    ) -> Outcome:
        """Train on one batch. ``dropped_B`` rows (equal groups, overlong ones, by option) take no part at all;
        ``lag_N``: updates between the policy that sampled a token and the weights as they stand."""
        optim, tally = self._spec.optim, Tally()
        lr = self._optimizer.lr
        scored = self._score(batch, advantage_B, dropped_B, lag_N, clock)
        proximal_N = scored.proximal_N
        if proximal_N is not None:
            with clock("correction"):
                if bool(proximal_N[scored.valid_N].isnan().any()):
                    return Outcome(0, 1, 0, {"train/loss": math.nan, "train/lr": lr}, proximal_N, True)
                scored = self._correct(scored, scored.inputs(proximal_N), False, tally)
        rows, first_N = list(range(batch.rows)), blank(batch.tokens)
        for epoch in range(optim.epochs):
            for part in minibatches(rows, optim.minibatches, derive(self._spec.seed, "minibatch", step, epoch)):
                self._update(scored, part, first_N if epoch == 0 else None, tally, clock)
        metrics = tally.means.as_dict() | {"train/lr": lr}
        metrics["train/loss"] = sum(tally.losses) / max(len(tally.losses), 1)
        metrics["train/reward_weighted"] = tally.weighted_reward / (tally.reward_weight or 1.0)
        if tally.correction is not None:
            metrics |= {f"train/{name}": value for name, value in tally.correction.as_dict().items()}
        first_N, recomputed = (first_N, False) if proximal_N is None else (proximal_N, True)
        return Outcome(tally.applied, tally.nonfinite, tally.all_rejected, metrics, first_N, recomputed)
