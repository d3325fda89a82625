"""The order of training problems: a fresh permutation for each pass, a function of the seed and the position alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trimtab.batch import Problem, Prompt
from trimtab.errors import DataError
from trimtab.protocol import Tokenizer
from trimtab.spec import Engine, RolloutSpec
from trimtab.train.seeds import derive


def encode_prompts(problems: Sequence[Problem], tokenizer: Tokenizer, rollout: RolloutSpec) -> list[Prompt]:
    """Every problem tokenised, once, so that a prompt without room for a response ends the run before it begins."""
    prompts = [Prompt(problem, tokenizer.encode(problem.prompt)) for problem in problems]
    room = rollout.max_model_len - rollout.max_tokens
    if rollout.engine is Engine.replay:  # its samples bring their own prompts
        return prompts
    unfit = [prompt for prompt in prompts if not 0 < len(prompt.ids) <= room]
    if unfit:
        longest = max(unfit, key=lambda prompt: len(prompt.ids))
        raise DataError(
            f"{len(unfit)} of {len(prompts)} prompts are empty or longer than {room} tokens, the longest being "
            f"{longest.problem.id} with {len(longest.ids)}: give rollout.max_model_len="
            f"{len(longest.ids) + rollout.max_tokens} or more, lower rollout.max_tokens, or leave them out of the data"
        )
    return prompts


class PromptStream:
    """Prompts of each step."""

    def __init__(
        self, problems: Sequence[Problem], tokenizer: Tokenizer, seed: int, per_step: int, rollout: RolloutSpec
    ) -> None:
        if not problems:
            raise DataError("the task has no training problems; check task.path or task.train_size")
        self._prompts = encode_prompts(problems, tokenizer, rollout)
        self._seed, self._per_step = seed, per_step
        self._pass, self._order = -1, list[int]()

    def at(self, position: int) -> Prompt:
        """The prompt at ``position`` 0, 1, … of the run's whole order."""
        turn, offset = divmod(position, len(self._prompts))
        if turn != self._pass:
            self._order = list(range(len(self._prompts)))
            random.Random(derive(self._seed, "order", turn)).shuffle(self._order)
            self._pass = turn
        return self._prompts[self._order[offset]]

    def step(self, step: int) -> list[Prompt]:
        """The prompts of step 1, 2, …; equal whether the run got there at once or was resumed."""
        first = (step - 1) * self._per_step
        return [self.at(first + i) for i in range(self._per_step)]
