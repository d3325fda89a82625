"""Faults to plant, one at a time, in the transformers engine, the hand-over and the trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.batch import Finish, Sample, Sampling, Scores
from trimtab.policy.model import CausalPolicy, Trunk
from trimtab.rollout import transformers as module
from trimtab.rollout.transformers import TransformersEngine

Plant = Callable[[pytest.MonkeyPatch], None]
Step = tuple[Tensor, Tensor]


def answers(change: Callable[[list[Sample], Sampling], list[Sample]]) -> Plant:
    """Change what generate returns."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = TransformersEngine.generate
        patch.setattr(TransformersEngine, "generate", lambda self, p, s: change(true(self, p, s), s))

    return plant


def told(change: Callable[[Sample, Sampling], Sequence[float]]) -> Plant:
    """Change the log-probs of each response."""
    return answers(lambda samples, sampling: [replace(s, logps=tuple(change(s, sampling))) for s in samples])


def step(change: Callable[[Any, Tensor, Tensor, float, Any], Step]) -> Plant:
    """Replace the sampling step; ``change(true, logits, uniform, temperature, mode)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = module.sample_step
        patch.setattr(module, "sample_step", lambda x, u, t, m, *rest: change(true, x, u, t, m))

    return plant


def logits(change: Callable[[Tensor, int], Tensor]) -> Plant:
    """Change the logits that are sampled from, by position in the response."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(TransformersEngine, "_with_noise", lambda self, x, seeds, at: change(x.clone(), at))

    return plant


def handed(change: Callable[[str, Tensor], Tensor | None]) -> Plant:
    """Change each weight on its way; None leaves the engine's own."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = TransformersEngine.load

        def load(self: TransformersEngine, weights: Any, version: int) -> None:
            own = {name: p.detach().clone() for name, p in self._live().named_parameters()}
            given = [(name, change(name, tensor)) for name, tensor in weights]
            true(self, [(name, own[name] if tensor is None else tensor) for name, tensor in given], version)

        patch.setattr(TransformersEngine, "load", load)

    return plant


def scored(change: Callable[[Scores], Scores]) -> Plant:
    """Change the trainer's scores."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = CausalPolicy.score
        patch.setattr(
            CausalPolicy,
            "score",
            lambda self, batch, temperature=1.0, grad=False, entropy=False: change(
                true(self, batch, temperature, grad, entropy)
            ),
        )

    return plant


# -- the faults ------------------------------------------------------------------------------------------------------


def raw(true: Any, logit: Tensor, uniform: Tensor, heat: float, mode: Any) -> Step:
    token, _ = true(logit, uniform, heat, mode)
    return token, torch.log_softmax(logit, -1).gather(-1, token[:, None])[:, 0]


def truncated(kept: Callable[[Tensor], Tensor], renormalised: bool) -> Plant:
    """``kept``: sorted probabilities -> which are kept."""

    def change(true: Any, logit: Tensor, uniform: Tensor, heat: float, mode: Any) -> Step:
        p, order = torch.softmax(logit / (heat or 1.0), -1).sort(-1, descending=True)
        keep = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, kept(p))
        token, logp = true(logit.masked_fill(~keep, -1e9), uniform, heat, mode)
        if renormalised:
            return token, logp
        return token, torch.log_softmax(logit / (heat or 1.0), -1).gather(-1, token[:, None])[:, 0]

    return step(change)


def _drop_end(samples: list[Sample], _: Sampling) -> list[Sample]:
    return [
        replace(s, ids=s.ids[:-1], logps=s.logps[:-1], versions=s.versions[:-1])
        if s.finish is Finish.stop and len(s.ids) > 1
        else s
        for s in samples
    ]


def _shift_some(samples: list[Sample], _: Sampling) -> list[Sample]:
    return [replace(s, logps=(*s.logps[1:], s.logps[0])) if i % 4 == 1 else s for i, s in enumerate(samples)]


def _noisy(sample: Sample, _: Sampling) -> Iterator[float]:
    generator = torch.Generator().manual_seed(sum(sample.ids) * 31 + len(sample.prompt.ids))
    for logp in sample.logps:
        yield min(0.0, logp + 0.02 * float(torch.randn(1, generator=generator)))


def _shared(patch: pytest.MonkeyPatch) -> None:
    true = module.row_seed
    patch.setattr(module, "row_seed", lambda seed, prompt, sample: true(seed, prompt, 0))


def _ignored(patch: pytest.MonkeyPatch) -> None:
    true = module.row_seed
    patch.setattr(module, "row_seed", lambda seed, prompt, sample: true(0, prompt, sample))


