"""From ``policy.*`` options to a model folder (``prepare``) and to the trained policy in it (``load``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from trimtab.errors import ConfigError, ModelError
from trimtab.policy.cache import cache_root
from trimtab.policy.model import CausalPolicy, without_dropout
from trimtab.policy.smollm2 import prepare_smollm2
from trimtab.policy.tiny import Examples, Progress, prepare_tiny
from trimtab.policy.tokenizer import HfTokenizer, end_ids_of
from trimtab.spec import Device, PolicyKind, PolicySpec

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def prepare(spec: PolicySpec, examples: Examples | None = None, progress: Progress | None = None) -> Path:
    """Folder of the initial model, which an engine loads too; made, converted or downloaded when it must be.

    ``examples`` draws (prompt, answer) pairs of training problems for the tiny model's warm-up.
    """
    disable_progress_bar()
    root = cache_root(spec.cache_dir)
    match spec.kind:
        case PolicyKind.tiny:
            return prepare_tiny(root, spec.warmup_accuracy, examples, progress)
        case PolicyKind.smollm2:
            return prepare_smollm2(root)
        case PolicyKind.hf:
            return _prepare_hf(spec.path)


def load(folder: Path, spec: PolicySpec, keep_reference: bool = False) -> CausalPolicy:
    """The policy in ``folder`` with the dtype, attention and device of ``spec``; never runs code from the folder.

    ``keep_reference`` keeps a frozen copy of these weights for ``score_reference``.
    """
    disable_progress_bar()  # transformers' own bars would tear the console's one line
    _check_folder(folder)
    device = device_of(spec.device)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(
                f"{folder} holds a model of type {config.model_type!r}, which is no causal language model; "
                "check policy.path="
            )
        without_dropout(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, spec.dtype.value),
            attn_implementation=spec.attention.value,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
        inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except UNREADABLE as error:
        raise ModelError(
            f"{folder} cannot be loaded as a causal language model with policy.attention={spec.attention.value} "
            f"policy.dtype={spec.dtype.value}: {_first_line(error)}; check policy.path="
        ) from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{folder} lacks weights of its own model: {missing[:5]} ({len(missing)}); check policy.path=")
    head = model.get_output_embeddings()
    vocabulary = len(inner) if head is None else head.weight.shape[0]
    tokenizer = HfTokenizer(inner, vocabulary, end_ids_of(inner, model.generation_config))
    return CausalPolicy(model.to(device), tokenizer, spec, keep_reference)


def device_of(device: Device) -> torch.device:
    """``auto`` is the GPU where there is one."""
    match device:
        case Device.auto:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        case Device.cpu:
            return torch.device("cpu")
        case Device.cuda:
            if not torch.cuda.is_available():
                raise ConfigError("policy.device=cuda was asked for but torch sees no GPU; set policy.device=auto")
            return torch.device("cuda")


def _prepare_hf(path: str | None) -> Path:
    if not path:
        raise ConfigError("policy=hf needs a model: set policy.path= to a folder or a hub name (owner/name)")
    folder = Path(path).expanduser()
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        _check_folder(folder)
        return folder.absolute()
    try:
        return Path(snapshot_download(path, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{path!r} is neither a folder here nor a model that the hub gives: {_first_line(error)}; set policy.path="
        ) from error


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; set policy.path= to one that exists")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in WEIGHTS):
        missing.append("weights (model.safetensors)")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise ModelError(f"{folder} is no model folder: it lacks {', '.join(missing)}; check policy.path=")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
