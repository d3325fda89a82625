"""What the rungs share: the bench, the reference, the prompts, what noise is, and how a difference is judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from trimtab.batch import Problem, Prompt, Sample, Sampling
from trimtab.errors import TrimtabError
from trimtab.lab.bench import Bench, Report
from trimtab.lab.parity.all_readings import readings
from trimtab.lab.parity.contexts import contexts
from trimtab.lab.parity.explain import (
    Explanation,
    difference,
    distinct,
    explain,
    hidden,
    noise_like,
    sided,
    tolerance,
    unexplained,
)
from trimtab.lab.parity.forwards import forwards
from trimtab.lab.parity.model import Bound, Cause, Rung, Section, Size, Verdict, measured, size_of
from trimtab.lab.parity.readings import Guess, of_numbers, slowly
from trimtab.lab.parity.reference import Reference, Truth, Versions, load
from trimtab.lab.parity.supports import of_ends, of_penalties, of_support
from trimtab.spec import Dtype

FEW_LOGITS = 2_000_000
FEW_TOKENS, NOISE_TOKENS, SEARCH_ROWS, SEARCH_LOGITS = 200, 250, 16, 8_000_000
UNMEASURED = Bound(1e-4, 3e-4, 2e-3)
NOTHING = Size(0.0, 0.0, 0.0, 0.0, 0.0, 0)
TORCH = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.float16: torch.float16}
LIKE_DTYPE = (0.3, 3.0)
"""How much smaller and larger than a dtype's own rounding a difference may be to be taken for it."""


@dataclass(frozen=True)
class Effort:
    """How much is sampled: prompts of the task, responses of each, longest response, long prompts."""

    prompts: int
    group: int
    tokens: int
    longs: int = 4
    versions: int = 3


