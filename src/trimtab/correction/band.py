"""Where values stand to a pair of bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from trimtab.correction.level import level_ratio
from trimtab.correction.log_ratio import LogRatio
from trimtab.errors import ConfigError
from trimtab.spec import Level


@dataclass(frozen=True)
class Band:
    """Values (L: M tokens or B rows, unclamped) against lower and upper; each answer is computed when asked for.

    ``exempt_L`` (a missing token, a row that a rule does not look at) is inside whatever the bounds, otherwise
    ``infinite_L`` is never inside. ``lowest_L``: where a row's tokens have a value each, the smallest; ``value_L`` is
    then the largest.
    """

    value_L: Tensor
    lower: float
    upper: float
    exempt_L: Tensor | None
    infinite_L: Tensor | None
    lowest_L: Tensor | None = None

    @property
    def _low_end_L(self) -> Tensor:
        return self.value_L if self.lowest_L is None else self.lowest_L

    @cached_property
    def inside_L(self) -> Tensor:
        """lower <= value <= upper, both inclusive."""
        inside_L = (self._low_end_L >= self.lower) & (self.value_L <= self.upper)
        if self.infinite_L is not None:
            inside_L &= ~self.infinite_L
        return inside_L if self.exempt_L is None else inside_L | self.exempt_L

    @cached_property
    def low_L(self) -> Tensor:
        """value < lower."""
        return self._judged(self._low_end_L < self.lower)

    @cached_property
    def high_L(self) -> Tensor:
        """value > upper."""
        return self._judged(self.value_L > self.upper)

    def _judged(self, flag_L: Tensor) -> Tensor:
        return flag_L if self.exempt_L is None else flag_L & ~self.exempt_L


def band(given: LogRatio, level: Level, lower: float, upper: float) -> Band:
    """The ratios of ``level`` against bounds; compared as the weights the caller gets (see ``level_ratio``)."""
    token = level is Level.token
    return Band(
        value_L=level_ratio(given, level),
        lower=lower,
        upper=upper,
        exempt_L=given.missing_M if token else None,
        infinite_L=given.infinite_M if token else given.infinite_B,
    )


def check_bounds(stage: str, lower: float, upper: float) -> None:
    """Raise ConfigError unless 0 <= lower <= upper and upper > 0."""
    if not (0 <= lower <= upper and upper > 0):
        raise ConfigError(
            f"mis.{stage}_lower_bound={lower:g} and mis.{stage}_upper_bound={upper:g}: bounds on a ratio of "
            f"probabilities need 0 <= lower <= upper; for example mis.{stage}_upper_bound=2.0"
        )
