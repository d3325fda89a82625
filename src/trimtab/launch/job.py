"""What a job runs on its node: ``python -u -P -m trimtab.launch.job <sweep folder> <batch id>``.

The supervisor of one slot: it pays for the imports once, forks each run off (``child.py``), passes signals on, and in
the end has the job requeued when a run was told to stop and may go on. Exit codes: 0 all completed, 1 one failed, 75
one has to go on, 2 the job itself is wrong. With several tasks each is a supervisor; rank 0's decides.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from trimtab.errors import DataError, TrimtabError
from trimtab.launch import node
from trimtab.launch.attempts import Claim, causes
from trimtab.launch.child import FAILED, OK, STOPPED, Caught, Program, Task
from trimtab.launch.files import SweepFolder
from trimtab.launch.frozen import read
from trimtab.launch.model import Batch, State
from trimtab.launch.ranks import Meeting, Place
from trimtab.launch.retry import allowed
from trimtab.launch.running import Running
from trimtab.launch.stop import Asked
from trimtab.spec import RunSpec
from trimtab.spec.launch import Packing, RetrySpec

WRONG = 2
POLL, STALE = 0.05, 3.0  # seconds between looks at the children, and at whether they still count


def refuse_other_code(folder: SweepFolder) -> None:
    """DataError unless trimtab is imported from the sweep's copy, when there is one."""
    here = Path(__file__).resolve()
    copy = folder.code / "src" / "trimtab"
    if copy.is_dir() and not here.is_relative_to(copy.resolve()):
        raise DataError(f"the job imports {here.parent}, not the sweep's copy; start it with PYTHONPATH={copy.parent}")


def go_where_it_was_started(folder: SweepFolder) -> None:
    """A config's relative paths are meant from there; SLURM starts a job in the sweep's folder."""
    there = folder.sweep().code.get("cwd")
    if there is not None and Path(there).is_dir():
        os.chdir(there)


def frozen(folder: SweepFolder, run: str, expected: str, digest: str = "") -> RunSpec:
    """The run's config as it was when the sweep was started; DataError when it was changed since."""
    spec = read(folder.config(run), digest)
    if spec is None:
        from trimtab.config import config_hash, read_yaml  # slow, and hardly ever needed

        spec = read_yaml(folder.config(run))
        if config_hash(spec) != expected:
            raise DataError(
                f"{folder.config(run)} was changed ({config_hash(spec)}, was {expected}); start another sweep"
            )
    return replace(spec, run_dir=str(folder.run(run)), resume="auto")


def load(name: str, specs: Sequence[RunSpec]) -> Program:
    """The function that ``launch.program`` names; its module's ``preload(specs)``, if any, imports what they need."""
    module_name, _, function = name.partition(":")
    module = import_module(module_name)
    names = vars(module)
    if function not in names:
        raise DataError(f"launch.program={name}: {module_name} has no {function!r}; give module:function")
    if "preload" in names:
        names["preload"](specs)
    program: Program = names[function]
    return program


