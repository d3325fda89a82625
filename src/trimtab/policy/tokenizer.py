"""``protocol.Tokenizer`` over a Hugging Face tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Sequence

from transformers import GenerationConfig, PreTrainedTokenizerBase

from trimtab.errors import ConfigError, DataError, ModelError

log = logging.getLogger(__name__)


class HfTokenizer:
    """Text to ids and back; ``vocabulary`` is the number of rows of the model's head, padding rows included."""

    def __init__(self, inner: PreTrainedTokenizerBase, vocabulary: int, end_ids: Sequence[int]) -> None:
        if not end_ids:
            raise ModelError(
                "the tokenizer names no end token (eos_token), nor does generation_config.json (eos_token_id): "
                "a response could never end; add one to the folder of policy.path="
            )
        self.inner = inner
        self._vocabulary = vocabulary
        self._end_ids = tuple(end_ids)
        self._warned = False

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[int, ...]:
        """Ids of a text, or of chat messages through the chat template with its generation prompt."""
        if isinstance(prompt, str):
            ids = tuple(self.inner(prompt)["input_ids"])
        else:
            if not self.inner.chat_template:
                raise ConfigError(
                    "chat messages were given but the model's tokenizer has no chat template; "
                    "set task.style=plain or task.style=few_shot"
                )
            ids = tuple(self.inner.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        if not ids:
            raise DataError("a prompt gave no token at all; prompts must not be empty")
        if self.inner.unk_token_id in ids and not self._warned:
            self._warned = True
            log.warning("the tokenizer does not know some characters of %r (said once)", str(prompt)[:80])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Every id whose own text holds ``text``, special tokens apart; ConfigError for an empty text."""
        if not text:
            raise ConfigError("a stop text must not be empty; set task.stop=null for none")
        known = [[i] for i in range(min(len(self.inner), self._vocabulary))]
        texts = self.inner.batch_decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return tuple(i for i, own in enumerate(texts) if text in own)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into ``folder``."""
        self.inner.save_pretrained(folder)


def end_ids_of(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> tuple[int, ...]:
    """End ids of the tokenizer and of the generation configuration, each once."""
    given = generation.eos_token_id if generation is not None else None
    listed = [given] if isinstance(given, int) else list(given or [])
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(dict.fromkeys([*own, *listed]))
