"""A set-up on the bench: one configuration's policy, engine and prompts; sample, score in the trainer, swap the engine.

``probe`` and ``parity`` both work on a ``Bench``, so they measure what a run of the same overrides would train on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trimtab.batch import Batch, Problem, Prompt, Sample, Sampling, Scores, pack
from trimtab.build import make_rollout, stop_ids, warmup_examples
from trimtab.config import compose
from trimtab.config.rules import full_support
from trimtab.errors import ConfigError
from trimtab.lab.gap import Pairs
from trimtab.lab.trained import trained
from trimtab.policy import load as policies
from trimtab.policy.model import CausalPolicy
from trimtab.protocol import Rollout
from trimtab.spec import Engine, MismatchSpec, PolicySpec, RolloutSpec, RunSpec
from trimtab.track.console import SafeConsole, setup_progress
from trimtab.train.data import encode_prompts
from trimtab.train.plan import microbatches

Report = Callable[[int, int, str], None]


def silent(done: int, total: int, text: str) -> None:
    """A ``Report`` that tells nobody."""


def compose_to_measure(overrides: Sequence[str]) -> RunSpec:
    """The spec of ``overrides`` that a bench can measure: a run refuses a truncated support, here it is a finding."""
    spec = compose(overrides, without=(full_support,))
    if spec.rollout.engine is Engine.replay:
        raise ConfigError("rollout=replay samples nothing, so there is no engine to measure; give rollout=vllm or "
                          "rollout=transformers")  # fmt: skip
    if spec.rollout.top_k:
        raise ConfigError(f"rollout.top_k={spec.rollout.top_k} is sampled with by no engine here; cut the support by "
                          "rollout.top_p instead, such as rollout.top_p=0.9")  # fmt: skip
    return spec


def seed_of(seed: int, part: int) -> int:
    """The seed of one call of the engine."""
    return (seed * 1_000_003 + part * 7_919 + 1) % 2**31


@dataclass
class Bench:
    """Policy and engine of ``spec``, which start from the same ``folder``; at most one engine lives at a time."""

    spec: RunSpec
    folder: Path
    policy: CausalPolicy
    engine: Rollout
    stop_ids: tuple[int, ...]
    version: int = 0

    # -- prompts and samples -----------------------------------------------------------------------------------------

    def encode(self, problems: Sequence[Problem]) -> list[Prompt]:
        """Tokenised; DataError for one without room for a response."""
        return encode_prompts(problems, self.policy.tokenizer, self.spec.rollout)

    def sampling(self, seed: int | None = None, per_prompt: int = 1, max_tokens: int | None = None) -> Sampling:
        """How a run of ``spec`` samples; seed and lengths as given."""
        rollout = self.spec.rollout
        return Sampling(
            max_tokens=rollout.max_tokens if max_tokens is None else max_tokens,
            temperature=rollout.temperature,
            stop_ids=self.stop_ids,
            seed=self.spec.seed if seed is None else seed,
            samples_per_prompt=per_prompt,
            top_p=rollout.top_p,
        )

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, report: Report = silent
    ) -> list[Sample]:
        """``samples_per_prompt`` responses of each prompt, in calls of at most ``rollout.max_num_seqs`` responses.

        A function of ``sampling.seed``: each call of the engine has a seed of its own.
        """
        wanted = self.sampling() if sampling is None else sampling
        at_once = max(1, self.spec.rollout.max_num_seqs // wanted.samples_per_prompt)
        samples: list[Sample] = []
        for part, start in enumerate(range(0, len(prompts), at_once)):
            report(start, len(prompts), f"{len(samples)} responses")
            seeded = replace(wanted, seed=seed_of(wanted.seed, part))
            samples += self.engine.generate(prompts[start : start + at_once], seeded)
        report(len(prompts), len(prompts), f"{len(samples)} responses")
        return samples

    # -- both sides of the same tokens -------------------------------------------------------------------------------

    def score(
        self,
        samples: Sequence[Sample],
        temperature: float | None = None,
        entropy: bool = False,
        report: Report = silent,
    ) -> Scores:
        """The trainer's pass over the samples' response tokens, cut as in a step (``optim.microbatch_tokens``).

        logp_N, entropy_N: float32 nats in the order of ``pack``, at ``rollout.temperature`` unless given.
        """
        batch = flat(samples)
        heat = self.spec.rollout.temperature if temperature is None else temperature
        rows = [row for row in range(batch.rows) if int(batch.length_B[row])]
        cuts = microbatches(batch, rows, self.spec.optim.microbatch_tokens)
        logp_N = torch.full((batch.tokens,), math.nan)
        entropy_N = torch.full((batch.tokens,), math.nan) if entropy else None
        for i, cut in enumerate(cuts):
            report(i, len(cuts), f"{batch.tokens} tokens")
            scores = self.policy.score(batch.select(cut), temperature=heat, entropy=entropy)
            at = batch.positions_of(cut)
            logp_N[at] = scores.logp_N.float()
            if entropy_N is not None and scores.entropy_N is not None:
                entropy_N[at] = scores.entropy_N.float()
        report(len(cuts), len(cuts), f"{batch.tokens} tokens")
        return Scores(logp_N, entropy_N)

    def pairs(self, samples: Sequence[Sample], temperature: float | None = None, report: Report = silent) -> Pairs:
        """Both sides' log-probs of the same tokens, with the trainer's entropies."""
        return aligned(samples, self.score(samples, temperature, entropy=True, report=report))

    # -- hand-over and engines ---------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """The policy's weights to the engine, as after a training step."""
        self.version += 1
        self.engine.load(self.policy.weights(), self.version)

    def restart(self, rollout: RolloutSpec | None = None, mismatch: MismatchSpec | None = None) -> None:
        """Another engine with other options (``spec`` becomes theirs), from the weights in ``folder``.

        The old one is closed first: vLLM's process groups are global. What the policy learned since is not handed over.
        """
        self.engine.close()
        self.spec = replace(
            self.spec,
            rollout=self.spec.rollout if rollout is None else rollout,
            mismatch=self.spec.mismatch if mismatch is None else mismatch,
        )
        self.engine = make_rollout(self.spec, self.folder, self.policy.device)

    def another_policy(self, options: PolicySpec | None = None) -> CausalPolicy:
        """A second policy from ``folder``'s weights, with other ``policy.*`` options if given."""
        return policies.load(self.folder, self.spec.policy if options is None else options)


