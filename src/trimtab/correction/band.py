"""Where ratios stand to a pair of bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from trimtab.correction.level import level_log_ratio, level_ratio
from trimtab.correction.log_ratio import LogRatio
from trimtab.errors import ConfigError
from trimtab.spec import Level


@dataclass(frozen=True)
class Band:
    """Ratios (L: M tokens or B rows, unclamped) against lower and upper; each answer is computed when asked for.

    A missing token is inside whatever the bounds, an infinite log-ratio is never inside.
    """

    ratio_L: Tensor
    lower: float
    upper: float
    missing_L: Tensor | None
    infinite_L: Tensor | None

    @cached_property
    def inside_L(self) -> Tensor:
        """lower <= ratio <= upper, both inclusive."""
        inside_L = (self.ratio_L >= self.lower) & (self.ratio_L <= self.upper)
        if self.infinite_L is not None:
            inside_L &= ~self.infinite_L
        return inside_L if self.missing_L is None else inside_L | self.missing_L

    @cached_property
    def low_L(self) -> Tensor:
        """ratio < lower."""
        return self._known(self.ratio_L < self.lower)

    @cached_property
    def high_L(self) -> Tensor:
        """ratio > upper."""
        return self._known(self.ratio_L > self.upper)

    def _known(self, flag_L: Tensor) -> Tensor:
        return flag_L if self.missing_L is None else flag_L & ~self.missing_L


def band(given: LogRatio, level: Level, lower: float, upper: float) -> Band:
    """The ratios of ``level`` against bounds; compared as the weights the caller gets (see ``level_ratio``)."""
    return Band(
        ratio_L=level_ratio(given, level),
        lower=lower,
        upper=upper,
        missing_L=given.missing_M if level is Level.token else None,
        infinite_L=None if given.infinite_M is None else level_log_ratio(given, level).isinf(),
    )


def check_bounds(stage: str, lower: float, upper: float) -> None:
    """Raise ConfigError unless 0 <= lower <= upper and upper > 0."""
    if not (0 <= lower <= upper and upper > 0):
        raise ConfigError(
            f"mis.{stage}_lower_bound={lower:g} and mis.{stage}_upper_bound={upper:g}: bounds on a ratio of "
            f"probabilities need 0 <= lower <= upper; for example mis.{stage}_upper_bound=2.0"
        )
