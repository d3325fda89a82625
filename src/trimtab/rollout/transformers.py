"""Rollout without vLLM: an own copy of the model, batched sampling with a KV cache, every random number by row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from trimtab.batch import Finish, Prompt, Sample, Sampling
from trimtab.errors import EngineError, ModelError
from trimtab.rollout.check import check_handover, check_options, check_request, check_rows
from trimtab.rollout.sampling import logit_noise, sample_step, uniforms
from trimtab.rollout.seeds import row_seed
from trimtab.spec import Dtype, Mismatch, MismatchSpec, RolloutSpec

_SCORE_LOGITS = 2**25  # logits of one scoring pass (128 MiB of float32)


@dataclass
class _Row:
    """A response that is being written."""

    prompt: Prompt
    seed: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: Finish = Finish.length


class WideHead:
    """Has a linear head compute in float32 whatever its dtype: the product, and what it is made of.

    The head's weights are rounded to their dtype as before; a float32 copy of them is kept, since converting them at
    each token would cost more than the product. ``refresh`` after each change of the weights.
    """

    def __init__(self, head: Any) -> None:
        if not isinstance(head, nn.Linear):
            raise EngineError("the model has no linear head to compute in float32; set rollout.fp32_head=false")
        self._narrow = head
        self.refresh()
        head.forward = self._product  # type: ignore[method-assign, assignment]

    def refresh(self) -> None:
        """Copy the head's weights, which a hand-over has changed."""
        self._weight = self._narrow.weight.detach().float()
        self._bias = None if self._narrow.bias is None else self._narrow.bias.detach().float()

    def _product(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self._weight, self._bias)


