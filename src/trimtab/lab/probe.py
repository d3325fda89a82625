"""``trimtab probe`` without its command line: a bench's samples, measured; everything its tables and page tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from trimtab.batch import Sample
from trimtab.build import Pieces
from trimtab.lab.bench import Bench, Report
from trimtab.lab.bootstrap import Resamples
from trimtab.lab.curves import Bin, Prefix, Token, by_entropy, by_position, growth, worst
from trimtab.lab.gap import Gap, Pairs, measure
from trimtab.lab.prompts import TASK, problems, shares
from trimtab.spec import RunSpec

WORST, CONTEXT = 40, 24

Phase = Callable[[str], AbstractContextManager[Report]]
"""Opens the display of a phase by its name."""


@dataclass(frozen=True)
class Probed:
    """A probe's outcome. ``pieces``: texts of the response tokens, by response; ``tails``: of its prompt."""

    spec: RunSpec
    overrides: tuple[str, ...]
    source: str
    engine: Mapping[str, Any]
    samples: tuple[Sample, ...]
    pieces: tuple[tuple[str, ...], ...]
    tails: tuple[tuple[str, ...], ...]
    pairs: Pairs
    gap: Gap
    positions: tuple[Bin, ...]
    entropies: tuple[Bin, ...]
    prefixes: tuple[Prefix, ...]
    worst: tuple[Token, ...]
    seconds: float  # of sampling

    @property
    def speed(self) -> float:
        """Response tokens sampled per second, the engine's set-up apart."""
        return self.pairs.length_B.sum().item() / self.seconds if self.seconds > 0 else 0.0

    def context(self, token: Token) -> tuple[str, str, str]:
        """What stands before the token, its own text, what comes after."""
        pieces, at = self.pieces[token.row], token.position
        before = (*self.tails[token.row], *pieces[:at])[-CONTEXT:]
        return "".join(before), pieces[at], "".join(pieces[at + 1 : at + 1 + CONTEXT // 2])


def probe(bench: Bench, source: str, responses: int, phase: Phase, overrides: Sequence[str] = ()) -> Probed:
    """Sample, hand nothing but token ids over, score the same tokens in the trainer, measure.

    The weights are handed over first, as they are before each step of a run but the first.
    """
    spec = bench.spec
    every = problems(source, spec, bench.policy)
    count, each = shares(len(every), responses)
    prompts = bench.encode(every[:count])
    sampling = bench.sampling(per_prompt=each)
    if source != TASK:  # what ends an answer to the task's problems would cut others short
        sampling = replace(sampling, stop_ids=bench.policy.tokenizer.end_ids)
    bench.hand_over()
    with phase("sampling") as report:
        begin = time.monotonic()
        samples = bench.sample(prompts, sampling, report)
        seconds = time.monotonic() - begin
    with phase("scoring") as report:
        pairs = bench.pairs(samples, report=report)
    pieces = Pieces(bench.policy.tokenizer)
    resamples = Resamples.of(pairs.rows, spec.seed)
    return Probed(
        spec=replace(spec, run_dir=""),
        overrides=tuple(overrides),
        source=source,
        engine=bench.engine.describe(),
        samples=tuple(samples),
        pieces=tuple(pieces(sample.ids) for sample in samples),
        tails=tuple(pieces(sample.prompt.ids[-CONTEXT:]) for sample in samples),
        pairs=pairs,
        gap=measure(pairs, spec.seed),
        positions=tuple(by_position(pairs, resamples)),
        entropies=tuple(by_entropy(pairs, resamples)),
        prefixes=tuple(growth(pairs, resamples)),
        worst=tuple(worst(pairs, WORST)),
        seconds=seconds,
    )
