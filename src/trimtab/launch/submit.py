"""Sends runs to the clusters: once each, whatever happens to this process meanwhile.

Every batch is on disk before its sbatch, and again with its number afterwards. One that has no number was cut off in
between: its cluster is asked for a job of its name. A lock, which the sbatch processes hold too, keeps a second
submitter (and this question) from looking while a first one, or its orphan, is at it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from trimtab.errors import TrimtabError
from trimtab.launch.clusters import PATIENCE, Capacity, Cluster, ClusterError, Unreachable
from trimtab.launch.files import SweepFolder
from trimtab.launch.model import Batch, PlannedRun, RunStatus, Slot, State
from trimtab.launch.slurm import NAME, ClusterExecutor, Sheet
from trimtab.launch.spread import Offer, chunks, offer, room, spread, used
from trimtab.launch.status import note_cause, survey
from trimtab.spec.launch import ResourceSpec, SweepSpec

Say = Callable[[str], None]
T = TypeVar("T")
LOCK_PATIENCE = 180.0  # seconds; an orphaned sbatch ends before
SECOND_LOOK = 1.0  # seconds in which a controller that just came back takes up what it was sent before


def clusters_of(spec: SweepSpec) -> dict[str, Cluster]:
    """The clusters of a sweep by name."""
    return {name: Cluster(name, cluster, PATIENCE) for name, cluster in spec.launch.clusters.items()}


@contextmanager
def submitting(folder: SweepFolder, clusters: Mapping[str, Cluster], patience: float = LOCK_PATIENCE) -> Iterator[None]:
    """Hold the sweep's lock: nobody else submits for it, and no sbatch of a dead submitter is under way."""
    folder.batches.mkdir(exist_ok=True)
    handle = os.open(folder.batches / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + patience
        while not _locked(handle):
            if time.monotonic() > until:
                raise TrimtabError(f"another process is submitting {folder.path}; wait for it, or end it")
            time.sleep(0.1)
        for cluster in clusters.values():
            cluster.keep = (handle,)
        yield
    finally:
        for cluster in clusters.values():
            cluster.keep = ()
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- what a dead submitter has left ----------------------------------------------------------------------------------


def recover(folder: SweepFolder, clusters: Mapping[str, Cluster], say: Say) -> None:
    """Give batches without a number the one that their cluster knows, or note that they never arrived there.

    Only under ``submitting``. What cannot be found out now stays as it is, and its runs count as live.
    """
    silent: set[str] = set()
    for batch in folder.all_batches():
        cluster = clusters.get(batch.cluster)
        if batch.job is not None or batch.refused or batch.cluster in silent or cluster is None:
            continue
        try:
            found = _find(cluster, batch)
            if found is None:
                time.sleep(SECOND_LOOK)
                found = _find(cluster, batch)
        except ClusterError as error:
            say(f"{error}; whether it has batch {batch.id} stays open")
            silent.add(batch.cluster)
            continue
        if found is not None:
            folder.write_batch(replace(batch, job=found, array=len(batch.slots) > 1, script=_script(batch)))
            say(f"{batch.cluster}: batch {batch.id} was sent by a process that ended; it is job {found}")
        elif not any(folder.batches.glob(f"{batch.id}_*")):  # a log or a claim: it ran, and the books are short
            folder.write_batch(replace(batch, refused="never arrived: the process that was sending it ended"))


def _find(cluster: Cluster, batch: Batch) -> str | None:
    row = cluster.find(NAME + batch.id, batch.created)
    return None if row is None else row.job


def _script(batch: Batch) -> str:
    return f"batches/{batch.id}.sbatch"


# -- before anything is sent -----------------------------------------------------------------------------------------


def preflight(folder: SweepFolder, spec: SweepSpec, runs: Sequence[PlannedRun], say: Say) -> list[str]:
    """What keeps runs from being submitted, one line each: a class that no cluster takes, or limits that don't fit.

    A cluster that refuses a class, or cannot be reached, is said; it is a fault only when no other takes the class.
    """
    faults = [] if spec.launch.clusters else ["launch.clusters is empty; give one, as in launchers/slurm.yaml"]
    clusters = clusters_of(spec)
    for name, count in Counter(run.resources for run in runs).items():
        asked = spec.launch.classes.get(name)
        if asked is None:
            faults.append(
                f"launch.classes has no {name}, which {count} runs ask for; it has {', '.join(spec.launch.classes)}"
            )
            continue
        if spec.launch.signal_lead >= asked.minutes * 60:
            faults.append(
                f"launch.signal_lead={spec.launch.signal_lead} s is no shorter than launch.classes.{name}.minutes="
                f"{asked.minutes}; a run would be stopped as it starts"
            )
            continue
        answers = _ask_all(clusters, partial(_test, folder=folder, spec=spec, name=name))
        refused = {key: answer for key, answer in answers.items() if isinstance(answer, ClusterError)}
        if clusters and len(refused) == len(clusters):
            faults += [f"class {name}: {error}" for error in refused.values()]
        else:
            for error in refused.values():
                say(f"class {name}: {error}; the other clusters take it")
    return faults


def _test(cluster: Cluster, folder: SweepFolder, spec: SweepSpec, name: str) -> float:
    """Seconds until a job of the class would start."""
    batch = Batch("test", cluster.name, name, (Slot((("run", 1),)),), 0.0)
    start = cluster.test_only(_executor(cluster, folder, spec, batch, {}).script())
    return max(0.0, start - time.time()) if start is not None else 0.0


def _executor(
    cluster: Cluster, folder: SweepFolder, spec: SweepSpec, batch: Batch, environment: Mapping[str, str]
) -> ClusterExecutor:
    asked = spec.launch.classes[batch.resources]
    return ClusterExecutor(cluster, Sheet(folder.path, batch, asked, spec.launch.signal_lead, environment))


def _ask_all(clusters: Mapping[str, Cluster], question: Callable[[Cluster], T]) -> dict[str, T | ClusterError]:
    """Each cluster's answer or refusal, all at the same time: one that hangs costs its patience once."""

    def ask(cluster: Cluster) -> T | ClusterError:
        try:
            return question(cluster)
        except ClusterError as error:
            return error

    if not clusters:
        return {}
    with ThreadPoolExecutor(len(clusters)) as pool:
        return dict(zip(clusters, pool.map(ask, clusters.values()), strict=True))


def scripts(folder: SweepFolder, spec: SweepSpec, runs: Sequence[PlannedRun], say: Say = print) -> list[Path]:
    """Write the scripts that ``submit`` would send to ``dry_run/``, and send nothing."""
    clusters = clusters_of(spec)
    target = folder.path / "dry_run"
    target.mkdir(parents=True, exist_ok=True)
    environment = folder.sweep().environment if folder.sweep_json.exists() else {}
    written = []
    sender = Sender(folder, spec, clusters, say)
    for name, slots in sender.classes(runs, {}):
        for cluster, count in spread(len(slots), sender.offers(name)).items():
            for n, size in enumerate(chunks(count, sender.largest(cluster)) if count else []):
                batch = Batch(f"dry-{cluster}-{name}-{n}", cluster, name, tuple(slots[:size]), time.time())
                slots = slots[size:]
                path = target / f"{cluster}_{name}_{n}.sbatch"
                path.write_text(_executor(clusters[cluster], folder, spec, batch, environment).script())
                written.append(path)
    return written


# -- submission ------------------------------------------------------------------------------------------------------


def submit(folder: SweepFolder, spec: SweepSpec, runs: Sequence[PlannedRun], say: Say = print) -> list[Batch]:
    """Send the runs that are neither completed nor live; the batches that a cluster has taken.

    What none takes now (caps, refusals, unreachable clusters) is said, and is left for the next call.
    """
    clusters = clusters_of(spec)
    with submitting(folder, clusters):
        recover(folder, clusters, say)
        found = survey(folder, clusters)
        for remark in found.remarks:
            say(remark)
        states = {status.run.dir: status for status in found.runs}
        wanted = [run for run in runs if _may_start(states.get(run.dir))]
        for run in wanted:
            if run.dir in states and states[run.dir].attempt:
                note_cause(folder, states[run.dir])
        return Sender(folder, spec, clusters, say, list(states.values())).send(wanted)


def _may_start(status: RunStatus | None) -> bool:
    return status is None or not (status.state.live or status.state is State.completed)


@dataclass
class Sender:
    """Spreads runs over the clusters and submits them; a cluster that refuses or is silent is not asked again."""

    folder: SweepFolder
    spec: SweepSpec
    clusters: Mapping[str, Cluster]
    say: Say
    states: Sequence[RunStatus] = ()

    def __post_init__(self) -> None:
        self._live = Counter(cluster for cluster, _ in {(s.cluster, s.job) for s in self.states if s.state.live})
        self._capacity: dict[str, Capacity] = {}
        self._out: set[tuple[str, str]] = set()  # (cluster, class) that refused; class "" for all of them
        if self.clusters:
            for name, answer in _ask_all(self.clusters, Cluster.capacity).items():
                if isinstance(answer, ClusterError):
                    self.say(f"{answer}; the other clusters go on without it")
                    self._out.add((name, ""))
                else:
                    self._capacity[name] = answer

    def classes(self, runs: Sequence[PlannedRun], attempts: Mapping[str, int]) -> Iterator[tuple[str, list[Slot]]]:
        """(class, its slots); the runs of a slot share its job."""
        for name, group in groupby(sorted(runs, key=lambda run: run.resources), key=lambda run: run.resources):
            one = [(run.dir, attempts.get(run.dir, 0) + 1) for run in group]
            k = max(1, self.spec.runs_per_job)
            yield name, [Slot(tuple(one[i : i + k])) for i in range(0, len(one), k)]

    def offers(self, name: str) -> list[Offer]:
        """What each cluster that still takes part offers to a class."""
        asked: ResourceSpec = self.spec.launch.classes[name]
        ready = {key: self.clusters[key] for key in self._capacity if not {(key, ""), (key, name)} & self._out}
        waits = _ask_all(ready, partial(_test, folder=self.folder, spec=self.spec, name=name))
        found = []
        for key, wait in waits.items():
            if isinstance(wait, ClusterError):
                self.say(f"class {name}: {wait}")
                self._out.add((key, "" if isinstance(wait, Unreachable) else name))
            else:
                found.append(offer(key, self.clusters[key].spec, self._capacity[key], asked, self._live[key], wait))
        return found

    def largest(self, cluster: str) -> int:
        """Slots that one array may have there."""
        return self._capacity[cluster].max_array

    def send(self, runs: Sequence[PlannedRun]) -> list[Batch]:
        """Submit them all; the batches that were taken."""
        attempts: dict[str, int] = {}
        for batch in self.folder.all_batches():
            if not batch.refused:
                attempts.update({run: max(n, attempts.get(run, 0)) for slot in batch.slots for run, n in slot.runs})
        taken: list[Batch] = []
        for name, slots in self.classes(runs, attempts):
            left = list(slots)
            while left:
                share = spread(len(left), self.offers(name))
                if not any(share.values()):
                    break
                for cluster, count in share.items():
                    mine, left = left[:count], left[count:]
                    back = self._to(cluster, name, mine, taken)
                    left = back + left
            if left:
                self.say(self._staying(name, left, len(slots)))
        return taken

    def _staying(self, name: str, left: Sequence[Slot], asked: int) -> str:
        runs, most = sum(len(slot.runs) for slot in left), self.spec.launch.clusters
        full = room({key: most[key] for key in self._capacity if key in most}, self._live)
        later = ("this command sends them once there is room" if self.spec.wait
                 else "trimtab sweep resume sends what there is room for then, with --wait all of them")  # fmt: skip
        which = f"{runs} run{'' if runs == 1 else 's'} of class {name} {'is' if runs == 1 else 'are'}"
        return (f"{which} not submitted ({len(left)} of {asked} jobs): no cluster takes more "
                f"now{f' ({full})' if full else ''}; {later}")  # fmt: skip

    def _to(self, cluster: str, name: str, slots: list[Slot], taken: list[Batch]) -> list[Slot]:
        """Send slots to one cluster, in arrays that it takes; those that it refused."""
        environment = self.folder.sweep().environment
        largest = self.largest(cluster)
        while slots and not {(cluster, ""), (cluster, name)} & self._out:
            size = chunks(len(slots), largest)[0]
            batch = self.folder.new_batch(cluster, name, slots[:size])
            executor = _executor(self.clusters[cluster], self.folder, self.spec, batch, environment)
            try:
                job: str | None = executor.send()
            except Unreachable as error:
                self._out.add((cluster, ""))
                if not error.sent:
                    self._refused(batch, error)
                    return slots
                job = self._sought(batch, error)
                if job is None:
                    return slots[size:]  # may be there: nobody else gets these
            except ClusterError as error:
                self._refused(batch, error)
                largest = size // 2 if "imit" in str(error) else 0  # a limit on jobs: perhaps it takes fewer
                if largest == 0:
                    self._out.add((cluster, name))
                continue
            taken.append(self.folder.write_batch(replace(batch, job=job, array=size > 1, script=_script(batch))))
            self._live[cluster] += size
            self._capacity[cluster] = used(self._capacity[cluster], self.spec.launch.classes[name], size)
            slots = slots[size:]
        return slots

    def _refused(self, batch: Batch, error: ClusterError) -> None:
        self.folder.write_batch(replace(batch, refused=str(error), script=_script(batch)))
        self.say(f"{error}; its {len(batch.slots)} jobs go elsewhere")

    def _sought(self, batch: Batch, error: Unreachable) -> str | None:
        """The number of a batch whose sbatch gave no answer, when its cluster knows it after all."""
        self.say(f"{error}; batch {batch.id} may be there all the same: it is looked for, and not sent elsewhere")
        try:
            return _find(self.clusters[batch.cluster], batch)
        except ClusterError:
            return None
