"""What a built-in problem is made from. Nothing here imports torch: the command's help reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Gap(Enum):
    """How the rollout policy differs from the proximal one; members are named as users type them."""

    none = "none"
    logit_noise = "logit_noise"
    temperature = "temperature"
    truncation = "truncation"
    staleness = "staleness"
    quantised = "quantised"


STRENGTH = {
    Gap.none: 0.0,
    Gap.logit_noise: 0.5,
    Gap.temperature: 0.5,
    Gap.truncation: 0.1,
    Gap.staleness: 8.0,
    Gap.quantised: 1.0,
}
MEANING = {
    Gap.none: "not used",
    Gap.logit_noise: "standard deviation of the noise on each rollout logit",
    Gap.temperature: "the rollout samples at temperature 1 / (1 + strength)",
    Gap.truncation: "the rollout keeps the likeliest symbols of mass 1 - strength (top-p) and renormalises",
    Gap.staleness: "the proximal policy is the rollout's after four exact-gradient steps of strength / 4",
    Gap.quantised: "grid that the rollout's logits are rounded to",
}


@dataclass(frozen=True)
class Recipe:
    """A built-in problem. ``strength`` None: the mismatch's own (STRENGTH); see MEANING."""

    symbols: int = 3
    length: int = 4
    eos: int | None = 0
    prompts: int = 2
    mismatch: Gap = Gap.logit_noise
    strength: float | None = None
    seed: int = 0
