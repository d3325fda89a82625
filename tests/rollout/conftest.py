"""Fixtures of the engine tests: a tiny random model on disk, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout.tiny import make_model, prompt_of, save
from transformers import LlamaForCausalLM

from trimtab.batch import Prompt


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return make_model(0, tied=False)


@pytest.fixture(scope="session")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts() -> list[Prompt]:
    """Prompts of unequal length."""
    return [prompt_of(5, 9, 3), prompt_of(7, 2, 30, 11, 4, 8, 21, 6), prompt_of(14), prompt_of(19, 3, 3, 25, 2)]
