"""Weights & Biases as a sink that may fail: metrics.jsonl stays the truth, training goes on.

Facts of the real client (0.31) that shape this file:

- A second ``init`` in a process returns the first run unless ``reinit`` says otherwise, and WANDB_* variables are
  read once a process: everything is passed as an argument.
- ``log(step=i)`` holds a row back until the next one and drops replayed steps after a resume: the x axis is the
  metric ``train/step``, and readers take the last row of a step.
- Its file is flushed each 15 s unless told otherwise; an unwritable folder is swapped for a temporary one in silence.
- A dead ``wandb-core`` makes ``log``, ``finish`` and the next ``init`` raise; only ``teardown`` mends that.
"""

from __future__ import annotations

import logging
import netrc
import os
import uuid
from concurrent.futures import CancelledError
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Mapping
from urllib.parse import urlsplit

from trimtab.errors import ConfigError
from trimtab.spec import TrackerSpec

try:
    import wandb
    from wandb.sdk.lib.asyncio_manager import AlreadyJoinedError, ForkedError, RunCancelledError
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError, WandbAttachFailedError
    from wandb.sdk.lib.service.service_token import WandbServiceConnectionError
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
    from wandb.sdk.mailbox.mailbox_handle import ServerResponseError
except ImportError as error:
    raise ConfigError(f"tracker=wandb cannot load its client ({error}): pip install 'wandb>=0.31,<0.32'") from error

log = logging.getLogger(__name__)

# All that the client was seen to raise, or raises in its source, when the server, its helper process or the disk fails.
CLIENT_ERRORS = (
    wandb.errors.Error,  # CommError, UsageError, AuthenticationError
    OSError,  # ConnectionResetError, BrokenPipeError, TimeoutError, full disk
    ValueError,  # pydantic's ValidationError
    TypeError,
    RuntimeError,
    AssertionError,  # "Already torn down."
    EOFError,
    CancelledError,
    AlreadyJoinedError,
    ForkedError,
    RunCancelledError,
    WandbApiFailedError,
    WandbAttachFailedError,
    WandbServiceConnectionError,
    HandleAbandonedError,
    MailboxClosedError,
    ServerResponseError,
)

STEP = "train/step"
HOST = "https://api.wandb.ai"
Mode = Literal["online", "offline", "disabled"]


def has_key(env: Mapping[str, str]) -> bool:
    """Whether the client would find credentials without asking: a variable, or the netrc file of `wandb login`."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL") or HOST).netloc
    path = Path(env.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def choose_mode(env: Mapping[str, str]) -> Mode:
    """WANDB_MODE if set, except that online without a key becomes offline: the client would stop to ask for one.

    Unset: online with a key, else offline.
    """
    wanted = env.get("WANDB_MODE", "").lower()
    if wanted in ("offline", "dryrun"):
        return "offline"
    if wanted == "disabled":
        return "disabled"
    if has_key(env):
        return "online"
    if wanted == "online":
        log.warning("WANDB_MODE=online, but there is no API key: tracking offline. Run `wandb login` to mend that.")
    return "offline"


def plain(value: Any) -> Any:
    """``value`` with enums as their values and paths as text, all through."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested config, with the settings that runs are compared by as scalars on top: W&B cannot filter nested keys.

    ``algo tis_mode level rs veto seed``. The group ``algo`` gives its name to the scalar; its other options
    become ``algo_<option>``.
    """
    nested = plain(config)
    algo, mis = nested.get("algo", {}), nested.get("mis", {})
    veto = mis.get("rs_veto_threshold")
    flat = {
        **{f"algo_{key}": value for key, value in algo.items() if key != "name"},
        "algo": algo.get("name"),
        "tis_mode": mis.get("tis_mode"),
        "level": mis.get("tis_level"),
        "rs": mis.get("rs_level") if mis.get("use_rs") else "none",
        "veto": veto if veto is not None else "none",
        "seed": nested.get("seed"),
    }
    return {**nested, **flat}


def check_writable(folder: Path) -> None:
    """OSError if nothing can be written in ``folder``; trying is the one test that holds for root and network disks."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f".trial-{uuid.uuid4().hex}"
    trial.write_bytes(b"x")
    trial.unlink()


class WandbTracker:
    """One W&B run. Any failure of the client is said once; from then on the tracker is silent."""

    def __init__(self, spec: TrackerSpec, finish_timeout: float = 60.0) -> None:
        self._spec = spec
        self._finish_timeout = finish_timeout
        self._run: wandb.Run | None = None

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        try:
            mode = choose_mode(os.environ)
            if mode == "disabled":
                return
            folder = run_dir.resolve()
            check_writable(folder / "wandb")
            self._run = self._init(mode, flat_config(config), run_id, name, folder)
            if folder not in Path(self._run.dir).resolve().parents:
                raise OSError(f"W&B writes to {self._run.dir}, not below {folder}")
            self._run.define_metric(STEP, hidden=True)
            self._run.define_metric("*", step_metric=STEP)
            where = self._run.url if mode == "online" else Path(self._run.dir).parent
            log.info("W&B %s run %s: %s", mode, run_id, where)
        except CLIENT_ERRORS as error:
            self._fail("start", error)

    def _init(self, mode: Mode, config: dict[str, Any], run_id: str, name: str, folder: Path) -> wandb.Run:
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,  # a remote's address may hold a token; the commit is in the run's own files
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_transaction_log_flush_interval=1.0,
            init_timeout=30,
            finish_timeout=self._finish_timeout,
            finish_timeout_raises=True,  # else an upload that was given up is passed over in silence
        )
        return wandb.init(
            project=self._spec.project,
            entity=self._spec.entity,
            group=self._spec.group[:128] if self._spec.group else None,
            job_type="train",
            tags=[tag[:64] for tag in self._spec.tags if tag],
            name=name[:128],
            id=run_id,
            resume="allow",
            reinit="finish_previous",
            mode=mode,
            dir=str(folder),
            config=config,
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            return
        try:
            self._run.log({STEP: step, **metrics})
        except CLIENT_ERRORS as error:
            self._fail("log", error)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.summary.update({**plain(summary), "state": state})
            if state == "preempted":
                self._run.mark_preempting()
            self._run.finish(exit_code=0 if state == "completed" else 1)
            self._run = None
        except CLIENT_ERRORS as error:
            self._fail("finish", error)

    def _fail(self, doing: str, error: BaseException) -> None:
        """Say it once, go silent, and reset the client so that a later run of this process can use it."""
        self._run = None
        log.warning(
            "W&B failed at %s (%s: %s); training goes on, metrics.jsonl has everything",
            doing,
            type(error).__name__,
            error,
        )
        try:
            wandb.teardown()
        except (*CLIENT_ERRORS, SystemExit) as again:  # it exits with the code of a helper process that was killed
            log.debug("W&B teardown: %s", again)
