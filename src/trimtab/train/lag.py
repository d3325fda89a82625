"""How old the tokens of a batch are, and what PipelineRL logs of an asynchronous step."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.batch import Batch
from trimtab.peers.pipelinerl import Options, PolicyLoss, ratio_metrics
from trimtab.spec import LossName, LossSpec, RatioLevel


def lag_metrics(lag_N: Tensor) -> dict[str, float]:
    """Mean and largest lag of the tokens, in policy versions, and the share of those that lag at all; 0 for none."""
    if lag_N.numel() == 0:
        return {"train/lag": 0.0, "train/lag_max": 0.0, "train/lag_share": 0.0}
    return {
        "train/lag": float(lag_N.double().mean()),
        "train/lag_max": float(lag_N.max()),
        "train/lag_share": float((lag_N > 0).double().mean()),
    }


def pipelinerl(batch: Batch, valid_N: Tensor, current_N: Tensor, lag_N: Tensor, loss: LossSpec) -> dict[str, float]:
    """PipelineRL's figures of current/rollout (new/old), over the tokens that both sides scored; {} without any.

    ``current_N``: the trainer's log-probs at each token's first forward, nats. Means are of rows' means over the rows;
    ess is (Σr)²/Σr²/tokens; lag is the rows' oldest token's, in samples: versions times the rows of a batch.
    """
    valid_N = valid_N & current_N.isfinite() & batch.rollout_logp_N.isfinite()
    found = ratio_metrics(
        current_N=current_N.double(),
        rollout_N=batch.rollout_logp_N.double(),
        valid_N=valid_N,
        row_N=batch.row_N,
        length_B=batch.length_B,
        options=_options(loss),
    )
    if not found:
        return {}
    means = ("kl_new_old", "ratio_new_old", "clamp_log_ratio_new_old_indicator")
    oldest_B = torch.zeros(batch.rows, dtype=lag_N.dtype).scatter_reduce_(0, batch.row_N, lag_N, "amax")
    figures = {name: found[name] / batch.rows for name in means}
    figures |= {"ess": found["rl/ess"], "lag": float(oldest_B.double().mean()) * batch.rows}
    return {f"pipelinerl/{name}": value for name, value in figures.items()}


def _options(loss: LossSpec) -> Options:
    """The clip that the indicator is of: the run's own, in the form of the PipelineRL loss that is nearest."""
    kind = PolicyLoss.ppo
    if loss.ratio_level is not RatioLevel.token:
        kind = PolicyLoss.gspo
    elif loss.name is LossName.reinforce:
        kind = PolicyLoss.reinforce
    return Options(policy_loss=kind, epsilon_low=loss.clip_low, epsilon_high=loss.clip_high)
