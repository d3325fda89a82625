"""Readings in which the forward pass is another one: rotary base, positions, attention, activation, a layer, a scale.

Each changes the reference, asks it, and changes it back. Numbers in them are fitted (Gauss-Newton on one number) to a
few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.lab.parity.readings import Guess, Predict
from trimtab.lab.parity.reference import Reference, Truth, view

Change = Callable[[], Callable[[], None]]
"""Makes the reference another model; what it returns undoes that."""
ROWS, TOKENS, STEPS, SMALL = 3, 24, 4, 0.02
FINELY = "the model's configuration and kernels on this side: "


def forwards(reference: Reference, truth: Truth, told_N: Tensor) -> Iterator[Guess]:
    """Every other forward pass that is worth a try, under the weights that the reference has now."""
    if not truth.samples:
        return
    part, told = _worst(truth, told_N)
    fitted = _Fitted(reference, part, told)
    yield from _rotary(fitted)
    yield from _attention(fitted)
    yield from _epsilon(reference)
    yield from _activation(reference)
    yield from _windows(reference, truth)
    yield from _skipped(reference)
    yield from _scaled(fitted)


def _worst(truth: Truth, told_N: Tensor) -> tuple[Truth, Tensor]:
    """The shortest rows among those that are clearly off (positions bend less there), with what was told of them."""
    gap_N = (told_N - truth.logp_N).nan_to_num(0.0).clamp(-1, 1).abs()
    means = [float(row.mean()) if len(row) else -1.0 for row in truth.rows(gap_N)]
    off = [row for row, mean in enumerate(means) if mean > 0.3 * max(means)]
    lengths = [len(sample.prompt.ids) + len(sample.ids) for sample in truth.samples]
    rows = sorted(sorted(off, key=lambda row: lengths[row])[:ROWS])
    return truth.pick(rows), told_N[truth.tokens_of(rows)]


def _under(reference: Reference, change: Change) -> Predict:
    def predict(truth: Truth) -> Tensor:
        undo = change()
        try:
            return reference.truth(truth.samples, truth.temperature, truth.stop_ids).logp_N
        finally:
            undo()

    return predict


class _Fitted:
    """Readings of one number x (0: no change), fitted on a few rows."""

    def __init__(self, reference: Reference, part: Truth, told_N: Tensor) -> None:
        self.reference, self.part, self.told = reference, part, told_N

    def _left(self, predict: Predict) -> Tensor:
        return (self.told - predict(self.part)).nan_to_num(1.0).clamp(-1, 1)

    def best(self, of: Callable[[float], Change], grid: Sequence[float]) -> float:
        """The x of least squared difference: the best of the grid, then Gauss-Newton steps as long as they help."""

        def left(x: float) -> Tensor:
            return self._left(_under(self.reference, of(x)))

        tried = {x: left(x) for x in grid}
        x = min(tried, key=lambda x: float(tried[x].square().sum()))
        now = tried[x]
        for _ in range(STEPS):
            slope = (left(x + 1e-3) - now) / 1e-3
            step = -float((now * slope).sum()) / max(float(slope.square().sum()), 1e-30)
            step = max(-0.7, min(0.7, step))
            then = left(x + step)
            if not float(then.square().sum()) < float(now.square().sum()):
                break
            x, now = x + step, then
        return x


# -- positions and attention ------------------------------------------------------------------------------------------


def _frequencies(reference: Reference, factor: Callable[[Tensor], Tensor]) -> Change:
    """Change every rotary frequency; ``factor`` of each one's number over their count, in [0, 1)."""

    def change() -> Callable[[], None]:
        kept = [
            (buffer, buffer.clone())
            for module in reference.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name == "inv_freq"
        ]
        for buffer, own in kept:
            buffer.copy_(own * factor(torch.arange(len(own)) / len(own)))

        def undo() -> None:
            for buffer, own in kept:
                buffer.copy_(own)

        return undo

    return change


def _rotary(fitted: _Fitted) -> Iterator[Guess]:
    reference = fitted.reference
    if not any(name.endswith("inv_freq") for name, _ in reference.model.named_buffers()):
        return

    def base(x: float) -> Change:
        return _frequencies(reference, lambda where: torch.exp(-x * where))

    def scale(x: float) -> Change:
        return _frequencies(reference, lambda where: torch.full_like(where, math.exp(x)))

    logs = [math.log(x) for x in (0.01, 0.1, 0.4, 0.7, 1.0, 1.4, 2.5, 10.0, 100.0)]
    x = fitted.best(base, logs)
    yield Guess(
        "rope_theta",
        f"positions are rotated with a base (rope_theta) of {math.exp(x):.4g} times the model's",
        FINELY + "rope_theta, rope scaling",
        _under(reference, base(x)),
        True,
    )
    x = fitted.best(scale, [math.log(x) for x in (0.125, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0)])
    yield Guess(
        "rope_scaling",
        f"positions, or their rotary frequencies, are multiplied by {math.exp(x):.4g}",
        FINELY + "position ids from 0 in steps of 1, rope scaling",
        _under(reference, scale(x)),
        True,
    )


def _setting(modules: Sequence[Any], name: str, value: Callable[[Any], Any]) -> Change:
    """Set an attribute of each module by its own value."""

    def change() -> Callable[[], None]:
        kept = [(module, getattr(module, name)) for module in modules]
        for module, own in kept:
            setattr(module, name, value(own))

        def undo() -> None:
            for module, own in kept:
                setattr(module, name, own)

        return undo

    return change


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _with(reference: Reference, name: str) -> list[Any]:
    return [module for module in reference.model.modules() if name in vars(module)]


