"""Weights & Biases as a sink that may fail: metrics.jsonl stays the truth, training goes on.

Facts of the real client (0.31) that shape this file:

- A second ``init`` in a process returns the first run unless ``reinit`` says otherwise, and WANDB_* variables are
  read once a process: everything is passed as an argument.
- ``log(step=i)`` holds a row back until the next one and drops replayed steps after a resume: the x axis is the
  metric ``train/step``, and readers take the last row of a step.
- Its file is flushed each 15 s unless told otherwise; an unwritable folder is swapped for a temporary one in silence.
- A dead ``wandb-core`` makes ``log``, ``finish`` and the next ``init`` raise; only ``teardown`` mends that. A frozen
  one blocks them, ``teardown`` and the end of the process for ever: a thread makes every call, and when it can't in
  time the helper process is killed, which makes every call that waits for it fail.
- After an ``init`` that failed the run's id counts as in use until ``teardown``.
"""

from __future__ import annotations

import logging
import netrc
import os
import subprocess
import time
import uuid
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, Literal, Mapping, Sequence
from urllib.parse import urlsplit

from trimtab.errors import ConfigError, DataError
from trimtab.spec import TrackerSpec
from trimtab.track.courier import Courier
from trimtab.track.flat import flat_config, plain
from trimtab.track.identity import Identity, identify, remember
from trimtab.track.jsonl import FILE, read_metrics

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
    OSError,  # ConnectionResetError, BrokenPipeError, TimeoutError, full disk, those of requests
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
WAITING_ROWS = 10_000  # that may wait for the client; more, and it is given up
GRACE_SECONDS = 1.0  # beyond tracker.finish_seconds, for the client to give up by itself
ASK_TIMES, ASK_SECONDS = 3, 2.0  # for the steps that the server has, and the pause between
UNWIND_SECONDS = 2.0  # for calls to fail after the helper process was killed
ABANDONED: list[Courier] = []  # while one is busy the client can't be asked anything
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


