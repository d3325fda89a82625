"""The trained policy: a Hugging Face causal language model, scored without its [N, V] logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from trimtab.batch import Batch, Scores
from trimtab.errors import DataError, ModelError
from trimtab.policy.logprob import LogitOptions, token_logprobs
from trimtab.policy.tokenizer import HfTokenizer
from trimtab.spec import PolicySpec

# What a configuration may do to the logits after the head: factor, or divisor, or cap.
FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAP = "final_logit_softcapping"
SELF_CHECK_TOKENS = 8


@dataclass(frozen=True)
class Trunk:
    """The two halves of a causal language model, and what happens to its logits after the head."""

    body: nn.Module
    head: nn.Linear
    scale: float
    softcap: float | None

    def hidden(self, ids: Tensor) -> Tensor:
        """Last hidden states [B, L, H] of right-padded ids [B, L]; causal attention needs no mask for padding."""
        hidden: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return hidden


def trunk_of(model: PreTrainedModel) -> Trunk:
    """Find body and head of ``model``; ModelError if it has no linear head over a separate body."""
    head = model.get_output_embeddings()
    body = model.get_decoder()
    kind = model.config.model_type
    if not isinstance(head, nn.Linear) or body is model or body is None:
        raise ModelError(f"a model of type {kind!r} has no linear head over a body; choose another policy.path=")
    config = model.config.get_text_config().to_dict()
    scale = 1.0
    for name in FACTORS:
        scale *= float(config.get(name) or 1.0)
    for name in DIVISORS:
        scale /= float(config.get(name) or 1.0)
    cap = config.get(CAP)
    return Trunk(body, head, scale, None if cap is None else float(cap))


class CausalPolicy:
    """``protocol.Policy`` over a transformers model, in evaluation mode always (dropout would be a mismatch).

    With ``keep_reference`` a frozen copy of the weights as given is made at once, since a resumed run replaces
    them afterwards while the reference stays the initial model. It costs the weights' memory once more.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: HfTokenizer, spec: PolicySpec, keep_reference: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model.eval()
        self._spec = spec
        self._trunk = trunk_of(model)
        self._names = {name: None for name, _ in model.named_parameters()}  # tied parameters under their first name
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._names.update({name: None for name in model.state_dict() if name not in every})  # persistent buffers
        self._check_scores()
        self._reference: Trunk | None = None
        if keep_reference:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._reference = trunk_of(frozen)
        if spec.gradient_checkpointing:
            self._checkpoint_activations()
        self._handed: dict[str, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self._trunk.head.weight.device

    def score(self, batch: Batch, temperature: float = 1.0, grad: bool = False, entropy: bool = False) -> Scores:
        """log p(token | what precedes it) at ``temperature`` for the batch's N response tokens, on the batch's device.

        DataError for a response without any prompt token before it.
        """
        with torch.set_grad_enabled(grad):
            return self._score(self._trunk, batch, temperature, entropy)

    def score_reference(self, batch: Batch, temperature: float = 1.0) -> Scores:
        """As ``score``, under the frozen initial weights."""
        if self._reference is None:
            raise ModelError("no reference was kept: it is made only when a KL penalty is asked for (loss.kl_coef=)")
        with torch.no_grad():
            return self._score(self._reference, batch, temperature, entropy=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) as in a Hugging Face checkpoint of this model, detached, not copied; tied ones once."""
        if self._handed is not None:
            yield from self._handed.items()
            return
        state = self.state()
        named = revert_weight_conversion(self.model, state)
        own = {tensor.data_ptr() for tensor in state.values()}
        if all(tensor.data_ptr() in own for tensor in named.values()):
            self._handed = named  # the very tensors that are trained: names need not be found out at each hand-over
        yield from named.items()

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, detached, not copied; tied ones once."""
        every = self.model.state_dict()
        return {name: every[name] for name in self._names}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights in; ModelError naming what is missing, surplus or of another shape or dtype."""
        own = self.state()
        missing, surplus = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        other = [
            f"{name} is {tuple(state[name].shape)} {state[name].dtype}, not {tuple(own[name].shape)} {own[name].dtype}"
            for name in own.keys() & state.keys()
            if state[name].shape != own[name].shape or state[name].dtype != own[name].dtype
        ]
        if missing or surplus or other:
            raise ModelError(
                f"these weights are not of this model: missing {missing[:5]} ({len(missing)}), "
                f"surplus {surplus[:5]} ({len(surplus)}), different {sorted(other)[:5]} ({len(other)}); "
                "check policy.path= and policy.dtype="
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def save_pretrained(self, folder: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save(folder)

    def _score(self, trunk: Trunk, batch: Batch, temperature: float, entropy: bool) -> Scores:
        home = batch.token_N.device
        if batch.tokens == 0:
            empty = trunk.head.weight.flatten()[:0].float().to(home)  # a gradient path, of no elements
            return Scores(empty, empty.clone() if entropy else None)
        ids = pad_sequence(list(batch.ids_B), batch_first=True).to(self.device, non_blocking=True)
        at_N = predicting_positions(batch, ids.shape[1]).to(self.device)
        hidden_N = trunk.hidden(ids).flatten(0, 1).index_select(0, at_N)
        logp_N, entropy_N = token_logprobs(
            hidden_N,
            trunk.head.weight,
            batch.token_N.to(self.device),
            trunk.head.bias,
            self._options(trunk, temperature),
            entropy,
        )
        return Scores(logp_N.to(home), None if entropy_N is None else entropy_N.to(home))

    def _options(self, trunk: Trunk, temperature: float) -> LogitOptions:
        return LogitOptions(temperature, self._spec.logit_chunk, self._spec.fp32_head, trunk.scale, trunk.softcap)

    def _checkpoint_activations(self) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(
                f"models of type {self.model.config.model_type!r} cannot recompute activations; "
                "set policy.gradient_checkpointing=false"
            )
        for layer in layers:
            layer.training = True  # the flag transformers asks; its children stay in evaluation mode

    @torch.no_grad()
    def _check_scores(self) -> None:
        """Compare with the model's own forward pass: whatever it does to its logits, we do, or it is refused."""
        vocabulary = self._trunk.head.weight.shape[0]
        row = torch.arange(SELF_CHECK_TOKENS, device=self.device).remainder(vocabulary)
        theirs = self.model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        padded = torch.stack([row, torch.where(torch.arange(len(row), device=self.device) < 5, row, 0)])
        hidden = self._trunk.hidden(padded)
        apart = 0.0
        for rows, count in ((hidden[0], len(row) - 1), (hidden[1], 4)):
            options = self._options(self._trunk, 1.0)
            ours, _ = token_logprobs(
                rows[:count], self._trunk.head.weight, row[1 : count + 1], self._trunk.head.bias, options
            )
            apart = max(apart, (theirs[:count].gather(1, row[1 : count + 1, None])[:, 0] - ours).abs().max().item())
        bound = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 0.25
        if not apart <= bound:
            raise ModelError(
                f"models of type {self.model.config.model_type!r} do something to their logits, or look at padding, "
                f"in a way that is not supported: their log-probs differ from ours by {apart:.3g} (allowed {bound}); "
                "choose another policy.path="
            )


def predicting_positions(batch: Batch, width: int) -> Tensor:
    """Flat position [N] in right-padded ids [B, width] of the token before each response token.

    Token j of a row's response (length T, whole row L) stands at L − T + j and is predicted at L − T + j − 1.
    """
    whole_B = torch.tensor([len(ids) for ids in batch.ids_B], dtype=torch.int64, device=batch.length_B.device)
    first_B = whole_B - batch.length_B - 1
    bad = (first_B < 0) & (batch.length_B > 0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise DataError(f"row {row} has no prompt token before its response; prompts must not be empty")
    begin_B = batch.length_B.cumsum(0) - batch.length_B  # flat number of each row's first token
    rows = torch.arange(batch.rows, device=whole_B.device)
    return torch.arange(batch.tokens, device=whole_B.device) + (rows * width + first_B - begin_B)[batch.row_N]


def without_dropout(config: Any) -> None:
    """Set every dropout probability of a transformers configuration to 0, nested ones too."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop") or "drop_rate" in name):
            setattr(config, name, 0.0)
    text = config.get_text_config()
    if text is not config:
        without_dropout(text)
