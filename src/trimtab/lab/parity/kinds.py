"""One kind of weight at a time, moved so far that a single tensor which stays behind exceeds a coarse dtype's rounding.

The hand-overs before move everything by a little, as training does: in bfloat16 a norm that stays behind then hides
within rounding. Here queries, or norms, or the embedding, move by half their size, and nothing else does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.batch import Finish, Problem, Prompt, Sample
from trimtab.errors import TrimtabError
from trimtab.lab.parity.explain import difference, explain
from trimtab.lab.parity.model import Bound, Cause, Rung, Section, Size, Verdict, measured, size_of
from trimtab.lab.parity.readings import Guess
from trimtab.lab.parity.reference import Reference, Truth, Versions, load
from trimtab.lab.parity.state import TORCH, Lab
from trimtab.lab.parity.swaps import HAND_OVER, OUT_OF_A_BLOCK, Swapped, groups, kind_of

WEIGHTS = Section.weights
FAR, ROWS = 0.5, 3
DOUBTFUL, CERTAIN = 1.5, 6.0
"""Times the dtype's own rounding: from where a cause is looked for, and from where a difference needs none."""
NOBODY = Problem("", "", "")
NAME = "one kind of weight at a time"
COMPARED = "the engine's scores when one kind of weight has moved by half its size, and the reference"


@dataclass
class Far(Versions):
    """Version 0: the base; version 1: it, with the tensors of one kind moved far."""

    kind: str = ""

    def tensor(self, name: str, version: int) -> Tensor:
        base = self.base[name]
        if version == 0 or kind_of(name) != self.kind or not base.is_floating_point():
            return base.to(self.dtype).float()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
        size = float(base.square().mean().sqrt()) or 0.5
        return (base + FAR * size * torch.randn(base.shape, generator=generator)).to(self.dtype).float()


def one_kind_at_a_time(lab: Lab) -> None:
    """The rung; policy, engine and reference hold the folder's weights afterwards."""
    if not lab.engine_bound.coarse:
        note = "in float32 the hand-overs above show a single tensor"
        lab.add(Rung(WEIGHTS, NAME, COMPARED, Verdict.off, note=note))
        return
    if any(rung.fault and rung.section is WEIGHTS for rung in lab.rungs):
        lab.add(Rung(WEIGHTS, NAME, COMPARED, Verdict.untestable, note="mend the hand-over first"))
        return
    try:
        lab.add(_climbed(lab))
    except TrimtabError as error:
        lab.refused(WEIGHTS, NAME, COMPARED, error, "hand-over")


def _climbed(lab: Lab) -> Rung:
    names = list(lab.versions.base)
    samples = lab.samples[:: max(1, lab.effort.group)][:ROWS]
    rows = [(*sample.prompt.ids, *sample.ids) for sample in samples]
    rounded = Reference(load(lab.bench.folder, TORCH[lab.bench.spec.rollout.dtype]))
    worst, count, kinds = (0.0, Size(0.0, 0.0, 0.0, 0.0, 0.0, 0), Bound(0.0, 0.0, 0.0, True)), 0, 0
    _set(lab, rounded, lab.versions.weights(0))
    for kind in dict.fromkeys(kind_of(name) for name in names):
        far = Far(lab.versions.base, lab.versions.dtype, lab.versions.seed, kind)
        those = [name for name in names if kind_of(name) == kind]
        _set(lab, rounded, {name: far.tensor(name, 1) for name in those})
        lab.bench.hand_over()
        scored = lab.bench.engine.score(rows)
        if scored is None:
            return Rung(WEIGHTS, NAME, COMPARED, Verdict.untestable, note="this engine cannot score given rows")
        told_N = torch.tensor([x for row in scored for x in row], dtype=torch.float64)
        truth, own = (_whole(reference, rows) for reference in (lab.reference, rounded))
        size = size_of(difference(told_N, truth.logp_N), truth.row_N)
        bound = _bound(size_of(own.logp_N - truth.logp_N, truth.row_N), lab)
        cause = _judged(lab, far, those, truth, told_N, size, bound)
        if cause is not None:
            return measured(WEIGHTS, NAME, COMPARED, Verdict.differs, size, bound, cause)
        worst = max(worst, (size.mean_abs / bound.mean, size, bound), key=lambda each: each[0])
        count, kinds = count + size.tokens, kinds + 1
        _set(lab, rounded, {name: lab.versions.tensor(name, 0) for name in those})
    lab.bench.hand_over()
    note = f"{kinds} kinds; the one that is farthest off is shown"
    return measured(WEIGHTS, NAME, COMPARED, Verdict.rounding, worst[1], worst[2], note=note)