def _other_prompt(patch: pytest.MonkeyPatch) -> None:
    true = TransformersEngine.generate

    def generate(self: TransformersEngine, prompts: Any, sampling: Sampling) -> list[Sample]:
        cut = [replace(p, ids=p.ids[:-1] if len(p.ids) > 1 else p.ids) for p in prompts]
        each = sampling.samples_per_prompt
        return [replace(s, prompt=prompts[i // each]) for i, s in enumerate(true(self, cut, sampling))]

    patch.setattr(TransformersEngine, "generate", generate)


def _stale_head(patch: pytest.MonkeyPatch) -> None:
    """A head that is copied once and served for ever."""
    true, forward = TransformersEngine.load, TransformersEngine._forward
    kept: dict[int, Tensor] = {}

    def load(self: TransformersEngine, weights: Any, version: int) -> None:
        kept.setdefault(id(self), self._live().lm_head.weight.detach().clone())
        true(self, weights, version)

    def with_old(self: TransformersEngine, *rest: Any) -> Tensor:
        head = self._live().lm_head
        weight = head.weight
        if id(self) in kept:
            head.weight = torch.nn.Parameter(kept[id(self)], requires_grad=False)
        out = forward(self, *rest)
        head.weight = weight
        return out

    patch.setattr(TransformersEngine, "load", load)
    patch.setattr(TransformersEngine, "_forward", with_old)


def _stale_copy(patch: pytest.MonkeyPatch) -> None:
    """A trainer that scores with a copy of its first weights."""
    copies: dict[int, Trunk] = {}

    def score(
        self: CausalPolicy, batch: Any, temperature: float = 1.0, grad: bool = False, entropy: bool = False
    ) -> Scores:
        trunk = copies.setdefault(id(self), copy.deepcopy(self._trunk))
        with torch.set_grad_enabled(grad):
            return self._score(self._trunk if grad else trunk, batch, temperature, entropy)

    patch.setattr(CausalPolicy, "score", score)


def _load_only_first(patch: pytest.MonkeyPatch) -> None:
    true = TransformersEngine.load

    def load(self: TransformersEngine, weights: Any, version: int) -> None:
        if version == 1:
            true(self, weights, version)
        self._version = version

    patch.setattr(TransformersEngine, "load", load)


def _in_steps(name: str, tensor: Tensor) -> Tensor:
    if tensor.ndim < 2:
        return tensor
    size = tensor.abs().amax(1, keepdim=True) / 127
    return (tensor / size).round() * size


def _swapped(patch: pytest.MonkeyPatch) -> None:
    true = TransformersEngine.load

    def load(self: TransformersEngine, weights: Any, version: int) -> None:
        turn = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        named = [(next((n.replace(a, b) for a, b in turn.items() if a in n), n), tensor) for n, tensor in weights]
        true(self, named, version)

    patch.setattr(TransformersEngine, "load", load)


def forward(change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Callable[[], object]]]) -> Plant:
    """Change the engine's forward pass: ``change(engine, ids, positions)`` gives positions, and what undoes it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        true = TransformersEngine._forward

        def fed(self: TransformersEngine, ids: Tensor, mask: Tensor, position: Tensor, cache: Any) -> Tensor:
            position, undo = change(self, ids, position)
            out = true(self, ids, mask, position, cache)
            undo()
            return out

        patch.setattr(TransformersEngine, "_forward", fed)

    return plant


def _a_position_more(_: Any, ids: Tensor, position: Tensor) -> tuple[Tensor, Callable[[], object]]:
    return position + int(ids.shape[1] == 1), lambda: None


def _norm_scaled(engine: Any, _: Tensor, position: Tensor) -> tuple[Tensor, Callable[[], object]]:
    norm = engine._live().model.layers[1].input_layernorm.weight
    own = norm.clone()
    norm.mul_(1.01)
    return position, lambda: norm.copy_(own)


def _exchanged(samples: list[Sample], _: Sampling) -> list[Sample]:
    """Two responses of one length carry each other's log-probs."""
    for i, one in enumerate(samples):
        for j, two in enumerate(samples[:i]):
            if len(one.ids) == len(two.ids) and one.ids != two.ids:
                made = {i: replace(one, logps=two.logps), j: replace(two, logps=one.logps)}
                return [made.get(k, sample) for k, sample in enumerate(samples)]
    return samples


def _heads_exchanged(name: str, tensor: Tensor) -> Tensor:
    """The first two heads' queries of one layer, exchanged."""
    if not name.endswith("layers.1.self_attn.q_proj.weight"):
        return tensor
    width = 32
    return torch.cat([tensor[width : 2 * width], tensor[:width], tensor[2 * width :]])


COLD = ("rollout.temperature=0.7",)
SEMANTIC: dict[str, tuple[Plant, tuple[str, ...], str]] = {
    "raw log-probs": (step(raw), COLD, "raw_logprobs"),
    "raw log-probs, run at T=1": (step(raw), (), "raw_logprobs"),
    "temperature twice": (step(lambda f, x, u, t, m: f(x / (t or 1), u, t, m)), COLD, "temperature_twice"),
    "another temperature": (step(lambda f, x, u, t, m: f(x, u, 1.1 * t, m)), (), "temperature"),
    "top-p": (truncated(lambda p: p.cumsum(-1) - p < 0.9, True), (), "top_p"),
    "top-k": (truncated(lambda p: torch.arange(p.shape[-1]).expand_as(p) < 5, True), (), "top_k"),
    "min-p": (truncated(lambda p: p >= 0.1 * p[:, :1], True), (), "min_p"),
    "top-k, full report": (truncated(lambda p: torch.arange(p.shape[-1]).expand_as(p) < 5, False), (), "top_k"),
    "shift +1": (told(lambda s, _: (*s.logps[1:], 0.0)), (), "shift"),
    "shift -1": (told(lambda s, _: (s.logps[-1], *s.logps[:-1])), (), "shift"),
    "shift of some responses": (answers(_shift_some), (), "shift"),
    "end token dropped": (answers(_drop_end), (), "end_dropped"),
    "min_tokens": (logits(lambda x, at: x.index_fill(1, torch.tensor([2]), -1e9) if at < 2 else x), (), "end_masked"),
    "token banned": (logits(lambda x, at: x.index_fill(1, torch.tensor([22]), -1e9)), (), "token_masked"),
    "base 2": (told(lambda s, _: [x / math.log(2) for x in s.logps]), (), "scaled"),
    "floor": (told(lambda s, _: [max(x, -3.0) for x in s.logps]), (), "clipped"),
    "constant added": (told(lambda s, _: [x - 0.02 for x in s.logps]), (), "offset"),
    "values in bfloat16": (
        told(lambda s, _: torch.tensor(s.logps).bfloat16().float().tolist()), (), "rounded_values"),
    "noise on log-probs": (told(lambda s, i: list(_noisy(s, i))), (), "noise"),
    "missing log-probs": (told(lambda s, _: [math.nan, *s.logps[1:]]), (), "missing"),
    "one seed a prompt": (_shared, (), "shared_seed"),
    "seed ignored": (_ignored, (), "seed_ignored"),
    "prompt cut": (_other_prompt, (), "prompt_cut"),
    "positions of the response off by one": (forward(_a_position_more), (), "positions"),
    "positions doubled": (forward(lambda e, ids, at: (2 * at, lambda: None)), (), "rope_scaling"),
    "a norm scaled by 1.01": (forward(_norm_scaled), (), "scaled_tensor"),
    "soft cap": (logits(lambda x, at: 4 * torch.tanh(x / 4)), (), "softcap"),
    "end token favoured": (
        logits(lambda x, at: x.index_add(1, torch.tensor([2]), x.new_ones(len(x), 1))), (), "logit_bias"),
    "two responses' log-probs exchanged": (answers(_exchanged), (), "other_response"),
    "dropout in the trainer": (
        scored(lambda s: Scores(s.logp_N + 0.1 * torch.randn_like(s.logp_N), s.entropy_N)), (), "dropout"),
    "trainer shifted": (scored(lambda s: Scores(s.logp_N.roll(1), s.entropy_N)), (), "shift"),
    "trainer in bfloat16": (scored(lambda s: Scores(s.logp_N.bfloat16().float(), s.entropy_N)), (), "rounded_values"),
}  # fmt: skip
WEIGHTS: dict[str, tuple[Plant, str, str]] = {
    "nothing is loaded": (handed(lambda name, w: None), "stale", "version 0"),
    "only the first hand-over": (_load_only_first, "stale", "version 1"),
    "keys left behind": (handed(lambda n, w: None if "k_proj" in n else w), "stale_group", "k_proj"),
    "a layer left behind": (handed(lambda n, w: None if ".layers.2." in n else w), "stale_group", "layers.2"),
    "a norm left behind": (handed(lambda n, w: None if n == "model.norm.weight" else w), "stale_group", "model.norm"),
    "a tensor left behind": (
        handed(lambda n, w: None if n.endswith("1.mlp.up_proj.weight") else w), "stale_group", "layers.1.mlp.up_proj"),
    "a stale head": (_stale_head, "stale_head", "embedding alone was updated"),
    "eight bits": (handed(_in_steps), "quantised_weights", "0.00787"),
    "bfloat16 on the way": (handed(lambda n, w: w.bfloat16().float()), "weights_dtype", "bfloat16"),
    "transposed": (handed(lambda n, w: w.t() if "o_proj" in n else w), "transposed", "o_proj"),
    "swapped": (_swapped, "swapped", "gate_proj"),
    "two heads exchanged": (handed(_heads_exchanged), "weights_changed", "layers.1.self_attn.o_proj"),
    "the trainer's old copy": (_stale_copy, "stale", "version 0"),
}  # fmt: skip
