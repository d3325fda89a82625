"""How many jobs go to which cluster, and which have to stay here. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.launch.clusters import Capacity
from trimtab.launch.model import RunStatus, State
from trimtab.spec.launch import ClusterSpec, ResourceSpec

LATE = 60.0  # seconds: a cluster with free room on which a job would start later has it reserved for somebody
HOUR = 3600.0  # more than that an estimate does not count, and then as much as a queue of the cluster's size


@dataclass(frozen=True)
class Offer:
    """What a cluster offers to jobs of one class.

    ``room``: jobs that could start now; ``size``: jobs that the whole partition holds; ``waiting``: jobs ahead of ours
    in the queue; ``cap``: jobs that may be added, None: any number; ``wait``: seconds until the next one would start,
    where SLURM's estimate is of use.
    """

    cluster: str
    room: int
    size: int
    waiting: int = 0
    cap: int | None = None
    weight: float = 1.0
    wait: float = 0.0


def offer(name: str, spec: ClusterSpec, capacity: Capacity, asked: ResourceSpec, live: int, wait: float = 0.0) -> Offer:
    """``live``: jobs of this sweep that are there already; ``wait``: as SLURM estimates it.

    The estimate adds up the time limits of all that is queued, held jobs too, even where cores are idle: with anything
    in the queue it says nothing.
    """
    caps = [] if spec.max_jobs is None else [spec.max_jobs - live]
    caps += [] if capacity.max_submit is None else [capacity.max_submit]
    room, size = (
        _fits(capacity.free_cpus, capacity.free_gpus, asked),
        _fits(capacity.all_cpus, capacity.all_gpus, asked),
    )
    room = max(0, room - capacity.waiting)  # those ahead are taken to be like ours
    wait = 0.0 if capacity.waiting or capacity.held else wait
    return Offer(name, room, max(size, 1), capacity.waiting, max(min(caps), 0) if caps else None, spec.weight, wait)


def _fits(cpus: int, gpus: int, asked: ResourceSpec) -> int:
    by_cpus = cpus // max(1, asked.cpus * asked.tasks_per_node * asked.nodes)
    return min(by_cpus, gpus // (asked.gpus * asked.nodes)) if asked.gpus else by_cpus


def used(capacity: Capacity, asked: ResourceSpec, jobs: int) -> Capacity:
    """What is left once these jobs are there too."""
    cpus = capacity.free_cpus - jobs * asked.cpus * asked.tasks_per_node * asked.nodes
    gpus = capacity.free_gpus - jobs * asked.gpus * asked.nodes
    submit = None if capacity.max_submit is None else max(capacity.max_submit - jobs, 0)
    return replace(capacity, free_cpus=max(cpus, 0), free_gpus=max(gpus, 0), max_submit=submit)


def spread(jobs: int, offers: Sequence[Offer]) -> dict[str, int]:
    """Share ``jobs``: what is free first, in proportion to weight and room; the rest to where it waits least.

    Clusters of weight 0 take what the caps of the others leave. The sum is less when all caps are reached.
    """
    share = {one.cluster: 0 for one in offers}
    for group in ([one for one in offers if one.weight > 0], [one for one in offers if one.weight <= 0]):
        while sum(share.values()) < jobs:
            open_ = [one for one in group if one.cap is None or share[one.cluster] < one.cap]
            if not open_:
                break
            best = min(open_, key=lambda one: _cost(one, share[one.cluster]))
            share[best.cluster] += 1
    return share


def _cost(one: Offer, given: int) -> tuple[bool, float]:
    """What the next job costs: (whether it has to wait, how long in units of its cluster's size)."""
    weight = one.weight or 1.0
    if given < one.room and one.wait < LATE:
        return False, (given + 1) / (weight * one.room)
    queue = max(given - one.room, 0) + one.waiting + 1
    return True, (queue / one.size + min(one.wait, HOUR) / HOUR) / weight


def room(clusters: Mapping[str, ClusterSpec], live: Mapping[str, int]) -> str:
    """``alpha has 4 of max_jobs=4, beta has 1 of max_jobs=2``; empty where no cluster has such a limit."""
    capped = {name: spec.max_jobs for name, spec in clusters.items() if spec.max_jobs is not None}
    return ", ".join(f"{name} has {live.get(name, 0)} of max_jobs={most}" for name, most in capped.items())


def left(clusters: Mapping[str, ClusterSpec], runs: Sequence[RunStatus]) -> list[str]:
    """A line on the runs for which no job was made yet, if there are any."""
    count = sum(run.state is State.unsubmitted for run in runs)
    live = Counter(cluster for cluster, _ in {(run.cluster, run.job) for run in runs if run.state.live})
    if not count or not clusters:
        return []
    why = room(clusters, live)
    said = f"{count} of {len(runs)} runs {'is' if count == 1 else 'are'} not submitted{f' ({why})' if why else ''}"
    return [f"{said}; trimtab sweep resume submits what there is room for, with --wait all of them"]


def chunks(count: int, largest: int) -> list[int]:
    """``count`` slots as arrays of at most ``largest``, as equal as can be."""
    arrays = -(-count // max(1, largest))
    return [count // arrays + (i < count % arrays) for i in range(arrays)]