def _set(lab: Lab, rounded: Reference | None, weights: dict[str, Tensor]) -> None:
    own = dict(lab.bench.policy.model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    lab.reference.use(weights)
    if rounded is not None:
        rounded.use(weights)


def _whole(reference: Reference, rows: Sequence[tuple[int, ...]]) -> Truth:
    """The reference's view of all tokens of the rows but their first, at T=1."""
    samples = [
        Sample(Prompt(NOBODY, row[:1]), row[1:], (0.0,) * (len(row) - 1), (0,) * (len(row) - 1), Finish.stop)
        for row in rows
    ]
    return reference.truth(samples, 1.0, ())


def _bound(own: Size, lab: Lab) -> Bound:
    """By the dtype's rounding under these weights, or by the engine's own before (8-bit keys and values)."""
    before = lab.engine_size
    mean, rms = max(own.mean_abs, before.mean_abs), max(own.rms, before.rms)
    return Bound(CERTAIN * mean + lab.fine.mean, CERTAIN * rms + lab.fine.rms, torch.inf, coarse=True)


def _judged(
    lab: Lab, far: Far, names: Sequence[str], truth: Truth, told_N: Tensor, size: Size, bound: Bound
) -> Cause | None:
    """Within doubt nothing; else the tensors whose old values account for it, and beyond certainty even without."""
    if size.mean_abs <= bound.mean * DOUBTFUL / CERTAIN:
        return None
    swapped = Swapped(lab.reference, far, 1, lambda truth: truth.logp_N)
    sets = {name: [name] for name in names} | groups(names)
    guesses = [
        Guess("stale_group", f"{text}: not handed over (it stays when it is moved)", HAND_OVER, swapped.at(those, 0))
        for text, those in sets.items()
    ]
    found = explain(truth, told_N, truth.logp_N, guesses, bound)
    if found is not None:
        return found.cause("hand-over")
    if size.within(bound):
        return None
    text = f"after {far.kind} was moved the engine is off by {size.mean_abs:.3g} nats; no single tensor accounts for it"
    return Cause("unexplained", text, HAND_OVER, "hand-over")


# -- where a hand-over goes wrong -------------------------------------------------------------------------------------


def silenced(lab: Lab, version: int) -> str | None:
    """The block whose output, set to 0 by a hand-over, makes the engine agree: what is wrong is in there.

    None when no single block is, or the engine cannot score. Everything holds ``version`` again afterwards.
    """
    rows = [(*sample.prompt.ids, *sample.ids) for sample in lab.samples[:: max(1, lab.effort.group)][:ROWS]]
    blocks = [name for name in lab.versions.base if OUT_OF_A_BLOCK.search(name)]
    if not blocks or lab.engine_bound.coarse or _agrees_with(lab, rows, {}):
        return None
    found = None
    for name in blocks:
        own = lab.versions.tensor(name, version)
        if _agrees_with(lab, rows, {name: torch.zeros_like(own)}):
            found = name
        _set(lab, None, {name: own})
        if found is not None:
            break
    lab.bench.hand_over()
    return found


def _agrees_with(lab: Lab, rows: Sequence[tuple[int, ...]], weights: dict[str, Tensor]) -> bool:
    _set(lab, None, weights)
    lab.bench.hand_over()
    scored = lab.bench.engine.score(rows)
    if scored is None:
        return False
    truth = _whole(lab.reference, rows)
    told_N = torch.tensor([x for row in scored for x in row], dtype=torch.float64)
    return size_of(difference(told_N, truth.logp_N), truth.row_N).within(lab.fine)
