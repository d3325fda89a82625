"""Readings in which the engine saw another prompt than the one that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from trimtab.lab.parity.readings import Guess, Predict
from trimtab.lab.parity.reference import Ids, Reference, Truth, view

Change = Callable[[Ids, int], Ids]  # a prompt and its row's number
Places = Callable[[int, int], int]  # a token's number in its row, and the prompt's length
MEND = "hand the engine the prompt's own token ids (token-in, token-out), unpadded or with the padding masked"


def contexts(reference: Reference, truth: Truth) -> Iterator[Guess]:
    """Each way in which a prompt's ids may have been changed before they were sampled from."""
    prompts = [sample.prompt.ids for sample in truth.samples]
    bos = reference.model.config.bos_token_id
    changes: list[tuple[str, str, Change]] = []
    if isinstance(bos, int):
        changes.append(
            ("double_bos", "the engine puts one more begin token before the prompt", lambda ids, _: (bos, *ids))
        )
        if all(ids[0] == bos for ids in prompts):
            changes.append(
                ("bos_dropped", "the prompt's begin token is missing on the engine's side", lambda ids, _: ids[1:])
            )
    changes.append(("prompt_cut", "the prompt's first token is missing on the engine's side", lambda ids, _: ids[1:]))
    changes.append(("prompt_cut", "the prompt's last token is missing on the engine's side", lambda ids, _: ids[:-1]))
    changes.append(("prompt_cut", "the prompt is missing but for its last token", lambda ids, _: ids[-1:]))
    longest = max(len(ids) for ids in prompts)
    for size in (16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048):
        if size < longest:
            changes.append(("prompt_cut", f"prompts are cut to their last {size} tokens", _last(size)))
            changes.append(("prompt_cut", f"prompts are cut to their first {size} tokens", _first(size)))
    for by in (1, -1):
        changes.append(("other_prompt", "the response was sampled from another prompt", _other(prompts, by)))
    for name, text, change in changes:
        yield Guess(name, text, MEND, _predict(reference, change))
    yield from _padding(reference, truth)
    yield from _positions(reference, truth)


def _widths(truth: Truth) -> list[int]:
    """To how many tokens prompts may have been padded: the longest of all, and of those that are not long ones."""
    lengths = [len(sample.prompt.ids) for sample in truth.samples]
    longest = max(lengths)
    widths = {longest, max((n for n in lengths if n < 0.7 * longest), default=0)}
    return [width for width in sorted(widths) if min(lengths) < width]


def _padding(reference: Reference, truth: Truth) -> Iterator[Guess]:
    """Padding that is attended to: all of it or one token, counted in the positions or not."""
    pads = dict.fromkeys((0, reference.model.config.pad_token_id, reference.model.config.eos_token_id))
    for pad in pads:
        for width in _widths(truth):
            for most, counted in ((width, True), (width, False), (1, False), (1, True)):
                if isinstance(pad, int):
                    text = f"prompts are padded on the left with token {pad} and the padding is attended to"
                    text += "" if most == width else " (one token of it)"
                    yield Guess("padding_seen", text, MEND, _padded(reference, pad, width, most, counted))


def _positions(reference: Reference, truth: Truth) -> Iterator[Guess]:
    """Other positions; a constant on all of them changes nothing in rotary models, and is tried for the others."""
    mend = (
        "position ids from 0 in steps of 1 over a row's own tokens: padding not counted, the response after the prompt"
    )
    tried: list[tuple[str, Places]] = []
    for by in (1, -1):
        text = f"positions of the response's tokens are off by {by:+d} against the prompt's"
        tried.append((text, _moved(0, by)))
        tried.append((f"positions are all off by {by:+d}", _moved(by, by)))
    for width in _widths(truth):
        text = f"padding on the left (to {width} tokens) is counted in the positions"
        tried.append((f"{text} of the prompt, but not of the response", _pads_counted(width, True, False)))
        tried.append((f"{text} of the response, but not of the prompt", _pads_counted(width, False, True)))
        tried.append((text, _pads_counted(width, True, True)))
    tried.append(("positions stand still in the response", lambda i, first: min(i, first)))
    tried.append(("positions begin anew in the response", lambda i, first: i if i < first else i - first))
    tried.append(("every position is 0", lambda i, first: 0))
    for text, places in tried:
        yield Guess("positions", text, mend, _displaced(reference, places))


def _moved(prompt: int, response: int) -> Places:
    return lambda i, first: max(i + (prompt if i < first else response), 0)


def _pads_counted(width: int, prompt: bool, response: bool) -> Places:
    return lambda i, first: i + (max(width - first, 0) if (prompt if i < first else response) else 0)


def _padded(reference: Reference, pad: int, width: int, most: int, counted: bool) -> Predict:
    def predict(truth: Truth) -> Tensor:
        parts = []
        for sample in truth.samples:
            more = min(most, max(width - len(sample.prompt.ids), 0))
            row = (*[pad] * more, *sample.prompt.ids, *sample.ids)[:-1]
            places = None if counted else [max(i - more, 0) for i in range(len(row))]
            parts.append(reference.logits(row, places)[len(sample.prompt.ids) + more - 1 :])
        return view(truth.samples, parts, truth.temperature, truth.stop_ids).logp_N

    return predict


def _last(size: int) -> Change:
    return lambda ids, _: ids[-size:]


def _first(size: int) -> Change:
    return lambda ids, _: ids[:size]


def _other(prompts: Sequence[Ids], by: int) -> Change:
    return lambda _, row: prompts[(row + by) % len(prompts)]


def _displaced(reference: Reference, at: Places) -> Predict:
    def predict(truth: Truth) -> Tensor:
        parts = []
        for sample in truth.samples:
            first, row = len(sample.prompt.ids), (*sample.prompt.ids, *sample.ids)[:-1]
            places = [at(i, first) for i in range(len(row))]
            parts.append(reference.logits(row, places)[first - 1 :])
        return view(truth.samples, parts, truth.temperature, truth.stop_ids).logp_N

    return predict


def _predict(reference: Reference, change: Change) -> Predict:
    def predict(truth: Truth) -> Tensor:
        changed = [change(sample.prompt.ids, row) for row, sample in enumerate(truth.samples)]
        return reference.truth(truth.samples, truth.temperature, truth.stop_ids, changed).logp_N

    return predict
