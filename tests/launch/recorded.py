"""Clusters that answer what is recorded, and a sweep of four runs on them, for tests of ``trimtab sweep``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab import cli
from trimtab.errors import TrimtabError
from trimtab.launch import cancel, commands
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, Result, Slot, State, Sweep
from trimtab.launch.states import Row


class Cluster:
    """A queue and books; ``scancel`` ends what it is given, but for ``deaf`` jobs, which are requeued once."""

    def __init__(self, *rows: Row, books: Sequence[Row] = (), deaf: Sequence[str] = (), away: bool = False) -> None:
        self.queue, self.books, self.deaf, self.away = list(rows), list(books), list(deaf), away
        self.cancelled: list[str] = []

    def squeue(self) -> list[Row]:
        if self.away:
            raise TrimtabError("no route to host")
        return self.queue

    def sacct(self, jobs: Sequence[str]) -> list[Row]:
        if self.away:
            raise TrimtabError("no route to host")
        return [row for row in self.books if row.job in jobs]

    def scancel(self, job: str) -> None:
        self.cancelled.append(job)
        number, _, index = job.partition("_")
        hit = [row for row in self.queue if row.job == number and (not index or row.index == int(index))]
        for row in hit:
            if job in self.deaf:
                self.deaf.remove(job)
                continue
            self.queue.remove(row)
            self.books.append(Row(row.job, row.index, "CANCELLED by 0", name=row.name))


NAMES = [f"algo_{i:016x}_s0" for i in (0xAAAAAAAA00000000, 0xBBBBBBBB00000000, 0xCCCCCCCC00000000, 0xDDDDDDDD00000000)]


def sweep_of_four(path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep of four runs with 6 combinations in multirun/s, and that the working folder."""
    monkeypatch.chdir(path)
    monkeypatch.setattr(cancel, "POLL", 0.01)
    at = SweepFolder(Path("multirun/s"))
    at.batches.mkdir(parents=True)
    runs = tuple(
        PlannedRun(n, n.split("_")[1], 0, (f"optim.lr={i}", "task.name=a,b", "seed=0")) for i, n in enumerate(NAMES)
    )
    at.write_sweep(Sweep("bounds", runs, 6, {"launch": {"backend": "slurm"}}, {"commit": "abc"}, {}, 0.0))
    return at


def sent(at: SweepFolder, cluster: str, job: str, *slots: Sequence[int], attempt: int = 1) -> Batch:
    """A batch of ``slots``, submitted a while ago."""
    batch = at.new_batch(cluster, "default", [Slot(tuple((NAMES[i], attempt) for i in slot)) for slot in slots])
    return at.write_batch(replace(batch, job=job, array=len(slots) > 1, created=time.time() - 500))


def row(batch: Batch, word: str, slot: int | None = None, reason: str = "None") -> Row:
    """Its line in a queue."""
    return Row(str(batch.job), slot, word, reason, name=f"x-{batch.id}")


def ended(at: SweepFolder, batch: Batch, i: int, state: State, attempt: int = 1, **more: object) -> None:
    """The result of the i-th run."""
    at.write_result(NAMES[i], Result(batch.id, attempt, state, 10.0, 12.5, **more))  # type: ignore[arg-type]


def on(monkeypatch: pytest.MonkeyPatch, **clusters: Cluster) -> None:
    """Have the commands reach these."""
    monkeypatch.setattr(commands, "clusters_of", lambda spec, patience: clusters)


def sweep(*arguments: str) -> int:
    """Run ``trimtab sweep``."""
    return cli.main(["sweep", *arguments])
