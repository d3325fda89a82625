"""Third part of the ladder: does the engine sample from the trainer's weights after each hand-over?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from trimtab.batch import Sample
from trimtab.errors import TrimtabError
from trimtab.lab.parity.explain import difference, hidden
from trimtab.lab.parity.kinds import one_kind_at_a_time, silenced
from trimtab.lab.parity.model import Cause, Rung, Section, Verdict, measured, size_of
from trimtab.lab.parity.readings import Guess, Predict, slowly
from trimtab.lab.parity.reference import Truth
from trimtab.lab.parity.sampler import structure
from trimtab.lab.parity.state import Lab
from trimtab.lab.parity.swaps import MANY, Swapped, best_groups, kind_of, layer_of

WEIGHTS = Section.weights
STEPS = (1 / 127, 1 / 7, 1 / 15, 1 / 31, 1 / 63, 1 / 255, 1 / 448)
CHECKED_ROWS = 6
SCORED = ("hand-over", "engine's scoring,")


def climb(lab: Lab) -> None:
    """All rungs of this part; afterwards both sides hold the last version."""
    own_weights(lab)
    handed_list(lab)
    for version in range(1, lab.effort.versions + 1):
        if not hand_over(lab, version):
            break
    one_kind_at_a_time(lab)
    lab.add(
        Rung(
            WEIGHTS,
            "LoRA adapters",
            "an engine with an adapter, and one with merged weights",
            Verdict.untestable,
            note="adapters are not part of this version: whole weights are handed over",
        )
    )


def own_weights(lab: Lab) -> None:
    """The trainer's weights against those in the model's folder."""
    compared = "the trainer's weights as loaded, and those in the model's folder"
    model = dict(lab.bench.policy.model.named_parameters())
    wrong = [
        name
        for name in lab.versions.base
        if name not in model or not torch.equal(model[name].detach().float().cpu(), lab.versions.tensor(name, 0))
    ]
    cause = None
    if wrong:
        cause = Cause(
            "other_weights",
            f"{len(wrong)} of {len(model)} tensors of the trainer are not the folder's, among them {wrong[0]}",
            "policy.path: both sides must load one folder",
            "trainer",
        )
    lab.add(
        Rung(
            WEIGHTS,
            "trainer's own weights",
            compared,
            Verdict.differs if wrong else Verdict.equal,
            unit="tensors",
            value=float(len(wrong)),
            count=len(model),
            cause=cause,
        )
    )


def handed_list(lab: Lab) -> None:
    """What the trainer hands over against what it trains: names and values."""
    compared = "what policy.weights() gives, and the trained parameters"
    own = {name: p.detach() for name, p in lab.bench.policy.model.named_parameters()}
    given = dict(lab.bench.policy.weights())
    if not given.keys() & own.keys():
        lab.add(
            Rung(
                WEIGHTS,
                "what is handed over",
                compared,
                Verdict.untestable,
                note="this model's weights have other "
                "names in a checkpoint than in memory; the rungs below verify by scoring",
            )
        )
        return
    missing = sorted(own.keys() - given.keys())
    other = sorted(
        name
        for name in own.keys() & given.keys()
        if given[name].shape != own[name].shape or not torch.equal(given[name].float(), own[name].float())
    )
    cause = None
    if missing or other:
        text = (
            f"policy.weights() leaves out {missing[:3]} ({len(missing)})"
            if missing
            else (f"policy.weights() gives other values than are trained for {other[:3]} ({len(other)} tensors)")
        )
        cause = Cause("handed_values", text, "hand over the very tensors that are trained", "hand-over")
    lab.add(
        Rung(
            WEIGHTS,
            "what is handed over",
            compared,
            Verdict.differs if cause else Verdict.equal,
            unit="tensors",
            value=float(len(missing) + len(other)),
            count=len(own),
            cause=cause,
        )
    )


def hand_over(lab: Lab, version: int) -> bool:
    """Move the trainer's weights, hand them over, and look at both sides; False when the engine refuses."""
    compared = f"the engine after hand-over {version} (every weight moved), and the reference with the same weights"
    name = f"hand-over {version}"
    moved = lab.versions.weights(version)
    _move(lab, moved)
    try:
        lab.bench.hand_over()
        number = lab.bench.version
        sampling = lab.sampling(group=2, seed=10 + version)
        samples = lab.bench.engine.generate(lab.shorts[:8], sampling)
        samples += lab.bench.engine.generate(lab.longs, sampling) if lab.longs else []
        rows = [(*s.prompt.ids, *s.ids) for s in (*samples[:CHECKED_ROWS], *samples[-2:])]
        scored = lab.bench.engine.score(rows)
    except TrimtabError as error:
        lab.refused(WEIGHTS, name, compared, error, "hand-over")
        return False
    truth = lab.sees(samples)
    spec = lab.bench.spec
    lab.engine_bound = lab.moved_bound(lab.engine_bound, spec.rollout.dtype, truth)
    lab.trainer_bound = lab.moved_bound(lab.trainer_bound, spec.policy.dtype, truth)
    before = any(rung.fault and not rung.follows and rung.name.startswith(SCORED) for rung in lab.rungs)
    fault = engine_rung(
        lab, name, compared, truth, truth.reported(), lab.expected(truth), version, lab.expected, before
    )
    if fault and not before:
        _narrowed(lab, version)
    if version == 1:
        labels = structure(samples, lab.bench.stop_ids, lab.effort.tokens, number)
        cause = next((cause for cause in labels if cause.name == "version"), None)
        lab.add(
            Rung(
                WEIGHTS,
                "version labels",
                "the version of each token, and that of the last hand-over",
                Verdict.differs if cause else Verdict.equal,
                unit="responses",
                count=len(samples),
                cause=cause,
            )
        )
    if scored is not None:
        _scored(lab, version, rows, scored, samples, before or fault)
    _trainer(lab, version, samples, truth)
    return True


