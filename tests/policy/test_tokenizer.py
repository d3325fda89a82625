"""The tokenizer adapter, over the tiny model's character tokenizer."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from trimtab.errors import ConfigError, DataError, ModelError
from trimtab.policy import tiny
from trimtab.policy.tokenizer import HfTokenizer, end_ids_of


def tokenizer(chat: bool = True) -> HfTokenizer:
    inner = tiny.new_tokenizer()
    if not chat:
        inner.chat_template = None
    return HfTokenizer(inner, len(inner) + 3, (inner.eos_token_id,))


def test_characters_round_trip() -> None:
    subject = tokenizer()
    for text in ("12+34=", "Q: 1 + 1 = ?\nA:  2\n", tiny.CHARACTERS):
        ids = subject.encode(text)
        assert len(ids) == len(text) and 3 not in ids
        assert subject.decode(ids) == text
    assert subject.decode((*subject.encode("46"), subject.end_ids[0])) == "46"
    assert subject.vocabulary == 4 + 96 + 3


def test_ids_containing() -> None:
    subject = tokenizer()
    assert subject.ids_containing("\n") == subject.encode("\n")
    assert subject.ids_containing("e") == subject.encode("e")  # not <eos>, whose name holds an e
    assert subject.ids_containing("ab") == ()
    with pytest.raises(ConfigError, match=r"task\.stop=null"):
        subject.ids_containing("")


def test_chat_template_is_used_or_its_lack_named() -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    assert tokenizer().decode(tokenizer().encode(messages)) == "user: 1+1?\nassistant: "
    with pytest.raises(ConfigError, match=r"task\.style=plain or task\.style=few_shot"):
        tokenizer(chat=False).encode(messages)


def test_empty_prompt_and_unknown_characters(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="must not be empty"):
        tokenizer().encode("")
    subject = tokenizer()
    assert subject.encode("é") == (3,)
    subject.encode("é")
    assert len([r for r in caplog.records if "does not know" in r.message]) == 1


def test_end_ids_come_from_tokenizer_and_generation_config() -> None:
    inner = tiny.new_tokenizer()
    assert end_ids_of(inner, None) == (2,)
    assert end_ids_of(inner, GenerationConfig(eos_token_id=2)) == (2,)
    assert end_ids_of(inner, GenerationConfig(eos_token_id=[7, 2])) == (2, 7)
    with pytest.raises(ModelError, match="eos_token"):
        HfTokenizer(inner, 100, ())
