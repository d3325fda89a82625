"""A task whose rewards differ within a group even for a random model, so that every step has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.batch import Problem


class Varied:
    """Reward: the share of digits in the response, plus a little for its length; fails at the ``fail_at``-th call."""

    def __init__(self, fail_at: int = 0) -> None:
        self._fail_at, self._calls = fail_at, 0

    def train(self) -> Sequence[Problem]:
        return [Problem(f"t{i}", f"{i}+{i % 7}=", str(i + i % 7)) for i in range(40)]

    def evaluation(self) -> Sequence[Problem]:
        return [Problem(f"e{i}", f"{i}*{i % 3}=", str(i * (i % 3))) for i in range(8)]

    def reward(self, problem: Problem, response: str) -> float:
        self._calls += 1
        if self._calls == self._fail_at:
            raise LookupError("the rubric is lost\nwith a second line")
        return sum(c.isdigit() or c.islower() for c in response) / 8 + 0.01 * len(response)