def _narrowed(lab: Lab, version: int) -> None:
    """For a hand-over that nothing explains: what can be said of it, and in which block it goes wrong."""
    rung = lab.rungs[-1]
    if rung.follows or rung.cause is None or rung.cause.name not in ("noise", "unexplained"):
        return
    block = silenced(lab, version)
    text = (
        f"after the hand-over the engine is off by {rung.value:.3g} nats, not before: weights arrive changed, "
        "in no way that was tried (stale, rounded, scaled, transposed, exchanged)"
    )
    text += f"; with {block} set to 0 it agrees: the weights of that block are wrong" if block else ""
    mend = "policy.weights -> engine.load: names, order, shape and split of packed weights" + (
        f", of the block of {block}" if block else ""
    )
    lab.rungs[-1] = replace(rung, cause=Cause("weights_changed", text, mend, "hand-over"))


def _move(lab: Lab, weights: dict[str, Tensor]) -> None:
    own = dict(lab.bench.policy.model.named_parameters())
    with torch.no_grad():  # in place, as an optimiser does
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    lab.reference.use(weights)


def engine_rung(
    lab: Lab,
    name: str,
    compared: str,
    truth: Truth,
    told_N: Tensor,
    expected_N: Tensor,
    version: int,
    read: Predict,
    before: bool,
    side: str = "hand-over",
) -> bool:
    """Judge the engine under the weights of ``version``; whether it differs."""
    size = size_of(difference(told_N, expected_N), truth.row_N)
    if lab.as_before(size) and not size.within(lab.engine_bound):
        note = "as far off as before any hand-over"
        lab.add(measured(WEIGHTS, name, compared, Verdict.differs, size, follows=True, note=note))
        return True
    guesses = suspects(lab, truth, told_N, expected_N, version, read)
    rung, _ = lab.judge(
        WEIGHTS,
        name,
        compared,
        truth,
        told_N,
        expected_N,
        side,
        lab.engine_bound,
        guesses,
        other="the trainer's own weights are looked at below",
        search=not before,
    )
    known = {r.cause.name for r in lab.rungs if r.fault and r.cause is not None and r.section is not WEIGHTS}
    if rung.cause is not None and rung.cause.name in known:
        rung = lab.rungs[-1] = replace(rung, follows=True)
    if not rung.fault and lab.engine_bound.coarse and version == 1:
        swapped = Swapped(lab.reference, lab.versions, version, read)
        part = truth.pick(range(0, len(truth.samples), 2))
        at = truth.tokens_of(range(0, len(truth.samples), 2))
        found = hidden(part, told_N[at], expected_N[at], chain(swapped.older([0]), swapped.tied([0])), tokens=24)
        if found is not None:
            lab.rungs[-1] = Rung(
                WEIGHTS,
                name,
                compared,
                Verdict.differs,
                rung.value,
                rung.error,
                rung.bound,
                count=rung.count,
                cause=found.cause(side),
            )
            return True
    return rung.fault


def suspects(
    lab: Lab, truth: Truth, told_N: Tensor, expected_N: Tensor, version: int, read: Predict
) -> Iterator[Guess]:
    """What may be wrong with the engine's weights, likely things first; then every other reading."""
    swapped = Swapped(lab.reference, lab.versions, version, read)
    older = sorted({0, version - 1}, reverse=True)
    running = lab.bench.engine.describe()
    blocks = [n for n in dict.fromkeys((running.get("kv_block_size", 32), 16)) if isinstance(n, int) and n > 0]
    strength = lab.bench.spec.mismatch.strength
    yield from slowly(swapped.older(sorted(range(version), reverse=True)))
    yield from slowly(swapped.tied(older))
    yield from slowly(swapped.left_behind(older))
    yield from slowly(_one_tensor(lab, swapped, older, truth, told_N, expected_N))
    if any(len(sample.prompt.ids) > min(blocks) for sample in truth.samples):
        yield from slowly(swapped.stale_prefix(older, blocks))
    yield from slowly(swapped.coarser([*([strength] if 0 < strength < 1 else []), *STEPS]))
    yield from slowly(swapped.mixed_up())
    yield from lab.readings(truth, told_N)


