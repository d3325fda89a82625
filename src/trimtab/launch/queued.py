"""A sweep's jobs as their clusters' queues list them, whatever became of their runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.launch.model import Batch, RunStatus
from trimtab.launch.states import NAME, Row, state_of


@dataclass(frozen=True)
class Queued:
    """A job that has not ended: an element of an array is one by itself."""

    batch: Batch
    row: Row

    @property
    def slot(self) -> int:
        """Its place in the batch."""
        return self.row.index or 0

    @property
    def name(self) -> str:
        """``cluster:12_3``, as ``trimtab sweep status`` writes it."""
        return f"{self.batch.cluster}:{self.row.job}" + ("" if self.row.index is None else f"_{self.row.index}")

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """(run, attempt) of its runs."""
        return self.batch.slots[self.slot].runs if self.slot < len(self.batch.slots) else ()

    def needed(self, now: Mapping[str, RunStatus]) -> bool:
        """Whether a run waits for it, or may: the attempt that counts is this job's, and has not ended."""
        return bool(self.unfinished(now))

    def unfinished(self, now: Mapping[str, RunStatus]) -> list[str]:
        """Its runs that have not ended."""
        return [run for run, attempt in self.runs
                if run in now and now[run].attempt == attempt and now[run].state.live]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(run for run, _ in self.runs)})"


def queued(rows: Sequence[Row], batches: Sequence[Batch]) -> list[Queued]:
    """The rows that carry a batch's id and have not ended.

    The id alone decides: what was sent twice, or had no number when its submitter died, is found as well.
    """
    by_id = {batch.id: [batch] for batch in batches}
    by_job: dict[str | None, list[Batch]] = {}
    for batch in batches:
        by_job.setdefault(batch.job, []).append(batch)
    found = []
    for row in rows:
        ids = (row.name.removeprefix(NAME), row.comment.removeprefix(NAME))
        near = by_id.get(ids[0]) or by_id.get(ids[1]) or by_job.get(row.job, [])
        found += [Queued(batch, row) for batch in near if row.carries(batch) and state_of(row.word).live]
    return found
