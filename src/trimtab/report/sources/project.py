"""Runs of a W&B project through its API: ``wandb:ENTITY/PROJECT`` or ``wandb:ENTITY/PROJECT/GROUP``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from trimtab.errors import ConfigError, DataError
from trimtab.report.model import Run, RunState
from trimtab.report.sources.rows import columns_of, flatten, injected_of, merged, planned_of, seed_of

SCHEME = "wandb:"
STATES: Mapping[str, RunState] = {
    "finished": RunState.completed,
    "failed": RunState.failed,
    "crashed": RunState.failed,
    "killed": RunState.failed,
    "running": RunState.running,
    "pending": RunState.running,
    "preempting": RunState.preempted,
    "preempted": RunState.preempted,
}


def parse(address: str) -> tuple[str, str | None]:
    """(``entity/project``, group). ConfigError when ``address`` is not of the form above."""
    parts = address.removeprefix(SCHEME).split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{address} is no address of a W&B project; give wandb:ENTITY/PROJECT or that with /GROUP")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def load_project(address: str, progress: Callable[[int, int, str], None]) -> list[Run]:
    """Its runs, every logged row of them. ConfigError without the package or a key, DataError when W&B refuses."""
    project, group = parse(address)
    try:
        import wandb
        from wandb.errors import AuthenticationError, CommError, UsageError
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError
    except ImportError as error:
        raise ConfigError(f"{address}: reading it needs wandb ({error}): pip install 'wandb>=0.31,<0.32'") from error
    try:
        found = wandb.Api(timeout=60).runs(project, filters={"group": group} if group else {}, order="+created_at")
        runs = []
        for i, run in enumerate(found):
            runs.append(_run(run))
            progress(i + 1, len(found), run.name)
    except (AuthenticationError, UsageError) as error:
        raise ConfigError(f"{address}: {error}; log in with `wandb login`, or set WANDB_API_KEY") from error
    except (CommError, WandbApiFailedError, ValueError, TypeError, OSError) as error:  # requests' errors are OSErrors
        raise DataError(f"{address}: W&B did not give its runs ({error}); is the address right?") from error
    return runs


def _run(run: Any) -> Run:
    raw = json.loads(run.config) if isinstance(run.config, str) else dict(run.config)
    config = flatten(raw)
    table = columns_of(merged(run.scan_history(page_size=1000)))
    state = STATES.get(str(run.state), RunState.unknown)
    return Run(
        name=str(run.name),
        config=config,
        seed=seed_of(config),
        state=state,
        step=table.step,
        columns=table.columns,
        run_id=str(run.id),
        error=f"W&B says {run.state}" if state is RunState.failed else "",
        injected=injected_of(config),
        nonfinite=table.nonfinite,
        broken=table.broken,
        updated=_time(str(run.created_at)),
        planned=planned_of(config),
    )


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
