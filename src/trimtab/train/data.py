"""The order of training problems: a fresh permutation for each pass, a function of the seed and the position alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trimtab.batch import Problem, Prompt
from trimtab.errors import DataError
from trimtab.protocol import Tokenizer
from trimtab.train.seeds import derive


class PromptStream:
    """Prompts of each step, tokenised once."""

    def __init__(self, problems: Sequence[Problem], tokenizer: Tokenizer, seed: int, per_step: int) -> None:
        if not problems:
            raise DataError("the task has no training problems; check task.path or task.train_size")
        self._prompts = [Prompt(problem, tokenizer.encode(problem.prompt)) for problem in problems]
        self._seed, self._per_step = seed, per_step
        self._pass, self._order = -1, list[int]()

    def _at(self, position: int) -> Prompt:
        turn, offset = divmod(position, len(self._prompts))
        if turn != self._pass:
            self._order = list(range(len(self._prompts)))
            random.Random(derive(self._seed, "order", turn)).shuffle(self._order)
            self._pass = turn
        return self._prompts[self._order[offset]]

    def step(self, step: int) -> list[Prompt]:
        """The prompts of step 1, 2, …; equal whether the run got there at once or was resumed."""
        first = (step - 1) * self._per_step
        return [self._at(first + i) for i in range(self._per_step)]
