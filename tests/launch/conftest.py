"""``slurm``: a real SLURM of two clusters (alpha, beta) with two nodes each and one accounting service."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "slurm"
NEEDED = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db")


@dataclass(frozen=True)
class Slurm:
    """A running SLURM. Its daemons: munge, db, slurmdbd, a controller named like each cluster, slurmd alpha-1 …"""

    state: Path
    clusters: tuple[str, ...] = ("alpha", "beta")

    def conf(self, cluster: str = "alpha") -> Path:
        """The cluster's slurm.conf; that of the other one reaches it by -M too."""
        return self.state / cluster / "slurm.conf"

    def use(self, cluster: str = "alpha") -> dict[str, str]:
        """Environment in which the client commands mean this cluster."""
        return os.environ | {"SLURM_CONF": str(self.conf(cluster))}

    def client(self, cluster: str, *command: str) -> str:
        """What a client command prints."""
        done = subprocess.run(command, env=self.use(cluster), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def pid(self, daemon: str) -> int:
        """Process of a daemon; signals may be sent to it."""
        return int((self.state / "pids" / daemon).read_text().split()[0])

    def stop(self, daemon: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon, by default without a chance to say good-bye, and wait until it's gone."""
        os.kill(self.pid(daemon), sig)
        wait_until(lambda: not alive(self.pid(daemon)), 20, f"the end of {daemon}")

    def start(self, daemon: str) -> None:
        """Start a daemon again that was stopped; ``ready`` waits for its cluster."""
        process = subprocess.Popen([self.state / "daemons" / daemon], start_new_session=True)
        began = Path(f"/proc/{process.pid}/stat").read_text().split()[21]
        (self.state / "pids" / daemon).write_text(f"{process.pid} {began}\n")
        CHILDREN.append(process)

    def ready(self, cluster: str) -> None:
        """Wait until the controller answers and each of its nodes takes jobs."""

        def up() -> bool:
            command = ["sinfo", "-hNp", "main", "-o", "%t"]
            done = subprocess.run(command, env=self.use(cluster), capture_output=True, text=True, timeout=60)
            return done.returncode == 0 and set(done.stdout.split()) <= {"idle", "mix", "alloc"}

        wait_until(up, 60, f"cluster {cluster}")

    def jobs(self, cluster: str) -> list[str]:
        """Numbers of the jobs that have not ended; an array's elements one by one."""
        return self.client(cluster, "squeue", "-hro", "%i").split()

    def clear(self) -> None:
        """Start daemons that a test has stopped, and cancel every job."""
        for path in sorted((self.state / "daemons").iterdir()):
            if not alive(self.pid(path.name)):
                self.start(path.name)
        for cluster in self.clusters:
            self.ready(cluster)
            self.client(cluster, "scancel", "--user=root", "--state=PENDING")
            for full in ("--full", "--batch"):  # the steps and the script; as some ignore TERM, no questions asked
                subprocess.run(["scancel", "--user=root", "--signal=KILL", full], env=self.use(cluster), timeout=60)
            self.client(cluster, "scancel", "--user=root")
        for cluster in self.clusters:
            wait_until(lambda name=cluster: not self.jobs(name), 60, f"the end of the jobs of {cluster}")


CHILDREN: list[subprocess.Popen[bytes]] = []  # kept, so that none is reported as forgotten


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    for child in CHILDREN:
        child.poll()
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Fail when it does not come true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"no {what} after {seconds:.0f} s"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[Slurm]:
    """Started once for all tests of a process."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed (packages slurm-wlm slurmdbd munge mariadb-server)")
    if os.getuid() != 0:
        pytest.skip("slurmd has to be started by root")
    top = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 bytes
    try:
        subprocess.run(
            [SCRIPTS / "start.sh", top], check=True, env=os.environ | {"OWNER": str(os.getpid())}, timeout=120
        )
        yield Slurm(top)
    finally:
        subprocess.run([SCRIPTS / "stop.sh", top], check=True, timeout=120)
        for child in CHILDREN:
            child.wait()
        shutil.rmtree(top)


@pytest.fixture
def slurm(slurm_daemons: Slurm) -> Iterator[Slurm]:
    """Two clusters without jobs; what the test leaves there is ended."""
    yield slurm_daemons
    slurm_daemons.clear()
