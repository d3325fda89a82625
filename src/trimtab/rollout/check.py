"""Checks that every engine makes on what it is asked, and on what it is handed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimtab.batch import Prompt, Sampling
from trimtab.errors import ConfigError, DataError, EngineError


def check_request(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int) -> None:
    """Refuse an empty prompt, a prompt whose response could be cut by the model's length, and senseless numbers."""
    if sampling.max_tokens < 1 or sampling.samples_per_prompt < 1 or sampling.temperature < 0:
        raise ConfigError(
            f"rollout.max_tokens={sampling.max_tokens} and samples per prompt ({sampling.samples_per_prompt}) must be "
            f"at least 1, and rollout.temperature={sampling.temperature} at least 0 (0 is greedy)"
        )
    for prompt in prompts:
        if not prompt.ids:
            raise DataError(f"prompt {prompt.problem.id} has no tokens; an engine needs at least one")
        if len(prompt.ids) + sampling.max_tokens > max_model_len:
            raise DataError(
                f"prompt {prompt.problem.id} has {len(prompt.ids)} tokens; with up to {sampling.max_tokens} of a "
                f"response that is more than rollout.max_model_len={max_model_len}: raise rollout.max_model_len, lower "
                "rollout.max_tokens, or leave the prompt out"
            )


def check_handover(given: Iterable[str], unknown: Iterable[str], missing: Iterable[str]) -> None:
    """Refuse a hand-over that leaves a weight of the engine untouched or brings one that it does not have."""
    unknown, missing = sorted(unknown), sorted(missing)
    if unknown or missing:
        raise EngineError(
            f"the hand-over of {len(list(given))} weights does not fit the engine's model: "
            f"not in the engine: {unknown[:5] or 'none'}; not handed over: {missing[:5] or 'none'}. "
            "Trainer and engine must load the same model (policy.kind, policy.path)"
        )
