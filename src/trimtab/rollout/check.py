"""Checks that every engine makes on what it is asked, and on what it is handed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trimtab.batch import Prompt, Sampling
from trimtab.errors import ConfigError, DataError, EngineError
from trimtab.spec import RolloutSpec


def check_options(spec: RolloutSpec) -> None:
    """Refuse top-k, which no engine samples with; top-p is said by each ``Sampling``, and a run's is 1 by its rules."""
    if spec.top_k != 0:
        raise ConfigError(
            f"rollout.top_k={spec.top_k}: the engines sample from the whole vocabulary, as the trainer scores it; set "
            "rollout.top_k=0"
        )


def check_request(prompts: Sequence[Prompt], sampling: Sampling, max_model_len: int, vocabulary: int) -> None:
    """Refuse a prompt that is empty, too long for its response, or not of this model, and senseless numbers."""
    if sampling.max_tokens < 1 or sampling.samples_per_prompt < 1 or sampling.temperature < 0:
        raise ConfigError(
            f"rollout.max_tokens={sampling.max_tokens} and samples per prompt ({sampling.samples_per_prompt}) must be "
            f"at least 1, and rollout.temperature={sampling.temperature} at least 0 (0 is greedy)"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"rollout.top_p={sampling.top_p} is a mass above 0, at most 1; set rollout.top_p=1")
    for prompt in prompts:
        if not prompt.ids:
            raise DataError(f"prompt {prompt.problem.id} has no tokens; an engine needs at least one")
        if not 0 <= min(prompt.ids) <= max(prompt.ids) < vocabulary:
            raise DataError(
                f"prompt {prompt.problem.id} has token ids from {min(prompt.ids)} to {max(prompt.ids)}; the engine's "
                f"model has {vocabulary}: tokenizer and model do not belong together (policy.path)"
            )
        if len(prompt.ids) + sampling.max_tokens > max_model_len:
            raise DataError(
                f"prompt {prompt.problem.id} has {len(prompt.ids)} tokens; with up to {sampling.max_tokens} of a "
                f"response that is more than rollout.max_model_len={max_model_len}: raise rollout.max_model_len, lower "
                "rollout.max_tokens, or leave the prompt out"
            )


def check_rows(rows: Sequence[Sequence[int]]) -> None:
    """Refuse rows without a token, which have nothing to score and nothing to score it by."""
    if any(len(row) == 0 for row in rows):
        raise DataError(f"row {[len(row) for row in rows].index(0)} of the {len(rows)} to score has no tokens")


def check_handover(given: Iterable[str], unknown: Iterable[str], missing: Iterable[str]) -> None:
    """Refuse a hand-over that leaves a weight of the engine untouched or brings one that it does not have."""
    unknown, missing = sorted(unknown), sorted(missing)
    if unknown or missing:
        raise EngineError(
            f"the hand-over of {len(list(given))} weights does not fit the engine's model: "
            f"not in the engine: {unknown[:5] or 'none'}; not handed over: {missing[:5] or 'none'}. "
            "Trainer and engine must load the same model (policy.kind, policy.path)"
        )