@dataclass
class Lab:
    """Everything a rung needs. ``rungs``: what was found so far; ``reading``: what the engine's figures turned out to
    be, so that one fault isn't told at each later rung."""

    bench: Bench
    reference: Reference
    versions: Versions
    effort: Effort
    shorts: list[Prompt]
    longs: list[Prompt]
    report: Report
    fine: Bound = UNMEASURED
    engine_bound: Bound = UNMEASURED
    trainer_bound: Bound = UNMEASURED
    rounding: dict[Dtype, Size] = field(default_factory=dict)
    noise_truth: Truth | None = None
    rungs: list[Rung] = field(default_factory=list)
    reading: Guess | None = None
    trainer_reading: Guess | None = None
    noisy: Cause | None = None
    engine_off: bool = False
    engine_size: Size = NOTHING
    trainer_size: Size = NOTHING
    attention_size: Size = NOTHING
    trainer_scores: Tensor | None = None
    trainer_off: bool = False
    samples: list[Sample] = field(default_factory=list)
    truth: Truth | None = None
    trainer_truth: Truth | None = None

    @property
    def heat(self) -> float:
        return self.bench.spec.rollout.temperature

    def sampling(self, temperature: float | None = None, group: int | None = None, seed: int = 0) -> Sampling:
        """As the run samples, but for what is given."""
        made = self.bench.sampling(self.bench.spec.seed * 1009 + seed, group or self.effort.group, self.effort.tokens)
        return made if temperature is None else replace(made, temperature=temperature)

    def sees(self, samples: Sequence[Sample], temperature: float | None = None) -> Truth:
        """The reference's view, under the weights it has now."""
        heat = self.heat if temperature is None else temperature
        return self.reference.truth(samples, heat, self.bench.stop_ids)

    def expected(self, truth: Truth) -> Tensor:
        """What the engine reports, as far as it is understood; where nothing is known, what it does report."""
        if self.reading is None:
            return truth.logp_N
        predicted_N = self.reading.predict(truth)
        return torch.where(predicted_N.isnan(), truth.reported(), predicted_N)

    def add(self, rung: Rung) -> Rung:
        self.rungs.append(rung)
        return rung

    def refused(self, section: Section, name: str, compared: str, error: TrimtabError, side: str = "engine") -> Rung:
        """A rung at which something failed to answer at all."""
        cause = Cause("refusal", f"the {side} fails: {error}", f"what the {side} says above", side)
        return self.add(Rung(section, name, compared, Verdict.differs, cause=cause))

    def readings(self, truth: Truth, told_N: Tensor) -> Iterable[Guess]:
        """Every reading: of the logits, of other prompts and positions than were meant, of other forward passes."""
        others = chain(contexts(self.reference, truth), forwards(self.reference, truth, told_N))
        return chain(readings(truth, told_N), slowly(others))

    # -- noise --------------------------------------------------------------------------------------------------------

    def measure_noise(self, truth: Truth) -> None:
        """Set the bounds: by another attention in float32, and by transformers itself in each side's dtype."""
        rows = max(1, int((torch.tensor(truth.length_B).cumsum(0) <= NOISE_TOKENS).sum()))
        self.noise_truth = truth.pick(range(0, len(truth.samples), max(1, len(truth.samples) // max(rows, 8))))
        own = self.attention_size = self.own_noise(torch.float32, "sdpa")
        self.fine = Bound(3e-5 + 20 * own.mean_abs, 1e-4 + 20 * own.rms, 1e-3 + 20 * own.largest)
        spec = self.bench.spec
        self.engine_bound = self.bound_of(spec.rollout.dtype)
        self.trainer_bound = self.bound_of(spec.policy.dtype)

    def rounding_of(self, dtype: Dtype) -> Size:
        """How far transformers in this dtype is from the reference, on some of the first sample."""
        if dtype not in self.rounding:
            self.rounding[dtype] = self.own_noise(TORCH[dtype], "eager")
        return self.rounding[dtype]

    def bound_of(self, dtype: Dtype) -> Bound:
        if dtype is Dtype.float32:
            return self.fine
        return self.coarse(self.rounding_of(dtype))

    def coarse(self, own: Size) -> Bound:
        """The bound of a rounding of this size."""
        fine = self.fine
        each = 5 * own.largest + 10 * own.rms
        return Bound(2.5 * own.mean_abs + fine.mean, 2.5 * own.rms + fine.rms, each + fine.each, coarse=True)

    def own_noise(self, dtype: torch.dtype, attention: str) -> Size:
        assert self.noise_truth is not None
        truth = self.noise_truth
        other = Reference(load(self.bench.folder, dtype, attention))
        again = other.truth(truth.samples, truth.temperature, truth.stop_ids)
        return size_of(again.logp_N - truth.logp_N, truth.row_N)

    def scaled(self, bound: Bound, temperature: float) -> Bound:
        """Noise at another temperature: logits count 1/T times as much."""
        by = 1.5 * max(1.0, (self.heat or 1.0) / temperature)
        return replace(bound, mean=by * bound.mean, rms=by * bound.rms, each=by * bound.each)

    def moved_bound(self, bound: Bound, dtype: Dtype, truth: Truth) -> Bound:
        """A bound under other weights: in a coarse dtype rounding is measured again, by the reference's own weights."""
        if not bound.coarse:
            return bound
        other = Reference(load(self.bench.folder, TORCH[dtype]))
        other.use(self.reference.weights())
        part = truth.pick(range(0, len(truth.samples), max(1, len(truth.samples) // 12)))
        again = other.truth(part.samples, part.temperature, part.stop_ids)
        own = self.coarse(size_of(again.logp_N - part.logp_N, part.row_N))
        return Bound(max(own.mean, bound.mean), max(own.rms, bound.rms), max(own.each, bound.each), coarse=True)

    def known_lossy(self) -> Cause | None:
        """An option that is known to change the engine's log-probs, if it is in force."""
        running = self.bench.engine.describe()
        if str(running.get("kv_cache_dtype", "")).startswith("fp8"):
            return Cause(
                "kv_cache_dtype",
                "keys and values are cached in 8 bits (kv_cache_dtype=fp8)",
                "rollout.kv_cache_dtype=auto (mismatch=none)",
                "engine",
            )
        return None

    def as_before(self, size: Size) -> bool:
        """Whether a difference is the engine's unexplained own one, and no larger."""
        first = self.engine_size
        return self.engine_off and self.reading is None and size.rms <= 2.5 * first.rms + self.fine.rms

    def blame(self, cause: Cause) -> None:
        """Put a cause that a controlled comparison has found into the rung that had none."""
        for i, rung in enumerate(self.rungs):
            if rung.fault and rung.cause is not None and rung.cause.name in ("noise", "unexplained"):
                self.rungs[i] = replace(rung, cause=cause)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def judge(
        self,
        section: Section,
        name: str,
        compared: str,
        truth: Truth,
        told_N: Tensor,
        expected_N: Tensor,
        side: str,
        bound: Bound,
        guesses: Iterable[Guess] | None = None,
        other: str = "",
        search: bool = True,
        known: Cause | None = None,
    ) -> tuple[Rung, Explanation | None]:
        """The rung of told - expected, with its cause; ``search`` False: it follows from an earlier one."""
        gap_N = difference(told_N, expected_N)
        size = size_of(gap_N, truth.row_N)
        if size.tokens + size.missing == 0:
            return self.add(Rung(section, name, compared, Verdict.untestable, note="no token was sampled")), None
        quiet = size.within(bound) and not (bound.coarse and self._systematic(size))
        if quiet:
            worth = search and bound.coarse and section is Section.semantics and guesses is None
            found = self._within(truth, told_N, expected_N, bound) if worth else None
            if found is None:
                verdict = Verdict.rounding if bound.coarse else Verdict.equal
                return self.add(measured(section, name, compared, verdict, size, bound)), None
            return self.add(measured(section, name, compared, Verdict.differs, size, bound, found.cause(side))), found
        if not search:
            note = "follows from the above"
            rung = measured(section, name, compared, Verdict.differs, size, bound, follows=True, note=note)
            return self.add(rung), None
        if size.missing and size_of(gap_N[~gap_N.isnan()]).within(bound):
            cause = unexplained(gap_N, truth, bound, side, other)
            return self.add(measured(section, name, compared, Verdict.differs, size, bound, cause)), None
        part, at = self._worth_a_search(truth, gap_N, bound)
        tried = self.readings(part, told_N[at]) if guesses is None else guesses
        found = explain(part, told_N[at], expected_N[at], tried, bound)
        cause = found.cause(side) if found else known or self._last_resort(truth, gap_N, size, bound, side, other)
        return self.add(measured(section, name, compared, Verdict.differs, size, bound, cause)), found

    def _worth_a_search(self, truth: Truth, gap_N: Tensor, bound: Bound) -> tuple[Truth, Tensor]:
        """Rows enough to find a cause: strange ones and others, as many as fit SEARCH_LOGITS logits."""
        lengths = torch.tensor(truth.length_B)
        rows = max(SEARCH_ROWS, SEARCH_LOGITS * len(truth.samples) // max(truth.logits_NV.numel(), 1))
        if rows >= len(truth.samples):
            return truth, torch.arange(len(gap_N))
        off_N = ~(gap_N.abs() <= tolerance(gap_N, bound))
        strange = torch.zeros(len(lengths)).index_add_(0, truth.row_N, off_N.float()) > 0
        first = strange.nonzero()[:, 0].tolist()[: max(rows * 2 // 3, rows - int((~strange).sum()))]
        other = (~strange).nonzero()[:, 0].tolist()[: rows - len(first)]
        chosen = sorted((*first, *other))
        return truth.pick(chosen), truth.tokens_of(chosen)

    def _systematic(self, size: Size) -> bool:
        """Whether the mean is farther from 0 than rounding puts it (a mean of up to σ² is the divergence itself)."""
        return size.error == size.error and abs(size.mean) > 6 * size.error + size.rms**2

    def _within(self, truth: Truth, told_N: Tensor, expected_N: Tensor, bound: Bound) -> Explanation | None:
        rows = distinct(truth, max(70, min(FEW_TOKENS, FEW_LOGITS // truth.logits_NV.shape[1])))
        few, at = truth.pick(rows), truth.tokens_of(rows)
        told, meant = told_N[at], expected_N[at]
        guesses = chain(of_numbers(few, told), of_support(few, told), of_ends(few, told), of_penalties(few, told))
        return hidden(few, told, meant, guesses)

    def _last_resort(self, truth: Truth, gap_N: Tensor, size: Size, bound: Bound, side: str, other: str) -> Cause:
        """A dtype whose rounding is about as large; noise; or nothing."""
        noise = None if size.missing else noise_like(gap_N, truth)
        if noise is not None and self._clean_when_scoring(truth, side):
            text = f"{noise.text}; it is made when sampling: the engine's own scoring of given rows has none"
            return Cause("noise", text, noise.mend, side)
        if noise is not None and side != "hand-over" and (dtype := self.like_dtype(size, bound)) is not None:
            key = "policy.dtype" if side == "trainer" else "rollout.dtype"
            text = f"differences of {size.rms:.3g} nats (root mean square), what computing in {dtype.value} makes, "
            text += f"though {key} says otherwise"
            return Cause("dtype", text, f"the {side} must run in the dtype of {key} (mismatch=none)", side)
        if noise is not None and side != "trainer":
            return sided(noise, side)
        return unexplained(gap_N, truth, bound, side, other)

    def _clean_when_scoring(self, truth: Truth, side: str) -> bool:
        """Whether the engine scores given rows as the reference does, whatever it reports when it samples."""
        few = truth.samples[:SEARCH_ROWS]
        if side != "engine" or not few:
            return False
        scored = self.bench.engine.score([(*sample.prompt.ids, *sample.ids) for sample in few])
        if scored is None or any(
            len(row) + 1 != len(s.prompt.ids) + len(s.ids) for row, s in zip(scored, few, strict=True)
        ):
            return False
        told = [x for row, s in zip(scored, few, strict=True) for x in row[len(s.prompt.ids) - 1 :]]
        exact = truth.few(len(few))
        gap_N = difference(torch.tensor(told, dtype=torch.float64), exact.own(exact.at(1.0)))
        return size_of(gap_N, exact.row_N).within(self.fine)

    def like_dtype(self, size: Size, bound: Bound) -> Dtype | None:
        """The dtype whose rounding is as large as this difference; None within a bound that is coarse already."""
        if bound.coarse:
            return None
        low, high = LIKE_DTYPE
        fits = [
            (abs(size.rms / own.rms - 1), dtype.value, dtype)
            for dtype in (Dtype.bfloat16, Dtype.float16)
            if (own := self.rounding_of(dtype)).rms > 0 and low < size.rms / own.rms < high
        ]
        return min(fits)[2] if fits else None


def long_prompts(shorts: Sequence[Prompt], count: int, length: int) -> list[Prompt]:
    """``count`` prompts of about ``length`` tokens whose first two thirds are the same: the task's own, in a row."""
    ids = [token for prompt in shorts for token in prompt.ids]
    if not ids or length < 8:
        return []
    ids = ids * (length * (count + 1) // len(ids) + 1)
    head = length * 2 // 3
    made = []
    for i in range(count):
        start = head + i * (length - head)
        row = (*ids[:head], *ids[start : start + length - head])
        made.append(Prompt(Problem(f"long {i}", "", ""), tuple(row)))
    return made