class TransformersEngine:
    """Samples with transformers' own forward pass.

    Every random number of a row comes from that row's seed, so a response does not depend on what else is in the
    batch, up to the rounding of batched matrix products. ``mismatch`` adds noise to the logits that are sampled from
    and reports the noisy log-probs; ``score`` stays free of it, so that a probe still tests the hand-over.
    """

    def __init__(
        self,
        folder: Path,
        spec: RolloutSpec,
        mismatch: MismatchSpec | None = None,
        device: torch.device | None = None,
    ) -> None:
        check_options(spec)
        self._spec = spec
        self._strength = _noise_strength(mismatch)
        self._device = device if device is not None else torch.device("cpu")
        self._version = 0
        self._model: Any = _load_model(folder, _torch_dtype(spec.dtype)).to(self._device)
        self._head = WideHead(self._model.get_output_embeddings()) if spec.fp32_head else None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """``samples_per_prompt`` responses of each prompt, prompt by prompt, ``rollout.max_num_seqs`` rows at once.

        Log-probs are float32 nats, see ``sample_step``. Raises DataError for a prompt too long.
        """
        check_request(prompts, sampling, self._spec.max_model_len, self._vocabulary())
        at_once = max(1, self._spec.max_num_seqs // sampling.samples_per_prompt)
        samples = []
        for start in range(0, len(prompts), at_once):
            samples += self._generate(prompts[start : start + at_once], start, sampling)
        return samples

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the trainer's weights into the engine's model, converting the dtype; there is no cache to drop."""
        own = self._live().state_dict(keep_vars=True)
        given, unknown, written = [], [], set()
        with torch.no_grad():
            for name, tensor in weights:
                given.append(name)
                if name not in own:
                    unknown.append(name)
                    continue
                if own[name].shape != tensor.shape:
                    raise EngineError(
                        f"weight {name}: {tuple(tensor.shape)} was handed over, the engine's is "
                        f"{tuple(own[name].shape)}; trainer and engine must load the same model "
                        "(policy.kind, policy.path)"
                    )
                own[name].copy_(tensor)
                written.add(own[name].data_ptr())  # tied weights share their storage under two names
        missing = [name for name, p in self._live().named_parameters() if p.data_ptr() not in written]
        check_handover(given, unknown, missing)
        if self._head is not None:
            self._head.refresh()
        self._version = version

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (float32 nats, T=1, no injected noise) of tokens 1.. of each row of ids."""
        check_rows(rows)
        longest = max((len(row) for row in rows), default=1)
        at_once = max(1, _SCORE_LOGITS // (longest * self._vocabulary()))
        scores: list[list[float]] = []
        for start in range(0, len(rows), at_once):
            chunk = rows[start : start + at_once]
            # Padding on the right: causal attention keeps it away from the row's own tokens.
            width = max(len(row) for row in chunk)
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in chunk], device=self._device)
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in chunk], device=self._device)
            logits = self._live()(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            logps = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()
            scores += [logps[i, : len(row) - 1].tolist() for i, row in enumerate(chunk)]
        return scores

    def describe(self) -> dict[str, Any]:
        """Settings as they are in effect."""
        model = self._live()
        return {
            "engine": "transformers",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": str(self._device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dtype": self._head_dtype(),
            "logprobs_mode": f"{self._spec.logprobs_mode.value}_logprobs",
            "attention": str(model.config._attn_implementation),
            "max_model_len": self._spec.max_model_len,
            "max_num_seqs": self._spec.max_num_seqs,
            "logit_noise": self._strength,
        }

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        self._model, self._head = None, None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _live(self) -> Any:
        if self._model is None:
            raise EngineError("this transformers engine was closed")
        return self._model

    @torch.inference_mode()
    def _head_dtype(self) -> str:
        """Dtype of the logits, as a forward pass has them."""
        logits = self._live()(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self._device)).logits
        return str(logits.dtype).removeprefix("torch.")

    def _vocabulary(self) -> int:
        return int(self._live().config.get_text_config().vocab_size)

    def _generate(self, prompts: Sequence[Prompt], first: int, sampling: Sampling) -> list[Sample]:
        count = sampling.samples_per_prompt
        rows = [
            _Row(prompt, row_seed(sampling.seed, first + p, s))
            for p, prompt in enumerate(prompts)
            for s in range(count)
        ]
        uniform_BT = torch.stack([uniforms(row.seed, sampling.max_tokens) for row in rows])
        cache, mask, logits = self._prefill(prompts, count)
        alive = list(range(len(rows)))
        for t in range(sampling.max_tokens):
            if sampling.gap:
                logits = self._with_noise(logits, [rows[r].seed for r in alive], t)
            token_B, logp_B = sample_step(
                logits, uniform_BT[alive, t], sampling.temperature, self._spec.logprobs_mode, sampling.top_p
            )
            going = []  # positions in the batch of the rows that go on
            for at, (r, token, logp) in enumerate(zip(alive, token_B.tolist(), logp_B.tolist(), strict=True)):
                rows[r].ids.append(token)
                rows[r].logps.append(logp)
                if token in sampling.stop_ids:
                    rows[r].finish = Finish.stop
                else:
                    going.append(at)
            if not going or t + 1 == sampling.max_tokens:
                break
            if len(going) < len(alive):
                index = torch.tensor(going, device=self._device)
                cache.batch_select_indices(index)
                mask, token_B, alive = mask[index], token_B[going], [alive[at] for at in going]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            logits = self._forward(token_B[:, None].to(self._device), mask, mask.sum(1, keepdim=True) - 1, cache)
        return [self._sample(row) for row in rows]

    def _prefill(self, prompts: Sequence[Prompt], count: int) -> tuple[DynamicCache, Tensor, Tensor]:
        """Run each prompt once, padded on the left, and repeat its cache for its ``count`` responses."""
        width = max(len(prompt.ids) for prompt in prompts)
        pads = [width - len(prompt.ids) for prompt in prompts]
        ids = torch.tensor([[0] * pad + list(p.ids) for pad, p in zip(pads, prompts, strict=True)], device=self._device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self._device)
        # Positions count a row's own tokens: rotary embeddings must not see the padding.
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._live().config)
        logits = self._forward(ids, mask, position, cache)
        if count > 1:
            cache.batch_repeat_interleave(count)
        return cache, mask.repeat_interleave(count, 0), logits.repeat_interleave(count, 0)

    def _forward(self, ids: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [B, V] (float32, on the CPU) of the last token of each row."""
        out = self._live()(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        # Sampling on the CPU: the distribution function has no deterministic kernel on a GPU.
        last: Tensor = out.logits[:, -1]
        return last.float().cpu()

    def _with_noise(self, logits: Tensor, seeds: Sequence[int], position: int) -> Tensor:
        if self._strength == 0.0:
            return logits
        noise = torch.stack([logit_noise(seed, position, logits.shape[-1]) for seed in seeds])
        return logits + self._strength * noise

    def _sample(self, row: _Row) -> Sample:
        ids = tuple(row.ids)
        sample = Sample(row.prompt, ids, tuple(row.logps), (self._version,) * len(ids), row.finish)
        sample.check()
        return sample


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it holds no config.json")
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):  # weights are made before they are read
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    finally:
        if shown:
            bars.enable_progress_bar()
    return model.eval().requires_grad_(False)


def _noise_strength(mismatch: MismatchSpec | None) -> float:
    if mismatch is None:
        return 0.0
    match mismatch.kind:
        case Mismatch.logit_noise:
            if not 0.0 <= mismatch.strength < math.inf:
                raise EngineError(f"mismatch.strength={mismatch.strength} must be a finite number, at least 0")
            return mismatch.strength
        case _:  # made around the engine, by inject.py
            return 0.0


def _torch_dtype(dtype: Dtype) -> torch.dtype:
    match dtype:
        case Dtype.float32:
            return torch.float32
        case Dtype.bfloat16:
            return torch.bfloat16
        case Dtype.float16:
            return torch.float16
