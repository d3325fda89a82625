"""Token log-probs straight from hidden states, tile by tile: the [N, V] logits are never whole in memory.

A tile is ``chunk`` tokens by some thousand vocabulary entries. The forward pass keeps a running log-sum-exp
over the tiles of a chunk (two numbers a token survive); the backward pass computes each tile again, turns it
into the gradient of its logits in place, and adds it into the gradients of the hidden states and of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 1 << 21  # elements of a tile: small enough to stay in a CPU's cache between the passes over it
LEAST_BLOCK = 512  # vocabulary entries of a tile: a narrower matrix product is slow


@dataclass(frozen=True)
class LogitOptions:
    """How logits come from hidden states: ``softcap · tanh(scale · (h Wᵀ + b) / softcap) / temperature``.

    ``fp32_head`` computes the product in float32 whatever the dtype of hidden states and head.
    ``chunk`` is the number of tokens whose logits are in memory at once. ``softcap`` None is no cap.
    """

    temperature: float = 1.0
    chunk: int = 1024
    fp32_head: bool = False
    scale: float = 1.0
    softcap: float | None = None


def token_logprobs(
    hidden_N: Tensor,
    weight: Tensor,
    token_N: Tensor,
    bias: Tensor | None = None,
    options: LogitOptions | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each token and, if asked, the entropy of its distribution; both differentiable (once).

    logp_n = l_n[token_n] − log Σ_v exp l_n[v],  entropy_n = −Σ_v p_n[v] log p_n[v].
    hidden_N [N, H], weight [V, H], bias [V] in any float dtype; token_N [N] int64 in [0, V). Returns [N] in
    nats: float32 (float64 for float64 input), the log-softmax always in that precision; the gradient of the
    head is summed up in it too and cast once. Memory: 2–3 tiles beside the gradients themselves.
    """
    logp_N, entropy_N = _TokenLogprobs.apply(hidden_N, weight, bias, token_N, options or LogitOptions(), entropy)
    return logp_N, entropy_N if entropy else None