def _attention(fitted: _Fitted) -> Iterator[Guess]:
    reference = fitted.reference
    modules = [module for module in _with(reference, "scaling") if isinstance(module.scaling, float)]
    if not modules:
        return

    def scaled(x: float) -> Change:
        return _setting(modules, "scaling", lambda own: own * math.exp(x))

    x = fitted.best(scaled, [math.log(x) for x in (0.35, 0.7, 1.0, 1.4, 3.0)])
    yield Guess(
        "attention_scale",
        f"attention scores are multiplied by {math.exp(x):.4g}",
        FINELY + "attention scale (1/sqrt of the head's width)",
        _under(reference, scaled(x)),
        True,
    )


def _windows(reference: Reference, truth: Truth) -> Iterator[Guess]:
    longest = max(len(sample.prompt.ids) + len(sample.ids) for sample in truth.samples)
    for size in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096):
        if size < longest - 1:
            text = f"attention sees the last {size} tokens alone"
            yield Guess("window", text, FINELY + "sliding window, maximum length", _windowed(reference, size))


def _windowed(reference: Reference, size: int) -> Predict:
    def predict(truth: Truth) -> Tensor:
        parts = []
        for sample in truth.samples:
            row = (*sample.prompt.ids, *sample.ids)[:-1]
            parts.append(reference.windowed(row, size)[len(sample.prompt.ids) - 1 :])
        return view(truth.samples, parts, truth.temperature, truth.stop_ids).logp_N

    return predict


# -- layers -----------------------------------------------------------------------------------------------------------


def _epsilon(reference: Reference) -> Iterator[Guess]:
    modules = [module for name in ("variance_epsilon", "eps") for module in _with(reference, name)]
    for value in (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        for name in ("variance_epsilon", "eps"):
            those = [module for module in modules if name in vars(module) and vars(module)[name] != value]
            if those:
                text = f"norms compute with epsilon {value:g}, not {vars(those[0])[name]:g}"
                change = _setting(those, name, _always(value))
                yield Guess("norm_epsilon", text, FINELY + "rms_norm_eps", _under(reference, change))


def _activation(reference: Reference) -> Iterator[Guess]:
    modules = [module for module in reference.model.modules() if "act_fn" in dict(module.named_children())]
    others: dict[str, nn.Module] = {
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": nn.SiLU(),
        "relu": nn.ReLU(),
    }
    for name, other in others.items():
        if modules:
            change = _setting(modules, "act_fn", _always(other))
            text = f"the feed-forward layers' activation is {name}, not the model's"
            yield Guess("activation", text, FINELY + "hidden_act", _under(reference, change))


def _skipped(reference: Reference) -> Iterator[Guess]:
    layers = dict(reference.model.get_decoder().named_children()).get("layers")
    if not isinstance(layers, nn.ModuleList):
        return
    for number, layer in enumerate(layers):
        text = f"layer {number} is left out"
        yield Guess("layer_skipped", text, FINELY + "every layer once, in order", _under(reference, _passing(layer)))


def _passing(layer: nn.Module) -> Change:
    def hook(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any], __: Any) -> Any:
        return args[0] if args else given["hidden_states"]

    return lambda: layer.register_forward_hook(hook, with_kwargs=True).remove


def _scaled(fitted: _Fitted) -> Iterator[Guess]:
    """One tensor times a factor: the one whose derivative explains most of the difference, then fitted."""
    reference = fitted.reference
    own = dict(reference.model.named_parameters())
    few = fitted.part.few(ROWS)
    count = min(TOKENS, len(few.token_N))
    left = (fitted.told - few.logp_N).nan_to_num(0.0).clamp(-1, 1)[:count]
    slopes = _slopes(reference, few, count)
    explained = (slopes.T @ left).square() / slopes.square().sum(0).clamp(min=1e-30)
    for number in explained.argsort(descending=True)[:2].tolist():
        name = list(own)[number]

        scaled = _times(own[name])
        x = fitted.best(scaled, [math.log(x) for x in (0.5, 0.9, 1.0, 1.1, 2.0)])
        if abs(x) > 1e-5:
            yield Guess(
                "scaled_tensor",
                f"{name} acts as if it were multiplied by {math.exp(x):.4g}",
                f"what becomes of {name} on this side: its values, or the layer's kernel",
                _under(reference, scaled(x)),
                True,
            )


def _times(tensor: Tensor) -> Callable[[float], Change]:
    def change(x: float) -> Callable[[], None]:
        kept = tensor.detach().clone()
        tensor.detach().mul_(math.exp(x))

        def undo() -> None:
            tensor.detach().copy_(kept)

        return undo

    return lambda x: lambda: change(x)


def _slopes(reference: Reference, truth: Truth, count: int) -> Tensor:
    """[count, tensors]: derivative of each of the first tokens' log-probs by the logarithm of each tensor's scale."""
    model = reference.model
    parameters = list(model.parameters())
    made: list[list[float]] = []
    model.requires_grad_(True)
    try:
        with torch.enable_grad():
            for sample in truth.samples:
                row = torch.tensor([(*sample.prompt.ids, *sample.ids)[:-1]])
                logits = model(input_ids=row, use_cache=False).logits[0, len(sample.prompt.ids) - 1 :].float()
                logp = functional.log_softmax(logits / (truth.temperature or 1.0), -1)
                for place, token in enumerate(sample.ids):
                    if len(made) == count:
                        break
                    parts = torch.autograd.grad(logp[place, token], parameters, retain_graph=True, allow_unused=True)
                    made.append(
                        [
                            0.0 if g is None else float((g * p.detach()).sum())
                            for g, p in zip(parts, parameters, strict=True)
                        ]
                    )
    finally:
        model.requires_grad_(False)
    return torch.tensor(made, dtype=torch.float64)
