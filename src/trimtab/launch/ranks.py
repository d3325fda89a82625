"""Several tasks of one run: who is which rank, where they meet, and how the others learn that one of them ended.

The ranks share the sweep's folder and nothing else. Rank 0 publishes address and port of each run, and every rank how
its part ended, in ``batches/<id>_<slot>.ranks/<restart>/``: a requeue never reads what an earlier start has left.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import write_text
from trimtab.launch.attempts import hold
from trimtab.launch.model import State

PORTS = range(20000, 32000)  # below what systems hand out for outgoing connections (Linux 32768, IANA 49152)
POLL = 0.1


@dataclass(frozen=True)
class Place:
    """This task among those of its job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> Place:
        """From what srun sets; one of one where it sets nothing."""
        world = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
        if world == 1:
            return cls()
        rank, node = int(environment["SLURM_PROCID"]), int(environment["SLURM_NODEID"])
        counts = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
        return cls(rank, world, int(environment["SLURM_LOCALID"]), counts[node], node)

    def environment(self, address: str, port: int) -> dict[str, str]:
        """What torch.distributed's ``env://`` and torchrun's programs read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def tasks_of_nodes(text: str) -> list[int]:
    """SLURM's ``2(x3),1`` as ``[2, 2, 2, 1]``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def address() -> str:
    """How other nodes reach this one: its name where it resolves, else the address that it sends from."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel only chooses the way
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"


def free_port(key: str) -> tuple[int, int]:
    """(port, lock): nothing listens on it, and no other run of this launcher takes it while this process lives.

    Searched from a place that ``key`` determines, so that two runs on a node rarely try the same one.
    """
    locks = Path(tempfile.gettempdir()) / f"trimtab-ports-{os.getuid()}"
    locks.mkdir(mode=0o700, exist_ok=True)
    begin = zlib.crc32(key.encode()) % len(PORTS)
    for port in (*PORTS[begin:], *PORTS[:begin]):
        lock = hold(locks / str(port))
        if lock is None:
            continue
        if _unused(port):
            return port, lock
        os.close(lock)
    raise TrimtabError(f"every port from {PORTS[0]} to {PORTS[-1]} is taken on {socket.gethostname()}")


def _unused(port: int) -> bool:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class End:
    """How a rank's part of a run ended."""

    state: State
    objective: float | None
    error: str
    when: float


class Meeting:
    """Where the ranks of one slot's start leave word for each other. ``i``: number of the run in the slot."""

    def __init__(self, path: Path, place: Place) -> None:
        self._path, self._place = path, place
        self._lock: int | None = None
        path.mkdir(parents=True, exist_ok=True)

    def begin(self, i: int, key: str) -> dict[str, str]:
        """Rank 0: choose where the ranks meet and say so; the environment of its own program."""
        self.close()
        port, self._lock = free_port(key)
        write_text(self._path / f"{i}.start", json.dumps({"address": address(), "port": port}))
        return self._place.environment(address(), port)

    def skip(self, i: int) -> None:
        """Rank 0: this run isn't carried out."""
        write_text(self._path / f"{i}.start", "{}")

    def join(self, i: int, give_up: Callable[[], bool]) -> dict[str, str] | None:
        """Other ranks: wait for rank 0; the program's environment, empty if it skips the run, None on ``give_up()``."""
        while (found := self._read(f"{i}.start")) is None:
            if give_up():
                return None
            time.sleep(POLL)
        return self._place.environment(found["address"], found["port"]) if found else {}

    def end(self, i: int, state: State, objective: float | None, error: str) -> None:
        """This rank's part of the run has ended."""
        end = {"state": state.value, "objective": objective, "error": error, "when": time.time()}
        write_text(self._path / f"{i}.{self._place.rank}.end", json.dumps(end))

    def ended(self, i: int) -> dict[int, End]:
        """The ranks that have ended, and how."""
        found = {rank: self._read(f"{i}.{rank}.end") for rank in range(self._place.world)}
        return {rank: End(**end | {"state": State(end["state"])}) for rank, end in found.items() if end is not None}

    def verdict(self, i: int, patience: float) -> tuple[State, float | None, str]:
        """How the run ended (state, objective of rank 0, error), once all ranks have or ``patience`` seconds passed.

        The first error counts: what follows is mostly of peers in a broken exchange. And where a rank was asked to
        stop the others' errors are no fault of the run.
        """
        until = time.monotonic() + patience
        while len(ends := self.ended(i)) < self._place.world and time.monotonic() < until:
            time.sleep(POLL)
        in_time = sorted(ends.items(), key=lambda item: item[1].when)
        for wanted in ((State.preempted,), (State.failed, State.out_of_memory)):
            for rank, end in in_time:
                if end.state in wanted:
                    return end.state, None, f"rank {rank}: {end.error}" if rank else end.error
        missing = [str(rank) for rank in range(self._place.world) if rank not in ends]
        if missing:
            return State.failed, None, f"no word from rank {', '.join(missing)}"
        return State.completed, ends[0].objective, ""

    def close(self) -> None:
        """Give the port back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self._path / name).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found
