"""Readings in which the engine holds other weights: an older version, a group that was left behind, coarser numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trimtab.lab.parity.model import Bound, size_of
from trimtab.lab.parity.readings import Guess, Predict
from trimtab.lab.parity.reference import Reference, Truth, Versions, view

Weights = dict[str, Tensor]
OUT_OF_A_BLOCK = re.compile(r"(o_proj|down_proj|c_proj|out_proj|wo|fc2|dense|dense_4h_to_h)\.weight$")
HAND_OVER = "policy.weights -> engine.load must bring every weight, each time (mismatch=none)"
MANY = 60
"""Tensors up to which each one is tried by itself."""


def kind_of(name: str) -> str:
    """``self_attn.q_proj.weight`` of ``model.layers.3.self_attn.q_proj.weight``."""
    return re.sub(r"^.*?\.\d+\.", "", name)


def layer_of(name: str) -> str | None:
    found = re.match(r"^(.*?\.\d+)\.", name)
    return found.group(1) if found else None


def groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Tensors that may be left behind together: each kind across layers, each layer, each that stands alone."""
    made: dict[str, list[str]] = {}
    for name in names:
        layer = layer_of(name)
        made.setdefault(f"{kind_of(name)} of every layer" if layer else name, []).append(name)
    for name in names:
        if layer := layer_of(name):
            made.setdefault(f"{layer}, all of it", []).append(name)
            block = f"{layer}.{kind_of(name).partition('.')[0]}"
            if "norm" not in block:
                made.setdefault(f"{block}, all of it", []).append(name)
    joint: dict[str, list[str]] = {}
    for text, part in (("attention", "attn"), ("feed-forward", "mlp"), ("norm", "norm"), ("bias", ".bias")):
        those = [name for name in names if part in name]
        if 1 < len(those) < len(names):
            joint[f"every {text} weight"] = those
    return made | joint