def check_writable(folder: Path) -> None:
    """OSError if nothing can be written in ``folder``; trying is the one test that holds for root and network disks."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f".trial-{uuid.uuid4().hex}"
    trial.write_bytes(b"x")
    trial.unlink()


def open_run(
    who: Identity,
    mode: Literal["online", "offline"],
    config: dict[str, Any],
    folder: Path,
    *,
    project: str,
    entity: str | None,
    tags: Sequence[str] = (),
    finish_timeout: float,
) -> wandb.Run:
    """Begin or continue a W&B run whose files lie below ``folder``; its x axis is ``train/step``."""
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,  # a remote's address may hold a token; the commit is in the run's own files
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_transaction_log_flush_interval=1.0,
        init_timeout=20,
        finish_timeout=finish_timeout,
        finish_timeout_raises=True,  # else an upload that was given up is passed over in silence
    )
    wandb.setup(wandb.Settings(silent=True))  # what init gets is too late for what it says of the key
    run = wandb.init(
        project=project,
        entity=entity,
        group=who.group[:128] if who.group else None,
        job_type="train",
        tags=[tag[:64] for tag in tags if tag],
        name=who.name[:128],
        id=who.id,
        resume="allow",
        reinit="finish_previous",
        mode=mode,
        dir=str(folder),
        config=config,
        settings=settings,
    )
    if folder not in Path(run.dir).resolve().parents:
        raise OSError(f"W&B writes to {run.dir}, not below {folder}")
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    return run


def close_run(run: wandb.Run, state: str, summary: Mapping[str, Any]) -> None:
    """End a W&B run as ours ended; one that will go on (preempted, still running) is marked so."""
    run.summary.update({**plain(summary), "state": state})
    if state in ("preempted", "running"):
        run.mark_preempting()
    run.finish(exit_code=0 if state == "completed" else 1)


def reset_client() -> None:
    """Have the client forget its runs and its helper process, whatever state they are in."""
    try:
        wandb.teardown()
    except (*CLIENT_ERRORS, SystemExit) as error:  # it exits with the code of a helper process that was killed
        log.debug("W&B teardown: %s", error)


def helper_process() -> subprocess.Popen[bytes] | None:
    """The client's helper process, started if need be; None when WANDB_SERVICE names one that others use too."""
    service = wandb.setup(wandb.Settings(silent=True)).ensure_service()
    owned = service._proc  # a private name, and a pinned version
    return None if owned is None else owned._process


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl as W&B gets it."""
    return {STEP: record["step"], **{key: v for key, v in record.items() if key not in ("step", "nonfinite")}}


def steps_of(run: wandb.apis.public.Run) -> list[int]:
    """The step of each row that the server has of a run."""
    rows = run.scan_history(keys=[STEP], page_size=10_000)
    return [int(row[STEP]) for row in rows if row.get(STEP) is not None]


def short(error: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class WandbTracker:
    """One W&B run. Any failure of the client is said once; from then on the tracker is silent.

    No call waits for the client but ``finish``, and that for ``tracker.finish_seconds`` and three more at most. A
    server that cannot be reached at the start makes the run an offline one. After a requeue the server gets the steps
    of metrics.jsonl that it lacks, and none that it has.
    """

    def __init__(self, spec: TrackerSpec) -> None:
        self._spec = spec
        self._run: wandb.Run | None = None
        self._courier: Courier | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._folder = Path()
        self._before: list[dict[str, Any]] = []  # what metrics.jsonl had at the start
        self._there: set[int] = set()  # steps that the server has
        self._latest: dict[str, Any] = {}

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        mode = choose_mode(os.environ)
        if mode == "disabled":
            return
        if any(courier.busy for courier in ABANDONED):
            log.warning("W&B does not answer since an earlier run of this process: metrics.jsonl has everything")
            return
        self._folder = folder = run_dir.resolve()
        try:
            check_writable(folder / "wandb")
            who = identify(folder, run_id, name, self._spec.group)
            remember(folder, {"id": who.id, "config_hash": run_id, "project": self._spec.project, "mode": mode})
            if mode == "online" and (folder / FILE).exists():
                self._before = read_metrics(folder / FILE)
        except (OSError, DataError) as error:
            self._fail("start", error)
            return
        self._courier = Courier("wandb", WAITING_ROWS)
        self._courier.put(partial(self._open, mode, flat_config(config), who))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._courier is None:
            return
        if not self._courier.put(partial(self._send, step, dict(metrics))):
            self._give_up(self._courier, f"{WAITING_ROWS} rows wait for it")

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        courier = self._courier
        if courier is None:
            return
        bound = self._spec.finish_seconds + GRACE_SECONDS
        if courier.put(partial(self._close, state, dict(summary))) and courier.close(bound):
            self._courier = None
        else:
            self._give_up(courier, f"not done within {bound:g} s")
            courier.join(UNWIND_SECONDS)

    def _give_up(self, courier: Courier, why: str) -> None:
        """Kill a client that hangs, else the end of this process would hang as well."""
        self._given_up, self._courier = True, None
        ABANDONED.append(courier)
        if self._helper is not None:
            self._helper.kill()
        courier.abandon(reset_client)
        log.warning("W&B does not answer (%s); training goes on, metrics.jsonl has everything; %s", why, self._mend())

    # -- in the courier's thread -------------------------------------------------------------------------------------

    def _open(self, mode: Literal["online", "offline"], config: dict[str, Any], who: Identity) -> None:
        spec = self._spec
        begin = partial(
            open_run, config=config, folder=self._folder, project=spec.project, entity=spec.entity, tags=spec.tags,
            finish_timeout=spec.finish_seconds,
        )  # fmt: skip
        try:
            try:
                self._helper = helper_process()
                self._run = begin(who, mode)
            except CLIENT_ERRORS as error:
                if mode == "offline" or self._given_up:
                    raise
                log.warning("W&B cannot be reached (%s): tracking offline; %s", short(error), self._mend())
                reset_client()
                mode = "offline"
                self._helper = helper_process()
                self._run = begin(who, mode)
            run = self._run
            if mode == "online":
                self._backfill(run)
            facts = {"entity": run.entity, "url": run.url} if mode == "online" else {}
            remember(self._folder, {"mode": mode, **facts})
            log.info("W&B %s run %s: %s", mode, who.id, run.url if mode == "online" else Path(run.dir).parent)
        except CLIENT_ERRORS as error:
            self._fail("start", error)

    def _backfill(self, run: wandb.Run) -> None:
        """Send what metrics.jsonl had at the start and the server lacks: an attempt that was killed took it along."""
        there = self._ask(run) if run.resumed else set()
        if there is None:  # what is left out now can be mended, a step that stands twice can't
            last = run.summary.get(STEP)
            there = {record["step"] for record in self._before} | set(range(0 if last is None else int(last) + 1))
            log.warning("W&B does not tell which steps it has; once the run has ended, %s", self._mend())
        lacking = [record for record in self._before if record["step"] not in there]
        self._there, self._before = there, []
        for record in lacking:
            run.log(row_of(record))
        if lacking:
            log.info("W&B lacked %d earlier steps: sent from metrics.jsonl", len(lacking))

    def _ask(self, run: wandb.Run) -> set[int] | None:
        """The steps that the server has; None when it can't tell, as while its history lags behind its row count.

        The summary doesn't tell: it may be ahead of the rows that arrived.
        """
        path = f"{run.entity}/{run.project}/{run.id}"
        for attempt in range(ASK_TIMES):
            if attempt:
                time.sleep(ASK_SECONDS)
            try:
                steps = steps_of(wandb.Api(timeout=10).run(path))
            except CLIENT_ERRORS as error:
                log.debug("W&B history: %s", error)
                continue
            if len(steps) >= run.starting_step:  # the rows that it counts, each a step of the client's own
                return set(steps)
        return None

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            return
        self._latest = {STEP: step, **metrics}
        if step in self._there:
            return
        try:
            self._run.log(self._latest)
        except CLIENT_ERRORS as error:
            self._fail("log", error)

    def _close(self, state: str, summary: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            close_run(self._run, state, {**self._latest, **summary})
            self._run = None
        except CLIENT_ERRORS as error:
            self._fail("finish", error)

    def _mend(self) -> str:
        return f"`trimtab sweep sync {self._folder}` uploads it"

    def _fail(self, doing: str, error: BaseException) -> None:
        """Say it once, go silent, and reset the client so that a later run of this process can use it."""
        self._run = None
        if not self._given_up:
            log.warning(
                "W&B failed at %s (%s); training goes on, metrics.jsonl has everything; %s",
                doing, short(error), self._mend(),
            )  # fmt: skip
        reset_client()