@contextmanager
def opened(spec: RunSpec, weights: Path | None = None) -> Iterator[Bench]:
    """A bench for ``spec``; its engine's memory is freed at the end, whichever it has by then.

    ``weights``: a run's folder, whose newest checkpoint both sides start from (``trained``).
    """
    with setup_progress("warming up the tiny model", SafeConsole(highlight=False, stderr=True)) as progress:
        folder = policies.prepare(spec.policy, examples=warmup_examples(spec), progress=progress)
    with trained(folder, spec.policy, weights) as place:
        yield from _opened(spec, place)


def _opened(spec: RunSpec, folder: Path) -> Iterator[Bench]:
    policy = policies.load(folder, spec.policy)
    bench = Bench(
        spec=spec,
        folder=folder,
        policy=policy,
        engine=make_rollout(spec, folder, policies.device_of(spec.policy.device)),
        stop_ids=stop_ids(spec, policy.tokenizer),
    )
    try:
        yield bench
    finally:
        bench.engine.close()


def flat(samples: Sequence[Sample]) -> Batch:
    """The samples as a batch, rows in their order; groups and rewards mean nothing here."""
    return pack(samples, [0] * len(samples), [0.0] * len(samples))


def aligned(samples: Sequence[Sample], scores: Scores) -> Pairs:
    """The engine's log-probs beside the trainer's."""
    batch = flat(samples)
    entropy: Tensor | None = None if scores.entropy_N is None else scores.entropy_N.double()
    return Pairs(
        rollout_N=batch.rollout_logp_N.double(),
        trainer_N=scores.logp_N.double(),
        length_B=batch.length_B,
        mask_N=batch.mask_N,
        entropy_N=entropy,
    )
