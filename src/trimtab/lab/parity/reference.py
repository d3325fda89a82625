"""The arbiter: transformers' own float32 forward pass, one row at a time, whole logits, float64 log-softmax.

It shares no code with engine or trainer: no padding, no chunks, no cache, no tiles; eager attention. Whoever differs
from it is the one that is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab.batch import Sample
from trimtab.errors import ModelError

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Truth:
    """What the reference says of the N response tokens of some samples.

    logits_NV: float32, T=1. row_N: row of each token; place_N: its index in the response. temperature: the samples'.
    """

    samples: tuple[Sample, ...]
    logits_NV: Tensor
    token_N: Tensor
    row_N: Tensor
    place_N: Tensor
    temperature: float
    stop_ids: Ids

    @cached_property
    def logp_NV(self) -> Tensor:
        """Log-probs (float64, nats) of every token at the temperature of the samples; of T=1 for greedy ones."""
        return self.at(self.temperature or 1.0)

    @cached_property
    def logp_N(self) -> Tensor:
        """Log-probs (float64) of the tokens at the temperature of the samples."""
        return self.own(self.logp_NV)

    def at(self, temperature: float) -> Tensor:
        """Log-probs [N, V] (float64) at another temperature."""
        return torch.log_softmax(self.logits_NV.double() / temperature, -1)

    def own(self, values_NV: Tensor) -> Tensor:
        """Each token's own entry of [N, V]."""
        return values_NV.gather(1, self.token_N[:, None])[:, 0]

    @property
    def length_B(self) -> list[int]:
        return [len(sample.ids) for sample in self.samples]

    def rows(self, values_N: Tensor) -> list[Tensor]:
        """Values of each row."""
        return list(values_N.split(self.length_B))

    def reported(self) -> Tensor:
        """What the engine said of the tokens, float64 [N]."""
        return torch.tensor([x for sample in self.samples for x in sample.logps], dtype=torch.float64)

    def few(self, rows: int) -> Truth:
        """The first rows alone."""
        return self.pick(range(min(rows, len(self.samples))))

    def pick(self, rows: Sequence[int]) -> Truth:
        """These rows alone, in their order here."""
        at = self.tokens_of(rows)
        return view([self.samples[row] for row in rows], [self.logits_NV[at]], self.temperature, self.stop_ids)

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        """Flat positions of the rows' tokens."""
        return torch.cat([(self.row_N == row).nonzero()[:, 0] for row in rows] or [torch.zeros(0, dtype=torch.int64)])


