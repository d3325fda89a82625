"""NeMo-RL's ratios that overflow, in every shape of its loss: cases made by a restatement of that loss in torch.

``replay`` checks both sides: that the case holds what docs/differences.md says of NeMo-RL, and that trimtab saturates.
"""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import replay
import torch
from adapt.shared import Case
from torch import Tensor

CASES = {case.name: case for case in replay.cases(Path(__file__).parent)}
BASE = CASES["nemo_rl/gspo_seqlevel_is_ragged"].data
ANCHOR = "a-ratio-that-overflows"
GUARDS = "guards-in-denominators"

CURRENT = [[-1.0, -1.2, -0.7], [-1.0, -1.1, -2.0]]
PROXIMAL = [[-1.1, -1.0, -0.8], [-1.0, -1.0, -1.9]]
REFERENCE = [[-1.4, -0.9, -0.8], [-2.0, -1.0, -1.5]]
MASK = [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
ADVANTAGES = [[-1.0] * 3, [0.5] * 3]


def zeroed(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def kl_term(config: dict[str, Any], th: Tensor, reference: Tensor, gen: Tensor) -> Tensor:
    if not config["reference_policy_kl_penalty"]:
        return torch.zeros_like(th)
    x = (th - reference).clamp(-config["kl_input_clamp_value"], config["kl_input_clamp_value"])
    k = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() - 1 + x}[config["reference_policy_kl_type"]]
    weight = zeroed((th - gen).exp()) if config["use_on_policy_kl_approximation"] else (th - th.detach()).exp()
    ceiling = config["kl_output_clamp_value"]
    return config["reference_policy_kl_penalty"] * (weight * k).clamp(-ceiling, ceiling)


def truncated(config: dict[str, Any], d: Tensor, mask: Tensor) -> Tensor:
    if not config["use_importance_sampling_correction"]:
        return torch.ones_like(d)
    by_row = config["sequence_level_importance_ratios"]
    w = zeroed(((d * mask).sum(-1, keepdim=True) if by_row else d).exp()).expand_as(d)
    low, high = config["truncated_importance_sampling_ratio_min"] or 0.0, config["truncated_importance_sampling_ratio"]
    match config["truncated_importance_sampling_type"]:
        case "tis":
            return w.clamp(low, high)
        case "icepop":
            return torch.where((w >= low) & (w <= high), w, 0.0)
        case "seq-mask-tis":
            g = ((zeroed(d) * mask).sum(-1, keepdim=True) / (mask.sum(-1, keepdim=True) + 1e-8)).exp()
            return torch.where((g >= low) & (g <= high), w, 0.0)
    return w


def made(options: dict[str, Any], gen: list[list[float]], dtype: torch.dtype) -> Case:
    """What NeMo-RL gives, as a golden case."""
    config = BASE["config"] | {"reference_policy_kl_penalty": 0.0} | options
    th, old, ref, rollout, mask, advantages = (
        torch.tensor(x, dtype=dtype) for x in (CURRENT, PROXIMAL, REFERENCE, gen, MASK, ADVANTAGES)
    )
    th.requires_grad_()
    x, tokens = th - old, mask.sum(-1, keepdim=True) + 1e-8
    if config["sequence_level_importance_ratios"]:
        x = ((x * mask).sum(-1, keepdim=True) / tokens).expand_as(x)
    bounded = x.exp().clamp(1 - config["ratio_clip_min"], 1 + config["ratio_clip_max"])
    policy = torch.maximum(-advantages * x.exp(), -advantages * bounded) * truncated(config, old - rollout, mask)
    each = torch.where(mask > 0, policy + kl_term(config, th, ref, rollout), 0.0)
    by_token = config["token_level_loss"]
    loss = each.sum() / (mask.sum() + 1e-8) if by_token else (each.sum(-1, keepdim=True) / tokens).sum() / (2 + 1e-8)
    (gradient,) = torch.autograd.grad(loss, th)
    data = copy.deepcopy(dict(BASE)) | {"config": config, "dtype": str(dtype).removeprefix("torch."), "case": "made"}
    data["inputs"] |= {
        "curr_logprobs": th.tolist(), "prev_logprobs": old.tolist(), "generation_logprobs": spelt(rollout.tolist()),
        "reference_policy_logprobs": ref.tolist(), "token_mask": MASK, "sample_mask": [1.0, 1.0],
        "advantages": ADVANTAGES, "global_valid_toks": 5, "global_valid_seqs": 2, "rewards": None,
    }  # fmt: skip
    data["outputs"] = {"loss": float(loss.detach()), "grad_curr_logprobs": gradient.tolist(), "metrics": {}}
    return Case(data)


def spelt(rows: list[list[float]]) -> list[list[Any]]:
    return [[x if math.isfinite(x) else str(x) for x in row] for row in rows]


SHAPES = [
    {"token_level_loss": False, "sequence_level_importance_ratios": True},
    {"token_level_loss": True, "sequence_level_importance_ratios": False},
    {"token_level_loss": False, "sequence_level_importance_ratios": False},
]
KINDS = [(None, None, None), ("tis", 2.0, None), ("tis", 2.0, 0.5), ("icepop", 2.0, 0.5), ("seq-mask-tis", 1e30, 0.5)]
KLS: list[dict[str, Any]] = [
    {},
    {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k3"},
    {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2", "use_on_policy_kl_approximation": True},
    {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1", "use_on_policy_kl_approximation": True},
]
PARTS = ("type", "ratio", "ratio_min")
TOKEN = {torch.float32: -97.0, torch.float64: -800.0}
EARLY = {torch.float32: -86.0, torch.float64: -705.0}  # trimtab's have saturated, theirs not yet overflown
PRODUCT = {torch.float32: -50.0, torch.float64: -400.0}


@pytest.mark.parametrize("dtype", TOKEN)
@pytest.mark.parametrize("kl", range(len(KLS)))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[2]}")
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_every_shape(shape: int, kind: tuple[Any, Any, Any], kl: int, dtype: torch.dtype) -> None:
    """An overflowing token, a product that alone overflows, and an infinite one."""
    if kind[0] == "seq-mask-tis" and SHAPES[shape]["sequence_level_importance_ratios"]:
        return
    options = SHAPES[shape] | KLS[kl] | {"use_importance_sampling_correction": True}
    options |= {f"truncated_importance_sampling_{key}": x for key, x in zip(PARTS, kind, strict=True)}
    token, both = TOKEN[dtype], PRODUCT[dtype]
    for first in ([token, -1.0], [both, both], [-math.inf, -1.0], [EARLY[dtype], -1.0]):
        outcome = replay.replay(made(options, [[*first, -1.0], [-1.2, -1.0, -1.1]], dtype))
        assert outcome.faults == (), first
        assert set(outcome.anchors) <= {ANCHOR, GUARDS}


def test_it_is_named_where_the_product_alone_overflows() -> None:
    options = SHAPES[0] | {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": None}
    assert replay.replay(made(options, [[-50.0, -50.0, -1.0], [-1.2, -1.0, -1.1]], torch.float32)).anchors == (ANCHOR,)


def test_a_missing_rollout_log_prob_weighs_1_here_and_0_there() -> None:
    for shape, kind in itertools.product(SHAPES, KINDS[:3]):
        options = shape | {"use_importance_sampling_correction": True}
        options |= {f"truncated_importance_sampling_{key}": x for key, x in zip(PARTS, kind, strict=True)}
        outcome = replay.replay(made(options, [[math.nan, -1.0, -1.0], [-1.2, -1.0, -1.1]], torch.float64))
        assert outcome.faults == (), options
        assert ANCHOR in outcome.anchors


def test_what_it_claims_of_nemo_rl_is_checked() -> None:
    options = SHAPES[1] | {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": None}
    case = made(options, [[-97.0, -1.0, -1.0], [-1.2, -1.0, -1.1]], torch.float32)
    case.data["outputs"]["loss"] *= 1.001
    assert "not what docs/differences.md describes" in replay.replay(case).faults[0]
