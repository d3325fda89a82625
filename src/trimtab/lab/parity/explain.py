"""Which reading of the figures brings a difference down to noise, and at which tokens there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimtab.lab.parity.model import Bound, Cause, Size, size_of
from trimtab.lab.parity.readings import Guess
from trimtab.lab.parity.reference import Truth

SKETCH = 4
EXACT, MOSTLY, HIDDEN, HALF = 0.95, 0.7, 0.5, 0.35
"""Shares: of strange tokens that an exact reading explains; of the squared difference that a rough one does; of it
that one does which hides within rounding, on all prompts and on half of them."""
ROUNDING = ("log_softmax_dtype", "logits_dtype", "rounded_values", "weights_dtype")


@dataclass(frozen=True)
class Explanation:
    """A reading that fits: how much of the difference it explains, what it leaves, and where it holds."""

    guess: Guess
    share: float
    left: Size
    where: str

    def cause(self, side: str) -> Cause:
        text = self.guess.text + (f", at {self.where}" if self.where else "")
        if self.share < EXACT:
            text += f" (explains {self.share:.0%} of the squared difference)"
        return Cause(self.guess.name, text, mend_of(self.guess, side), side)


def mend_of(guess: Guess, side: str) -> str:
    """What to change on that side."""
    if side != "trainer":
        return guess.mend
    if "temperature" in guess.name or guess.name == "raw_logprobs":
        return "the trainer must score at rollout.temperature"
    if guess.name == "logits_dtype":
        return "policy.fp32_head=true"
    return "the trainer's own scoring of response tokens; the engine agrees with the reference"


def difference(left_N: Tensor, right_N: Tensor) -> Tensor:
    """left - right; 0 where both are the same infinity, NaN where one is missing."""
    return torch.where(left_N == right_N, torch.zeros_like(left_N), left_N - right_N)


def tolerance(gap_N: Tensor, bound: Bound) -> float:
    """From which |d| on a token counts as strange."""
    tol = 10 * bound.mean
    return tol if bool((gap_N.abs() > tol).any()) else 2 * bound.mean


def explain(
    truth: Truth, told_N: Tensor, expected_N: Tensor, guesses: Iterable[Guess], bound: Bound
) -> Explanation | None:
    """The reading that fits best, None when none does. expected_N: what was to be reported."""
    gap_N = difference(told_N, expected_N)
    tol = tolerance(gap_N, bound)
    off_N = ~(gap_N.abs() <= tol) & ~told_N.isnan()
    found: list[tuple[float, int, Explanation]] = []
    rows = _strangest(truth, off_N)
    few, at = truth.pick(rows), truth.tokens_of(rows)
    for order, guess in enumerate(guesses):
        if guess.slow and any(wrong == 0 for wrong, _, _ in found):
            break
        if guess.slow and len(rows) < len(truth.samples):
            sketch_N = guess.predict(few)
            if _hopeless(told_N[at], expected_N[at], sketch_N, off_N[at], tol, bound):
                continue
        predicted_N = guess.predict(truth)
        if bound.coarse:
            made = _rough(guess, truth, told_N, expected_N, predicted_N, MOSTLY)
            wrong = 1 - made.share if made is not None else math.inf
        else:
            made, wrong = _exact(guess, truth, told_N, predicted_N, off_N, tol)
        if made is not None:
            found.append((wrong, order, made))
            if wrong == 0 and not guess.free:
                break  # nothing later can be better
    if found:
        return min(found, key=lambda each: each[:2])[2]
    return None


def _strangest(truth: Truth, off_N: Tensor) -> list[int]:
    """The rows with the largest number of strange tokens."""
    counts = torch.zeros(len(truth.samples)).index_add_(0, truth.row_N, off_N.float())
    return sorted(counts.argsort(descending=True, stable=True)[:SKETCH].tolist())


def _hopeless(told_N: Tensor, expected_N: Tensor, sketch_N: Tensor, off_N: Tensor, tol: float, bound: Bound) -> bool:
    """Whether a reading leaves most of what is strange in a few rows."""
    said_N = off_N & ~sketch_N.isnan()
    if not bool(said_N.any()):
        return False
    left_N = difference(told_N, sketch_N)[said_N].clamp(-5, 5)
    if not bound.coarse:
        return float((left_N.abs() <= tol).double().mean()) < 0.5
    gap_N = difference(told_N, expected_N)[said_N].clamp(-5, 5)
    return float(left_N.square().sum()) >= 0.75 * float(gap_N.square().sum())


def _exact(
    guess: Guess, truth: Truth, told_N: Tensor, predicted_N: Tensor, off_N: Tensor, tol: float
) -> tuple[Explanation | None, float]:
    """The reading if it explains every strange token; and how many tokens speak against it."""
    left_N = difference(told_N, predicted_N)
    said_N = ~predicted_N.isnan() & ~told_N.isnan()
    fits_N = left_N.abs() <= tol
    strange, explained = int((off_N & said_N).sum()), int((off_N & fits_N).sum())
    unsaid = int((off_N & ~said_N).sum())
    needed = 4 if guess.free else 2
    if strange == 0 or explained < min(needed, max(1, int(off_N.sum()))) or explained < EXACT * strange:
        return None, math.inf
    if (guess.free and explained < needed) or unsaid > max(2 * len(truth.samples), strange):
        return None, math.inf
    against = int((~off_N & said_N & ~fits_N).sum())
    if guess.name in (*ROUNDING, "quantised_weights") and against > 0.05 * int((~off_N & said_N).sum()):
        return None, math.inf  # rounding spares no token
    where = "" if against == 0 else place(truth, off_N)
    share = explained / strange
    kept = said_N if against == 0 else off_N & said_N
    return Explanation(guess, share, size_of(left_N[kept], truth.row_N[kept]), where), against + strange - explained


def _rough(
    guess: Guess, truth: Truth, told_N: Tensor, expected_N: Tensor, predicted_N: Tensor, least: float
) -> Explanation | None:
    """The reading if it explains at least ``least`` of the squared difference, whole rows being read either way."""
    said_N = ~predicted_N.isnan() & ~told_N.isnan() & ~expected_N.isnan()
    if int(said_N.sum()) < 8:
        return None
    gap = difference(told_N, expected_N).clamp(-5, 5)
    left = difference(told_N, predicted_N).clamp(-5, 5)
    gap, left = torch.where(said_N, gap, 0.0), torch.where(said_N, left, 0.0)
    whole = 1 - float(left.square().sum() / gap.square().sum().clamp(min=1e-300))
    if whole >= least:
        return Explanation(guess, whole, size_of(left[said_N], truth.row_N[said_N]), "")
    if guess.free:
        return None
    rows = len(truth.samples)
    per_gap = torch.zeros(rows, dtype=torch.float64).index_add_(0, truth.row_N, gap.square())
    per_left = torch.zeros(rows, dtype=torch.float64).index_add_(0, truth.row_N, left.square())
    better = per_left < per_gap
    mixed = 1 - float(torch.where(better, per_left, per_gap).sum() / per_gap.sum().clamp(min=1e-300))
    heavy = better & (per_gap > 4 * per_gap.median())
    if mixed < max(least, MOSTLY) or int(heavy.sum()) < 2:
        return None
    kept = said_N & heavy[truth.row_N]
    where = f"{int(heavy.sum())} of {rows} responses"
    return Explanation(guess, mixed, size_of(left[kept], truth.row_N[kept]), where)


def hidden(
    truth: Truth, told_N: Tensor, expected_N: Tensor, guesses: Iterable[Guess], tokens: int = 60
) -> Explanation | None:
    """A reading that accounts for a good part of what passes for rounding; rounding itself apart.

    It must do so in each half of the prompts: a number fitted to a few large roundings does not.
    """
    rows = distinct(truth)
    if sum(truth.length_B[row] for row in rows) < tokens:
        return None
    prompts = list(dict.fromkeys(truth.samples[row].prompt.ids for row in rows))
    one = [row for row in rows if prompts.index(truth.samples[row].prompt.ids) % 2]
    parts = [(truth.pick(half), truth.tokens_of(half)) for half in (rows, one, [r for r in rows if r not in one])]
    found = list[Explanation]()
    for guess in guesses:
        if guess.name in ROUNDING:
            continue
        made: Explanation | None = None
        for (part, at), least in reversed([*zip(parts, (HIDDEN, HALF, HALF), strict=True)]):
            made = _rough(guess, part, told_N[at], expected_N[at], guess.predict(part), least)
            if made is None or made.where:
                made = None
                break
        if made is not None:
            found.append(made)
    return max(found, key=lambda made: made.share, default=None)


def distinct(truth: Truth, most: int = 10**9) -> list[int]:
    """Rows that differ in prompt or ids, up to ``most`` tokens: of each prompt one first, then another one, …"""
    seen, turns = set[tuple[object, object]](), dict[object, int]()
    order: list[tuple[int, int]] = []
    for row, sample in enumerate(truth.samples):
        key = (sample.prompt.ids, sample.ids)
        if key not in seen and sample.ids:
            seen.add(key)
            turn = turns[sample.prompt.ids] = turns.get(sample.prompt.ids, -1) + 1
            order.append((turn, row))
    rows, tokens = list[int](), 0
    for _, row in sorted(order):
        if rows and tokens + truth.length_B[row] > most:
            break
        rows.append(row)
        tokens += truth.length_B[row]
    return sorted(rows)


def place(truth: Truth, off_N: Tensor) -> str:
    """Which tokens are strange, in words; empty for all of them."""
    off, total = int(off_N.sum()), len(off_N)
    if off == total or off == 0:
        return ""
    length_N = torch.tensor(truth.length_B, dtype=torch.int64)[truth.row_N]
    stops = torch.isin(truth.token_N, torch.tensor(truth.stop_ids, dtype=torch.int64))
    kinds = {
        "end tokens": stops,
        "first tokens": truth.place_N == 0,
        "last tokens": truth.place_N == length_N - 1,
        "tokens that are not the first": truth.place_N > 0,
        "tokens that are not the last": truth.place_N < length_N - 1,
        "tokens that are no end tokens": ~stops,
    }
    shares = {
        text: off / int(those.sum())
        for text, those in kinds.items()
        if bool((off_N <= those).all()) and bool(those.any())
    }
    if shares and max(shares.values()) >= 0.5:
        text = max(shares, key=lambda text: shares[text])
        return f"{text} alone ({off} of {total} tokens)"
    first = int(truth.place_N[off_N].min())
    later = truth.place_N >= first
    if first > 0 and off >= 0.9 * int(later.sum()):
        return f"tokens from number {first + 1} of a response on ({off} of {total})"
    last = int(truth.place_N[off_N].max())
    sooner = truth.place_N <= last
    if off >= 0.9 * int(sooner.sum()) and last < int(truth.place_N.max()):
        return f"the first {last + 1} tokens of a response ({off} of {total})"
    if (token := _marking(truth, off_N)) is not None:
        return f"{off} of {total} tokens, all of them after token {token} in their row (its embedding?)"
    rows = truth.row_N[off_N].unique()
    inside = torch.isin(truth.row_N, rows)
    if len(rows) < len(truth.samples) and off >= 0.5 * int(inside.sum()):
        return _which_rows(truth, rows.tolist())
    return f"{off} of {total} tokens"


def _marking(truth: Truth, off_N: Tensor) -> int | None:
    """A token that comes before each strange token in its row, and hardly before others; None if there is none."""
    if 2 * int(off_N.sum()) > len(off_N):
        return None
    strange, ordinary, n = dict[int, int](), dict[int, int](), 0
    off = off_N.tolist()
    for sample in truth.samples:
        seen = set(sample.prompt.ids)
        for token in sample.ids:
            counts = strange if off[n] else ordinary
            for each in seen:
                counts[each] = counts.get(each, 0) + 1
            seen.add(token)
            n += 1
    whole = sum(off)
    fits = [token for token, count in strange.items() if count == whole and ordinary.get(token, 0) <= 0.3 * whole]
    return min(fits, key=lambda token: ordinary.get(token, 0), default=None)


def _which_rows(truth: Truth, rows: Sequence[int]) -> str:
    told = f"{len(rows)} of {len(truth.samples)} responses"
    lengths = [len(sample.prompt.ids) for sample in truth.samples]
    inside, chosen = [lengths[row] for row in rows], set(rows)
    outside = [length for row, length in enumerate(lengths) if row not in chosen]
    if outside and min(inside) > max(outside):
        return f"{told}: those with prompts of {min(inside)} tokens and more"
    if outside and max(inside) < min(outside):
        return f"{told}: those with prompts of up to {max(inside)} tokens"
    return told


def noise_like(gap_N: Tensor, truth: Truth) -> Cause | None:
    """Differences without a pattern: as often up as down, in most tokens; None if they are systematic."""
    size = size_of(gap_N, truth.row_N)
    if size.tokens < 30 or not math.isfinite(size.rms) or size.rms == 0:
        return None
    centred = abs(size.mean) <= 5 * size.rms / math.sqrt(size.tokens) + size.rms**2
    spread = float((gap_N.abs() > 0.05 * size.rms).double().mean())
    if not centred or spread < 0.4:
        return None
    text = (
        f"unsystematic noise of standard deviation {size.rms:.3g} nats, on confident tokens less, which no reading of "
        "the reference's logits predicts"
    )
    return Cause(
        "noise", text, "mismatch=none; look for noise on logits, or a computation coarser than it should be", "engine"
    )


def unexplained(gap_N: Tensor, truth: Truth, bound: Bound, side: str, other: str) -> Cause:
    """What can be said when nothing fits."""
    size = size_of(gap_N, truth.row_N)
    off_N = ~(gap_N.abs() <= tolerance(gap_N, bound))
    where = place(truth, off_N)
    if size.missing:
        text = f"{size.missing} of {size.missing + size.tokens} tokens have no log-prob"
        return Cause("missing", text, f"the {side} must report a log-prob for each token it sampled", side)
    text = f"unexplained: the {side} is off by {size.mean_abs:.3g} ± {size.error:.2g} nats (mean {size.mean:+.3g})"
    text += f", at {where}" if where else ""
    return Cause(
        "unexplained", f"{text}; {other}", f"the {side}'s computation of log-probs; nothing tried explains it", side
    )


def sided(cause: Cause, side: str) -> Cause:
    return replace(cause, side=side)
