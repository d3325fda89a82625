"""Jobs that SLURM holds since it could not start them."""

from __future__ import annotations

from collections import Counter

from trimtab.launch.clusters import ClusterError
from trimtab.launch.held import REASON, TIMES, let_go
from trimtab.launch.model import PlannedRun, RunStatus, State


class Holder:
    """A cluster that refuses some jobs."""

    def __init__(self, *refuses: str) -> None:
        self.released: list[str] = []
        self._refuses = refuses

    def release(self, job: str) -> None:
        if job in self._refuses:
            raise ClusterError(f"a: no job {job}")
        self.released.append(job)


def status(job: str, reason: str, state: State = State.pending, cluster: str = "a") -> RunStatus:
    return RunStatus(PlannedRun(f"run{job}", "hash", 1, ()), state, 1, cluster, job, reason)


def test_only_what_slurm_itself_holds_is_released_and_each_job_once() -> None:
    one, said, times = Holder("5"), list[str](), Counter[str]()
    runs = [
        status("1", REASON), status("1", REASON), status("2", "JobHeldAdmin"), status("3", "JobHeldUser"),
        status("4_7", REASON), status("5", REASON), status("6", REASON, State.running),
        status("7", REASON, cluster="b"),
    ]  # fmt: skip
    assert let_go(runs, {"a": one}, said.append, times) == 2
    assert one.released == ["1", "4_7"]
    assert said == [
        "a: job 1 was held, as its start had failed; it is released",
        "a: job 4_7 was held, as its start had failed; it is released",
        "a: job 5 is held and can't be released: a: no job 5",
    ]


def test_a_job_that_never_starts_is_not_released_for_ever() -> None:
    one, times = Holder(), Counter[str]()
    for _ in range(TIMES + 2):
        let_go([status("1", REASON)], {"a": one}, lambda _: None, times)
    assert len(one.released) == TIMES