def share_cores(folder: SweepFolder, batch: Batch, slot: int) -> None:
    """Bound the threads of the runs that run at the same time, before anything is imported that makes them."""
    sweep = folder.sweep()
    launch, packed = sweep.launch["launch"], len(batch.slots[slot].runs)
    together = packed if Packing(launch["packing"]) is Packing.side_by_side else 1
    if batch.cluster == "local":
        together *= max(min(launch["at_once"], -(-len(sweep.runs) // packed)), 1)
    if batch.cluster != "local" or together > 1:
        os.environ.update(node.threads(os.environ, node.cores(os.environ), together))


class Supervisor:
    """Carries out the runs of one slot."""

    def __init__(self, folder: SweepFolder, batch: Batch, slot: int, place: Place, asked: Asked) -> None:
        self._folder, self._batch, self._slot, self._place, self._asked = folder, batch, slot, place, asked
        self._launch = folder.sweep().launch["launch"]
        self._side_by_side = Packing(self._launch["packing"]) is Packing.side_by_side
        self._claim = Claim(folder, batch.id, slot)
        self._meeting: Meeting | None = None
        if place.world > 1:
            self._meeting = Meeting(folder.batches / f"{batch.id}_{slot}.ranks" / str(node.restarts()), place)
        self._running: list[Running] = []
        self._passed_on = 0  # how many of the signals the running ones have got
        self._looked = time.monotonic()

    def carry_out(self) -> int:
        """Run what is to be run; the job's exit code."""
        if self._place.rank == 0:
            self._claim.take()
        waiting = deque(self._tasks())
        loaded, refused = False, None
        program: Program | None = None
        most = len(waiting) if self._side_by_side and self._meeting is None else 1
        while waiting or self._running:
            if waiting and len(self._running) < most and not self._asked.names:
                if not loaded:
                    with Caught() as caught:
                        program = load(self._launch["program"], [task.spec for task in waiting])
                    loaded, refused = True, caught.error
                    continue  # look first whether a signal came during the imports
                task = waiting.popleft()
                self._start(replace(task, refused=task.refused or refused), program)
                continue
            while self._asked.names and waiting:
                self._leave_out(waiting.popleft())
            self._running = [one for one in self._running if not one.poll(bool(self._asked.names))]
            self._pass_on()
            time.sleep(POLL)
        return self._end()

    def _tasks(self) -> list[Task]:
        """The slot's runs that are still to be carried out, in order. The other ranks learn from rank 0 which."""
        sweep = self._folder.sweep()
        planned = {run.dir: run for run in sweep.runs}
        found = []
        for i, (run, attempt) in enumerate(self._batch.slots[self._slot].runs):
            if self._place.rank == 0 and (why := self._needless(run)):
                print(f"{run}: {why}", flush=True)
                if self._meeting is not None:
                    self._meeting.skip(i)
                continue
            spec = RunSpec()
            overrides: tuple[str, ...] = ()
            with Caught() as caught:  # one run's unreadable config is no matter of the others
                overrides = planned[run].overrides
                spec = frozen(self._folder, run, planned[run].config_hash, sweep.digests.get(run, ""))
            found.append(
                Task(
                    self._folder, self._batch, self._slot, i, run, attempt, spec, overrides, dict(sweep.code),
                    self._launch["signal_lead"], self._claim, self._place, self._meeting, time.time(), caught.error,
                )
            )  # fmt: skip
        return found

    def _needless(self, run: str) -> str:
        """Why the run is not to be carried out; empty when it is."""
        result = self._folder.result(run)
        if result is not None and result.state is State.completed:
            return "is completed"
        if self._claim.stale(run):
            return "a newer attempt has taken it"
        if result is not None and result.batch == self._batch.id and not self._may_go_on(run, result.state):
            return f"ended as {result.state.value} before this restart"
        return ""

    def _may_go_on(self, run: str, state: State) -> bool:
        """Whether this job may start the run again by itself."""
        again = state in (State.preempted, State.timed_out)
        return again and allowed(causes(self._folder, run), RetrySpec(**self._launch["retries"]), state)

    def _start(self, task: Task, program: Program | None) -> None:
        task = replace(task, started=time.time())
        environment: dict[str, str] = {}
        if self._meeting is not None:
            if self._place.rank == 0:
                key = f"{self._batch.id}_{self._slot}_{task.i}_{node.restarts()}"
                environment = self._meeting.begin(task.i, key)
            else:
                joined = self._meeting.join(task.i, lambda: bool(self._asked.names))
                if joined is None:
                    self._leave_out(task)
                if not joined:
                    return
                environment = joined
        label = f"{task.run}: " if self._side_by_side else ""
        self._running.append(Running(task, None if task.refused else program, environment, label))

    def _leave_out(self, task: Task) -> None:
        """The job was stopped before the run's turn came; another rank may have begun it all the same."""
        if self._meeting is not None:
            self._meeting.end(task.i, State.preempted, None, "stopped before it began")

    def _pass_on(self) -> None:
        """Hand signals to the children; stop those that no longer count."""
        for name in self._asked.names[self._passed_on :]:
            self._passed_on += 1
            print(f"{name}: the runs save and end", flush=True)
            for one in self._running:
                one.send(signal.Signals[name])
        if time.monotonic() - self._looked > STALE and self._place.rank == 0:
            self._looked = time.monotonic()
            for one in self._running:
                if self._claim.stale(one.task.run):
                    one.send(signal.SIGTERM)

    def _end(self) -> int:
        """Exit code; the job is requeued first when some of its runs may go on."""
        if self._place.rank != 0:
            return OK
        code, again = OK, False
        for run, _ in self._batch.slots[self._slot].runs:
            result = self._folder.result(run)
            if (result is not None and result.state is State.completed) or self._claim.stale(run):
                continue
            ended = result is not None and result.batch == self._batch.id
            state = result.state if result is not None and ended else State.preempted  # else: its turn never came
            stopped = state in (State.preempted, State.timed_out)
            again |= self._may_go_on(run, state)
            code = max(code, STOPPED) if stopped and code != FAILED else FAILED
        if again and self._asked.names and self._batch.cluster != "local":
            self._requeue()
        return code

    def _requeue(self) -> None:
        if node.cause(self._launch["signal_lead"]) is State.cancelled:
            print("the job was cancelled, or is being requeued: nothing more is asked of SLURM", flush=True)
            return
        why = node.requeue()
        print(f"not requeued: {why}" if why else "requeued: its next start goes on", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Carry out a batch's slot (this array element's); the exit code."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow a busy machine tenfold
    with Asked() as asked:
        try:
            folder = SweepFolder(Path(arguments[0]).absolute())
            refuse_other_code(folder)
            go_where_it_was_started(folder)
            batch = folder.batch(arguments[1])
            local = batch.cluster == "local"
            slot = 0 if local else int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))
            share_cores(folder, batch, slot)
            place = Place() if local else Place.here(os.environ)
            return Supervisor(folder, batch, slot, place, asked).carry_out()
        except TrimtabError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
