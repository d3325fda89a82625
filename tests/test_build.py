"""From a spec to its parts."""

from __future__ import annotations

import random

import pytest

from trimtab.build import warmup_examples
from trimtab.config import compose
from trimtab.errors import ConfigError


def test_a_models_own_prompts_are_no_matter_of_the_warm_up() -> None:
    chat = warmup_examples(compose(["policy=smollm2", "task=arithmetic_chat"]))
    with pytest.raises(ConfigError, match=r"task\.style=plain"):  # only once somebody wants to warm up with them
        chat(random.Random(0))
    prompt, answer = warmup_examples(compose([]))(random.Random(0))
    a, b = prompt.removesuffix("=").split("+")
    assert int(answer) == int(a) + int(b)