@dataclass(frozen=True)
class _Tile:
    """Logits [n, v] of tokens ``rows`` and vocabulary ``cols``; ``slope`` is their derivative by the raw product."""

    rows: slice
    cols: slice
    hidden: Tensor
    weight: Tensor
    logits: Tensor
    slope: Tensor | float

    def local(self, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """Column [n, 1] of each row's token in this tile, and whether it lies in it."""
        column = token_N[self.rows, None] - self.cols.start
        inside = (column >= 0) & (column < self.logits.shape[1])
        return column.clamp(0, self.logits.shape[1] - 1), inside


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(hidden_N: Tensor, weight: Tensor, bias: Tensor | None, options: LogitOptions) -> Iterator[_Tile]:
    """Every tile, chunk by chunk; the logits' memory is used again for the next one."""
    precision = _precision(hidden_N.dtype)
    computed = precision if options.fp32_head else hidden_N.dtype
    rows, vocabulary = min(options.chunk, hidden_N.shape[0]), weight.shape[0]
    block = min(vocabulary, max(LEAST_BLOCK, TILE // max(rows, 1)))
    raw = torch.empty(rows * block, dtype=computed, device=hidden_N.device)
    wide = raw if computed == precision else torch.empty(rows * block, dtype=precision, device=hidden_N.device)
    for start in range(0, hidden_N.shape[0], max(rows, 1)):
        part = hidden_N[start : start + rows].to(computed)
        for low in range(0, vocabulary, block):
            head = weight[low : low + block].to(computed)
            shape = (part.shape[0], head.shape[0])
            size = shape[0] * shape[1]
            logits = torch.mm(part, head.t(), out=raw[:size].view(shape))
            if bias is not None:
                logits.add_(bias[low : low + block].to(computed))
            if wide is not raw:
                logits = wide[:size].view(shape).copy_(logits)
            slope = _shape_logits(logits, options)
            yield _Tile(slice(start, start + shape[0]), slice(low, low + shape[1]), part, head, logits, slope)


def _shape_logits(logits: Tensor, options: LogitOptions) -> Tensor | float:
    """Scale, cap and cool the raw product in place; returns d(logits)/d(raw)."""
    if options.softcap is None:
        factor = options.scale / options.temperature
        if factor != 1.0:
            logits.mul_(factor)
        return factor
    logits.mul_(options.scale / options.softcap).tanh_()
    slope = (1 - logits.square()).mul_(options.scale / options.temperature)
    logits.mul_(options.softcap / options.temperature)
    return slope


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_N: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_N: Tensor,
        options: LogitOptions,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_N.shape[0]
        fresh = torch.zeros(count, dtype=_precision(hidden_N.dtype), device=hidden_N.device)
        # Running maximum m, s = Σ exp(l − m) and u = Σ exp(l − m)(l − m) of each token.
        top, total, moment, chosen = fresh - 1e30, fresh.clone(), fresh.clone(), fresh.clone()
        for tile in _tiles(hidden_N, weight, bias, options):
            at = tile.rows
            column, inside = tile.local(token_N)
            here = tile.logits.gather(1, column)
            chosen[at] = torch.where(inside, here, chosen[at, None]).squeeze(1)
            old = top[at]
            new = torch.maximum(old, tile.logits.amax(1))
            decay = (old - new).exp()
            shifted = tile.logits.sub_(new[:, None])
            power = shifted.exp() if entropy else shifted.exp_()
            if entropy:
                moment[at] = decay * (moment[at] + total[at] * (old - new)) + shifted.mul_(power).sum(1)
            total[at] = decay * total[at] + power.sum(1)
            top[at] = new
        lse_N = top + total.log()
        entropy_N = total.log() - moment / total if entropy else fresh[:0]
        ctx.save_for_backward(hidden_N, weight, bias, token_N, lse_N, entropy_N)
        ctx.options = options
        if not entropy:
            ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(False)
        return chosen - lse_N, entropy_N.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logp_N: Tensor | None, by_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_N, weight, bias, token_N, lse_N, entropy_N = ctx.saved_tensors
        by_logp_N = torch.zeros_like(lse_N) if by_logp_N is None else by_logp_N
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        by_every = torch.zeros_like(hidden_N, dtype=lse_N.dtype) if want_hidden else None
        # Tokens without a gradient (rejected, or of advantage 0) need none of the products below.
        live_N = by_logp_N != 0 if by_entropy_N is None else (by_logp_N != 0) | (by_entropy_N != 0)
        at = live_N.nonzero().squeeze(1)
        hidden_N, token_N, by_logp_N, lse_N = hidden_N[at], token_N[at], by_logp_N[at], lse_N[at]
        if by_entropy_N is not None:
            by_entropy_N, entropy_N = by_entropy_N[at], entropy_N[at]
        by_hidden = None if by_every is None else by_every.new_zeros(hidden_N.shape)
        by_weight = torch.zeros_like(weight, dtype=lse_N.dtype) if want_weight else None
        by_bias = torch.zeros_like(bias, dtype=lse_N.dtype) if want_bias else None
        for tile in _tiles(hidden_N, weight, bias, ctx.options):
            slope = tile.slope
            by_raw = _by_logits(tile, token_N, by_logp_N, by_entropy_N, lse_N, entropy_N)
            if not isinstance(slope, float) or slope != 1.0:
                by_raw.mul_(slope)
            if by_bias is not None:
                by_bias[tile.cols] += by_raw.sum(0)
            by_raw = by_raw.to(tile.hidden.dtype)
            if by_hidden is not None:
                _add_product(by_hidden[tile.rows], by_raw, tile.weight)
            if by_weight is not None:
                _add_product(by_weight[tile.cols], by_raw.t(), tile.hidden)
        if by_every is not None and by_hidden is not None:
            by_every.index_copy_(0, at, by_hidden)
        return (
            None if by_every is None else by_every.to(hidden_N.dtype),
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _by_logits(
    tile: _Tile,
    token_N: Tensor,
    by_logp_N: Tensor,
    by_entropy_N: Tensor | None,
    lse_N: Tensor,
    entropy_N: Tensor,
) -> Tensor:
    """Gradient by the tile's logits, in its own memory: g (onehot − p) − k p (log p + entropy).

    g is the gradient by the log-prob, k by the entropy.
    """
    at = tile.rows
    column, inside = tile.local(token_N)
    g = by_logp_N[at, None].to(lse_N.dtype)
    log_p = tile.logits.sub_(lse_N[at, None])
    if by_entropy_N is None:
        grad = log_p.exp_().mul_(-g)
    else:
        k = by_entropy_N[at, None].to(lse_N.dtype)
        p = log_p.exp()
        grad = log_p.add_(entropy_N[at, None]).mul_(-k).sub_(g).mul_(p)
    here = grad.gather(1, column)
    return grad.scatter_(1, column, torch.where(inside, here + g, here))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    else:
        into.add_(torch.mm(left, right))
