"""What a run sees of its gap that skips the proximal forward: a few responses scored before the first update."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trimtab.batch import Batch
from trimtab.method import recomputes
from trimtab.protocol import Policy
from trimtab.spec import MethodSpec, RunSpec
from trimtab.train.alarms import gap_of
from trimtab.train.plan import microbatches, rows_with
from trimtab.train.scored import blank


class ProximalProbe:
    """Every ``rollout.probe_every`` steps, and in the first, scores ``rollout.probe_sequences`` responses.

    Only where the algorithm takes no forward for the proximal policy (bypass, on_policy, a log-linear one). The forward
    is timed, which gives what the skipped one would have cost.
    """

    def __init__(self, policy: Policy, spec: RunSpec) -> None:
        self._policy, self._spec = policy, spec
        self._on = spec.rollout.probe_every > 0 and not recomputes(MethodSpec(spec.algo, spec.mis, spec.loss))
        self._seconds_per_id: float | None = None

    def __call__(self, step: int, batch: Batch, valid_N: Tensor) -> dict[str, float]:
        """Gap between proximal and rollout policy on the probed responses; {} in other steps."""
        rows = rows_with(valid_N, batch)
        if not self._on or not rows or (step != 1 and step % self._spec.rollout.probe_every):
            return {}
        count = min(self._spec.rollout.probe_sequences, len(rows))
        rows = [rows[i * len(rows) // count] for i in range(count)]  # spread over the prompts
        begin = time.perf_counter()
        logp_N = self._score(batch, rows)
        self._seconds_per_id = (time.perf_counter() - begin) / ids_in(batch, rows)
        return figures(logp_N, batch.rollout_logp_N, valid_N)

    def _score(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        logp_N = blank(batch.tokens)
        with torch.no_grad():
            for cut in microbatches(batch, rows, self._spec.optim.microbatch_tokens):
                scores = self._policy.score(batch.select(cut), temperature=self._spec.rollout.temperature)
                logp_N[batch.positions_of(cut)] = scores.logp_N.cpu()
        return logp_N

    def saved(self, batch: Batch, valid_N: Tensor, timing: Mapping[str, float]) -> dict[str, float]:
        """``time/proximal_saved``: seconds that a proximal forward of the batch would have taken.

        The probe's seconds per id times the batch's ids, but no more than one pass of the training forward took, as a
        few short rows are scored less efficiently than many. 0 where one pass would have served as both.
        """
        if self._seconds_per_id is None:
            return {}
        optim, rows = self._spec.optim, rows_with(valid_N, batch)
        passes = optim.epochs * optim.minibatches
        if passes == 1 and len(rows) == batch.rows and len(microbatches(batch, rows, optim.microbatch_tokens)) == 1:
            return {"time/proximal_saved": 0.0}
        estimate = self._seconds_per_id * ids_in(batch, rows)
        return {"time/proximal_saved": min(estimate, timing.get("time/forward", math.inf) / optim.epochs)}


def ids_in(batch: Batch, rows: Sequence[int]) -> int:
    """Prompt and response tokens of ``rows``."""
    return sum(int(batch.ids_B[row].numel()) for row in rows)


def figures(trainer_N: Tensor, rollout_N: Tensor, valid_N: Tensor) -> dict[str, float]:
    """k3 and mean |d| over the tokens with a finite d, the share of |Δp| > 0.1, and how many tokens; {} for none.

    d = log p_proximal - log p_rollout, nats. Means are over all tokens; the exponent is clamped as metrics' are.
    """
    gap = gap_of(trainer_N, rollout_N, valid_N)
    d_N = (trainer_N.double() - rollout_N.double())[valid_N]
    d_N = d_N[d_N.isfinite()]
    if not gap.tokens or not d_N.numel():
        return {}
    return {
        "train/probe_proximal_k3_kl": float((d_N.clamp(max=600).exp() - 1 - d_N).mean()),
        "train/probe_proximal_abs_diff": float(d_N.abs().mean()),
        "train/probe_proximal_prob_diff_share": gap.far / gap.tokens,
        "train/probe_proximal_tokens": gap.tokens,
    }