def load(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """The model in ``folder``, frozen, in evaluation mode."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded as the reference: {error}") from error
    return model.eval().requires_grad_(False)


def fresh_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, loaded anew."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


@dataclass
class Reference:
    """A model of its own, whose weights are set from outside; ``logits`` of any row of ids."""

    model: Any

    def names(self) -> list[str]:
        """Parameters, tied ones once."""
        return [name for name, _ in self.model.named_parameters()]

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights, float32."""
        return {name: p.detach().float().clone() for name, p in self.model.named_parameters()}

    @property
    def head(self) -> str:
        """Name of the output matrix; the input embedding's when they are one."""
        weight = self.model.get_output_embeddings().weight
        return next(name for name, p in self.model.named_parameters() if p is weight)

    @property
    def tied(self) -> bool:
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    @torch.no_grad()
    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Set weights by name; the others stay."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], places: Sequence[int] | None = None) -> Tensor:
        """[L, V] float32: after each of the row's tokens, the logits of the next; ``places``: other positions."""
        row = torch.tensor([list(ids)])
        if places is None:
            out: Tensor = self.model(input_ids=row, use_cache=False).logits[0]
        else:  # with a mask: without one, positions that jump would pass for rows packed one after the other
            at, mask = torch.tensor([list(places)]), torch.ones_like(row)
            out = self.model(input_ids=row, position_ids=at, attention_mask=mask, use_cache=False).logits[0]
        return out.float()

    @torch.no_grad()
    def windowed(self, ids: Sequence[int], size: int) -> Tensor:
        """As ``logits``, each token attending to the last ``size`` alone, itself among them."""
        number = torch.arange(len(ids))
        back = number[:, None] - number[None, :]
        least = torch.finfo(self.model.dtype).min
        mask = torch.where((back >= 0) & (back < size), 0.0, least).to(self.model.dtype)[None, None]
        out: Tensor = self.model(input_ids=torch.tensor([list(ids)]), attention_mask=mask, use_cache=False).logits[0]
        return out.float()

    @torch.no_grad()
    def logits_on(self, cached: Sequence[int], rest: Sequence[int], before: Mapping[str, Tensor]) -> Tensor:
        """[len(rest), V]: as ``logits``, but keys and values of ``cached`` were made by the weights ``before``."""
        now = {name: p.detach().clone() for name, p in self.model.named_parameters() if name in before}
        self.use(before)
        cache = self.model(input_ids=torch.tensor([list(cached)]), use_cache=True).past_key_values
        self.use(now)
        out: Tensor = self.model(input_ids=torch.tensor([list(rest)]), past_key_values=cache, use_cache=True).logits[0]
        return out.float()

    @torch.no_grad()
    def with_head(self, weight: Tensor, samples: Sequence[Sample], temperature: float, stop_ids: Ids) -> Truth:
        """As ``truth``, with another output matrix, whether or not it is tied to the embedding."""
        head = self.model.get_output_embeddings()
        kept = head.weight
        head.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        try:
            return self.truth(samples, temperature, stop_ids)
        finally:
            head.weight = kept

    def truth(
        self, samples: Sequence[Sample], temperature: float, stop_ids: Ids, prompts: Sequence[Ids] | None = None
    ) -> Truth:
        """The reference's view of the samples' tokens; ``prompts`` stand in for the samples' own."""
        parts, known = [], dict[Ids, Tensor]()
        for i, sample in enumerate(samples):
            prompt = sample.prompt.ids if prompts is None else prompts[i]
            row = (*prompt, *sample.ids)[:-1] if sample.ids else ()
            if not row or not prompt:
                parts.append(torch.full((len(sample.ids), self._vocabulary()), torch.nan))
                continue
            if row not in known:
                known[row] = self.logits(row)[len(prompt) - 1 :]
            parts.append(known[row])
        return view(samples, parts, temperature, stop_ids)

    def _vocabulary(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])


def view(samples: Sequence[Sample], parts: Sequence[Tensor], temperature: float, stop_ids: Ids) -> Truth:
    """A ``Truth`` from each sample's logits [T, V]."""
    lengths = torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int64)
    return Truth(
        samples=tuple(samples),
        logits_NV=torch.cat(list(parts)) if parts else torch.zeros(0, 1),
        token_N=torch.tensor([t for sample in samples for t in sample.ids], dtype=torch.int64),
        row_N=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        place_N=torch.cat([torch.arange(int(n)) for n in lengths]) if samples else torch.zeros(0, dtype=torch.int64),
        temperature=temperature,
        stop_ids=stop_ids,
    )


# -- versions of the weights ------------------------------------------------------------------------------------------

MOVED = 0.04
"""How far a made-up training step moves each tensor, as a share of its root mean square."""


@dataclass
class Versions:
    """Weights of version 0, 1, 2, …: those given, moved by seeded noise; each is made again when it is asked for.

    ``dtype``: the trainer's; what it rounds away, the reference rounds away too.
    """

    base: dict[str, Tensor]
    dtype: torch.dtype
    seed: int = 0

    def tensor(self, name: str, version: int) -> Tensor:
        """float32, as the trainer holds it; version 0 is the base."""
        base = self.base[name]
        if version == 0 or not base.is_floating_point():
            return base.to(self.dtype).float()
        number = sorted(self.base).index(name)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + version * 10_007 + number)
        noise = torch.randn(base.shape, generator=generator)
        size = float(base.square().mean().sqrt()) or 0.5  # a bias of zeros moves too
        return (base + MOVED * size * noise).to(self.dtype).float()

    def weights(self, version: int) -> dict[str, Tensor]:
        return {name: self.tensor(name, version) for name in self.base}
