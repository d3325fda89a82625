"""Readings in which the engine saw another prompt than the one that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from trimtab.lab.parity.readings import Guess, Predict
from trimtab.lab.parity.reference import Ids, Reference, Truth, view

Change = Callable[[Ids, int], Ids]  # a prompt and its row's number
MEND = "hand the engine the prompt's own token ids (token-in, token-out), unpadded or with the padding masked"


def contexts(reference: Reference, truth: Truth) -> Iterator[Guess]:
    """Each way in which a prompt's ids may have been changed before they were sampled from."""
    prompts = [sample.prompt.ids for sample in truth.samples]
    bos = reference.model.config.bos_token_id
    width = max((len(ids) for ids in prompts), default=0)
    changes: list[tuple[str, str, Change]] = []
    if isinstance(bos, int):
        changes.append(
            ("double_bos", "the engine puts one more begin token before the prompt", lambda ids, _: (bos, *ids))
        )
        if all(ids[0] == bos for ids in prompts):
            changes.append(
                ("bos_dropped", "the prompt's begin token is missing on the engine's side", lambda ids, _: ids[1:])
            )
    pads = dict.fromkeys((0, reference.model.config.pad_token_id, reference.model.config.eos_token_id))
    for pad in pads:
        if isinstance(pad, int) and any(len(ids) < width for ids in prompts):
            text = f"prompts are padded on the left with token {pad} and the padding is attended to"
            changes.append(("padding_seen", text, _padded(pad, width)))
    changes.append(("prompt_cut", "the prompt's first token is missing on the engine's side", lambda ids, _: ids[1:]))
    changes.append(("prompt_cut", "the prompt's last token is missing on the engine's side", lambda ids, _: ids[:-1]))
    changes.append(("prompt_cut", "the prompt is missing but for its last token", lambda ids, _: ids[-1:]))
    for by in (1, -1):
        changes.append(("other_prompt", "the response was sampled from another prompt", _other(prompts, by)))
    for name, text, change in changes:
        yield Guess(name, text, MEND, _predict(reference, change))
    for by in (1, -1):
        text = f"positions of the response's tokens are off by {by:+d} against the prompt's"
        yield Guess("positions", text, "count positions on from the prompt, without a gap", _displaced(reference, by))


def _padded(pad: int, width: int) -> Change:
    return lambda ids, _: (*[pad] * (width - len(ids)), *ids)


def _other(prompts: Sequence[Ids], by: int) -> Change:
    return lambda _, row: prompts[(row + by) % len(prompts)]


def _displaced(reference: Reference, by: int) -> Predict:
    def predict(truth: Truth) -> Tensor:
        parts = []
        for sample in truth.samples:
            first, row = len(sample.prompt.ids), (*sample.prompt.ids, *sample.ids)[:-1]
            places = [i + (by if i >= first else 0) for i in range(len(row))]
            parts.append(reference.logits(row, places)[first - 1 :])
        return view(truth.samples, parts, truth.temperature, truth.stop_ids).logp_N

    return predict


def _predict(reference: Reference, change: Change) -> Predict:
    def predict(truth: Truth) -> Tensor:
        changed = [change(sample.prompt.ids, row) for row, sample in enumerate(truth.samples)]
        return reference.truth(truth.samples, truth.temperature, truth.stop_ids, changed).logp_N

    return predict