def _one_tensor(
    lab: Lab, swapped: Swapped, older: Sequence[int], truth: Truth, told_N: Tensor, expected_N: Tensor
) -> Iterator[Guess]:
    """Each tensor by itself, or where they are many those in the kind and the layer that explain most."""
    names = list(lab.versions.base)
    if len(names) <= MANY:
        yield from swapped.single(older, names)
        return
    rows = range(0, len(truth.samples), max(1, len(truth.samples) // 4))
    part, at = truth.pick(rows), truth.tokens_of(rows)
    for version in older:
        kinds = {kind_of(name) for name in names}
        layers = {layer for name in names if (layer := layer_of(name))}
        by_kind = [Guess(kind, "", "", swapped.at([n for n in names if kind_of(n) == kind], version)) for kind in kinds]
        by_layer = [
            Guess(layer, "", "", swapped.at([n for n in names if layer_of(n) == layer], version)) for layer in layers
        ]
        best_kinds = [g.name for _, g in best_groups(part, told_N[at], expected_N[at], by_kind)[:2]]
        best_layers = [g.name for _, g in best_groups(part, told_N[at], expected_N[at], by_layer)[:2]]
        those = [n for n in names if kind_of(n) in best_kinds and layer_of(n) in best_layers]
        yield from swapped.single([version], those)


def _plain(truth: Truth) -> Tensor:
    return truth.logp_N


def _scored(
    lab: Lab,
    version: int,
    rows: Sequence[tuple[int, ...]],
    scored: Sequence[Sequence[float]],
    samples: Sequence[Sample],
    before: bool,
) -> None:
    """The engine's own scoring of whole rows (what the probe of a run asks) against the reference at T=1."""
    compared = f"the engine's scoring of given rows after hand-over {version}, and the reference at T=1"
    chosen = [*samples[:CHECKED_ROWS], *samples[-2:]]
    told = [x for row, sample in zip(scored, chosen, strict=False) for x in row[len(sample.prompt.ids) - 1 :]]
    truth = lab.reference.truth(chosen, 1.0, lab.bench.stop_ids)
    if len(told) != len(truth.token_N):
        cause = Cause(
            "length", f"the engine scored {len(told)} of {len(truth.token_N)} tokens", "one figure a token", "engine"
        )
        lab.add(Rung(WEIGHTS, f"engine's scoring, {version}", compared, Verdict.differs, cause=cause))
        return
    told_N, expected_N = torch.tensor(told, dtype=torch.float64), truth.logp_N
    read: Predict = _plain
    if lab.reading is not None and lab.reading.slow:  # another forward pass may be that of its scoring, too
        other_N = lab.reading.predict(truth)
        if float((told_N - other_N).abs().mean()) < float((told_N - expected_N).abs().mean()):
            expected_N, read = other_N, lab.reading.predict
    engine_rung(
        lab,
        f"engine's scoring, {version}",
        compared,
        truth,
        told_N,
        expected_N,
        version,
        read,
        before,
        side="engine",
    )


def _trainer(lab: Lab, version: int, samples: Sequence[Sample], truth: Truth) -> None:
    """The trainer's scores under the weights it has now."""
    heat = lab.heat or 1.0
    compared = f"the trainer after update {version}, and the reference with the same weights"
    told_N = lab.bench.score(samples, heat).logp_N.detach().double()
    read = lab.trainer_reading.predict if lab.trainer_reading is not None else lambda t: t.logp_N
    predicted_N = read(truth)
    expected_N = torch.where(predicted_N.isnan(), told_N, predicted_N)
    before = lab.trainer_off and lab.trainer_reading is None
    seen = any(rung.fault and rung.name.startswith("trainer after") for rung in lab.rungs)
    swapped = Swapped(lab.reference, lab.versions, version, read)
    older = sorted({0, version - 1}, reverse=True)
    weights = chain(swapped.older(range(version)), swapped.tied(older), swapped.left_behind(older))
    guesses = chain(slowly(weights), lab.readings(truth, told_N))
    lab.judge(
        WEIGHTS,
        f"trainer after update {version}",
        compared,
        truth,
        told_N,
        expected_N,
        "trainer",
        lab.trainer_bound,
        guesses,
        other="the engine is judged by the same reference above",
        search=not before and not seen,
    )