class Swapped:
    """Guesses about weights: the reference is set to others, asked, and set back."""

    def __init__(self, reference: Reference, versions: Versions, version: int, read: Predict) -> None:
        self._reference, self._versions, self._version, self._read = reference, versions, version, read

    def under(self, weights: Callable[[], Weights]) -> Predict:
        """Predicts by other weights (those it names; the others stay)."""

        def predict(truth: Truth) -> Tensor:
            changed = weights()
            kept = {name: self._versions.tensor(name, self._version) for name in changed}
            self._reference.use(changed)
            try:
                return self._read(self._reference.truth(truth.samples, truth.temperature, truth.stop_ids))
            finally:
                self._reference.use(kept)

        return predict

    def at(self, names: Sequence[str], version: int) -> Predict:
        return self.under(lambda: {name: self._versions.tensor(name, version) for name in names})

    def with_head(self, version: int) -> Predict:
        """The output matrix of another version, where it is tied to the embedding."""

        def predict(truth: Truth) -> Tensor:
            old = self._versions.tensor(self._reference.head, version)
            return self._read(self._reference.with_head(old, truth.samples, truth.temperature, truth.stop_ids))

        return predict

    def with_embedding(self, version: int) -> Predict:
        """The embedding of another version under the new output matrix, where they are tied."""

        def predict(truth: Truth) -> Tensor:
            name = self._reference.head
            old, new = self._versions.tensor(name, version), self._versions.tensor(name, self._version)
            self._reference.use({name: old})
            try:
                seen = self._reference.with_head(new, truth.samples, truth.temperature, truth.stop_ids)
                return self._read(seen)
            finally:
                self._reference.use({name: new})

        return predict

    # -- what may have gone wrong ---------------------------------------------------------------------------------

    def older(self, older: Sequence[int]) -> Iterator[Guess]:
        names = list(self._versions.base)
        for version in older:
            text = f"all weights are still those of version {version}, not of {self._version}"
            yield Guess("stale", text, HAND_OVER, self.at(names, version))

    def tied(self, older: Sequence[int]) -> Iterator[Guess]:
        if not self._reference.tied:
            return
        for version in older:
            yield Guess(
                "stale_head",
                f"the output matrix, tied to the embedding, is still of version {version}: the "
                "embedding alone was updated",
                "tie the head again after a hand-over, or drop its copy (packed or float32)",
                self.with_head(version),
            )
            yield Guess(
                "stale_embedding",
                f"the embedding is still of version {version}: the output matrix alone was updated",
                "tie the embedding again after a hand-over",
                self.with_embedding(version),
            )

    def left_behind(self, older: Sequence[int]) -> Iterator[Guess]:
        for version in older:
            for text, names in groups(list(self._versions.base)).items():
                name = "stale_head" if names == [self._reference.head] and not self._reference.tied else "stale_group"
                yield Guess(name, f"{text}: still of version {version}", HAND_OVER, self.at(names, version))

    def single(self, older: Sequence[int], within: Sequence[str]) -> Iterator[Guess]:
        for version in older:
            for name in within:
                yield Guess("stale_group", f"{name}: still of version {version}", HAND_OVER, self.at([name], version))

    def coarser(self, steps: Sequence[float]) -> Iterator[Guess]:
        names = list(self._versions.base)
        mend = "hand over the weights as they are: no rounding, no quantisation (mismatch=none)"

        def rounded(dtype: torch.dtype) -> Callable[[], Weights]:
            return lambda: {n: self._versions.tensor(n, self._version).to(dtype).float() for n in names}

        for dtype, text in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float8_e4m3fn, "float8")):
            yield Guess(
                "weights_dtype",
                f"weights are rounded to {text}",
                "rollout.dtype=float32 (mismatch=none)",
                self.under(rounded(dtype)),
            )
        for step in steps:
            for flat in (False, True):
                yield Guess(
                    "quantised_weights",
                    f"weight matrices are rounded to steps of {step:.3g} times "
                    f"{'the tensor' if flat else 'each row'}'s largest",
                    mend,
                    self.under(self._quantised(step, flat)),
                )

    def _quantised(self, step: float, flat: bool) -> Callable[[], Weights]:
        def made() -> Weights:
            found = {}
            for name in self._versions.base:
                w = self._versions.tensor(name, self._version)
                if w.ndim == 2:
                    size = step * (w.abs().max() if flat else w.abs().amax(1, keepdim=True)).clamp(min=1e-30)
                    found[name] = (w / size).round() * size
            return found

        return made

    def mixed_up(self) -> Iterator[Guess]:
        names = list(self._versions.base)
        mend = "each weight under its own name and as it lies: policy.weights -> engine.load"
        kinds = {kind_of(name): self._versions.base[name] for name in names}
        shapes = sorted((kind, tuple(w.shape)) for kind, w in kinds.items() if w.ndim == 2)
        for i, (a, shape) in enumerate(shapes):
            if shape[0] == shape[1]:
                yield Guess("transposed", f"{a} is handed over transposed", mend, self.under(self._turned(a)))
            for b, other in shapes[i + 1 :]:
                if shape == other:
                    yield Guess("swapped", f"{a} and {b} are exchanged", mend, self.under(self._exchanged(a, b)))
        for a in kinds:
            for factor in (0.5, 2.0, 0.0):
                yield Guess(
                    "scaled_weight", f"{a} is multiplied by {factor:g}", mend, self.under(self._scaled(a, factor))
                )

    def _of(self, kind: str) -> Weights:
        return {n: self._versions.tensor(n, self._version) for n in self._versions.base if kind_of(n) == kind}

    def _turned(self, kind: str) -> Callable[[], Weights]:
        return lambda: {name: w.t() for name, w in self._of(kind).items()}

    def _scaled(self, kind: str, factor: float) -> Callable[[], Weights]:
        return lambda: {name: w * factor for name, w in self._of(kind).items()}

    def _exchanged(self, a: str, b: str) -> Callable[[], Weights]:
        def made() -> Weights:
            left, right = list(self._of(a).items()), list(self._of(b).items())
            pairs = list(zip(left, right, strict=False))
            return {l[0]: r[1] for l, r in pairs} | {r[0]: l[1] for l, r in pairs}  # noqa: E741

        return made

    def stale_prefix(self, older: Sequence[int], blocks: Sequence[int]) -> Iterator[Guess]:
        """Keys and values of the prompt's full blocks, made by older weights."""
        for version in older:
            for block in blocks:
                yield Guess(
                    "stale_prefix_cache",
                    f"cached prefixes (blocks of {block} tokens) are still of version "
                    f"{version}: the cache outlived the hand-over",
                    "rollout.cache_reset=reset or salt, or rollout.prefix_caching=false",
                    self._on_old_prefix(version, block),
                )

    def _on_old_prefix(self, version: int, block: int) -> Predict:
        def predict(truth: Truth) -> Tensor:
            before, parts = self._versions.weights(version), []
            known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
            for sample in truth.samples:
                prompt = sample.prompt.ids
                cached = (len(prompt) - 1) // block * block
                row = (*prompt, *sample.ids)[:-1]
                key = (prompt, sample.ids)
                if key not in known:
                    logits = (
                        self._reference.logits_on(row[:cached], row[cached:], before)
                        if cached
                        else self._reference.logits(row)
                    )
                    known[key] = logits[len(prompt) - 1 - cached :]
                parts.append(known[key])
            return self._read(view(truth.samples, parts, truth.temperature, truth.stop_ids))

        return predict


def best_groups(
    truth: Truth, told_N: Tensor, expected_N: Tensor, guesses: Sequence[Guess]
) -> list[tuple[float, Guess]]:
    """Guesses by how much of the squared difference each explains, best first."""
    gap = (told_N - expected_N).clamp(-5, 5)
    whole = float(gap.nan_to_num().square().sum())
    found = []
    for guess in guesses:
        left = (told_N - guess.predict(truth)).clamp(-5, 5)
        found.append((1 - float(left.nan_to_num(5.0).square().sum()) / max(whole, 1e-300), guess))
    return sorted(found, key=lambda each: -each[0])


def fits(truth: Truth, told_N: Tensor, guess: Guess, bound: Bound) -> bool:
    return size_of(told_N - guess.predict(truth), truth.row_N).within(bound)
