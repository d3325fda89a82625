"""Jobs that SLURM itself holds since it could not start them: nobody meant them to wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trimtab.errors import TrimtabError
from trimtab.launch.model import RunStatus, State

REASON = "launch failed requeued held"  # after a controller that came back, a prolog that failed, a node that refused
TIMES = 3  # it may be the job's own fault


class Releases(Protocol):
    """A cluster that lets a held job go."""

    def release(self, job: str) -> None:
        """Let it start when its turn comes; TrimtabError when the cluster refuses."""


def let_go(
    runs: Sequence[RunStatus], clusters: Mapping[str, Releases], say: Callable[[str], None], so_far: Counter[str]
) -> int:
    """Release the runs' jobs that wait for that reason alone; how many. ``so_far``: how often each was, is added to.

    What a person holds has another reason, and is left alone.
    """
    held = {(run.cluster, run.job) for run in runs if run.state is State.pending and run.reason == REASON}
    done = 0
    for name, job in sorted(held):
        if name not in clusters or so_far[f"{name}:{job}"] >= TIMES:
            continue
        so_far[f"{name}:{job}"] += 1
        try:
            clusters[name].release(job)
        except TrimtabError as error:
            say(f"{name}: job {job} is held and can't be released: {error}")
            continue
        say(f"{name}: job {job} was held, as its start had failed; it is released")
        done += 1
    return done
