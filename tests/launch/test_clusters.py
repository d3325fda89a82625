"""Client commands of one cluster, against stand-ins for them and against a real SLURM."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from trimtab.launch.clusters import Cluster, ClusterError, Unreachable, _gres, _indices, safe
from trimtab.launch.states import Row
from trimtab.spec.launch import ClusterSpec

SCRIPT = "#!/bin/sh\n#SBATCH --job-name=trimtab-x --output=/dev/null --cpus-per-task=1\nsleep "


def stand_in(folder: Path, name: str, body: str) -> Path:
    """An executable that takes a client's place; ``folder`` has to come first in PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_client_that_hangs_is_ended_with_its_children(bin: Path) -> None:
    stand_in(bin, "squeue", f"sleep 3131 & echo $! > {bin}/pid; wait")
    began = time.monotonic()
    with pytest.raises(Unreachable, match="far: squeue has not answered in 1 s") as caught:
        Cluster("far", ClusterSpec(), patience=1.0).squeue()
    assert time.monotonic() - began < 5 and caught.value.sent
    child = int((bin / "pid").read_text())
    time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


@pytest.mark.parametrize(
    ("words", "kind", "sent"),
    [
        ("Unable to contact slurm controller (connect failure)", Unreachable, False),
        ("'beta' can't be reached now, or it is an invalid entry for --cluster.", Unreachable, False),
        ("ssh: connect to host x port 22: Connection refused", Unreachable, False),
        ("Batch job submission failed: Socket timed out on send/recv operation", Unreachable, True),
        ("Connection closed by remote host", Unreachable, True),
        ("Batch job submission failed: Invalid account or account/partition combination", ClusterError, None),
    ],
)
def test_refusals_and_silence_are_told_apart(bin: Path, words: str, kind: type, sent: bool | None) -> None:
    stand_in(bin, "sbatch", f'cat >/dev/null; echo "sbatch: error: {words}" >&2; exit 1')
    with pytest.raises(ClusterError, match="near: sbatch: error") as caught:
        Cluster("near", ClusterSpec()).sbatch("#!/bin/sh\n")
    assert type(caught.value) is kind
    assert not isinstance(caught.value, Unreachable) or caught.value.sent is sent


def test_a_process_that_the_client_leaves_behind_is_not_waited_for(bin: Path) -> None:
    stand_in(bin, "sbatch", f"cat >/dev/null; sleep 3132 & echo $! > {bin}/pid; echo 5")
    began = time.monotonic()
    assert Cluster("a", ClusterSpec()).sbatch("") == "5" and time.monotonic() - began < 5
    os.kill(int((bin / "pid").read_text()), signal.SIGKILL)


def test_a_missing_client_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unreachable, match=r"sbatch is not installed here; set launch\.clusters\.a\.via"):
        Cluster("a", ClusterSpec()).sbatch("")


def test_an_answer_without_a_number_is_no_submission(bin: Path) -> None:
    stand_in(bin, "sbatch", "echo welcome")
    with pytest.raises(Unreachable, match="names no job") as caught:
        Cluster("a", ClusterSpec()).sbatch("")
    assert caught.value.sent
    stand_in(bin, "sbatch", "echo '*** maintenance on friday'; echo '17;beta'")
    assert Cluster("a", ClusterSpec()).sbatch("") == "17"


def test_variables_of_another_job_do_not_reach_the_clients(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(bin, "squeue", f"env > {bin}/env; printf '%s\\n' \"$@\" > {bin}/words")
    for name in ("SLURM_CLUSTERS", "SQUEUE_FORMAT", "SBATCH_PARTITION", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "wrong")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    Cluster("a", ClusterSpec(conf="/etc/a b.conf", member="beta")).squeue()
    seen = dict(line.split("=", 1) for line in (bin / "env").read_text().splitlines() if "=" in line)
    assert seen["SLURM_CONF"] == "/etc/a b.conf"
    assert not {"SLURM_CLUSTERS", "SQUEUE_FORMAT", "SBATCH_PARTITION", "SLURM_JOB_ID"} & set(seen)
    assert (bin / "words").read_text().split()[:2] == ["-M", "beta"]


def test_a_prefix_like_ssh_gets_words_that_its_shell_leaves_alone(bin: Path) -> None:
    """ssh joins its words with spaces and hands them to a shell."""
    via = stand_in(bin, "far-shell", 'shift; sh -c "$*"')
    stand_in(bin, "squeue", f'printf \'%s\\n\' "$SLURM_CONF" "$@" > {bin}/words')
    Cluster("a", ClusterSpec(via=[str(via), "host"], conf="/x y/$(id);'q'/slurm.conf")).squeue()
    assert (bin / "words").read_text().splitlines() == [
        "/x y/$(id);'q'/slurm.conf", "-h", "-r", "--me", "-o", "%F@%K@%T@%r@%j@%k"
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["", "-x", "1;2", "a b", "$(id)", "a\n", "a@b", "ä"])
def test_odd_words_are_refused(word: str) -> None:
    with pytest.raises(ClusterError, match="is no name or number"):
        safe(word)


def test_rows_of_odd_jobs(bin: Path) -> None:
    rows = ["7@N/A@RUNNING@None@my@job@a comment", "8@3@PENDING@(Resources)@trimtab-1@trimtab-1", "CLUSTER: beta",
            "a line of a comment", "9@0@PENDING@None@x@"]  # fmt: skip
    stand_in(bin, "squeue", "cat <<'END'\n" + "\n".join(rows) + "\nEND")
    assert Cluster("a", ClusterSpec()).squeue() == [
        Row("7", None, "RUNNING", "None", "my", "job@a comment"),
        Row("8", 3, "PENDING", "(Resources)", "trimtab-1", "trimtab-1"),
        Row("9", 0, "PENDING", "None", "x", ""),
    ]
    books = ["1@COMPLETED@0:0@a@", "2_4@FAILED@3:0@b@c", "3_[1-2,5%2]@PENDING@0:0@b@c", "4.batch@FAILED@1:0@@"]
    stand_in(bin, "sacct", "cat <<'END'\n" + "\n".join(books) + "\nEND")
    assert Cluster("a", ClusterSpec()).sacct(["1"]) == [
        Row("1", None, "COMPLETED", "", "a", ""),
        Row("2", 4, "FAILED", "exit code 3:0", "b", "c"),
        *(Row("3", i, "PENDING", "", "b", "c") for i in (1, 2, 5)),
    ]


def test_a_node_that_ends_a_job_has_its_gpus_all_the_same(bin: Path) -> None:
    nodes = (
        "n1 idle gpu:2 gpu:0",
        "n2 comp gpu:2 gpu:1",
        "n3 down gpu:2 gpu:0",
        "n4 drain* gpu:2 gpu:0",
        "n5 mix- gpu:2 gpu:2",
    )
    stand_in(bin, "sinfo", "cat <<'END'\n" + "\n".join(nodes) + "\nEND")
    assert Cluster("a", ClusterSpec())._gpus([]) == (3, 6)


def test_gpus_and_indices_as_slurm_writes_them() -> None:
    assert [_gres(text) for text in ("gpu:4", "gpu:a100:4(S:0-1)", "gpu:a:2,gpu:b:1,shard:8", "(null)", "gpu:0")] == [
        4, 4, 3, 0, 0
    ]  # fmt: skip
    assert _gres("gpu:a100:2(IDX:0-1),gpu:h200:1(IDX:3)") == 3
    assert _indices("[0-6:3]") == [0, 3, 6]


# -- a real one ------------------------------------------------------------------------------------------------------


@pytest.mark.slurm
def test_both_ways_to_a_cluster_reach_the_same_jobs(slurm) -> None:
    own = Cluster("beta", ClusterSpec(conf=str(slurm.conf("beta"))))
    member = Cluster("beta", ClusterSpec(conf=str(slurm.conf("alpha")), member="beta"))
    other = Cluster("alpha", ClusterSpec(conf=str(slurm.conf("alpha"))))
    first, second = own.sbatch(SCRIPT + "60", environment={}), member.sbatch(SCRIPT + "60", environment={})
    array = member.sbatch("#!/bin/sh\n#SBATCH --array=0-2 --job-name=trimtab-y\nsleep 60", environment={})
    rows = {(row.job, row.index, row.name) for row in own.squeue()}
    assert rows == {
        (first, None, "trimtab-x"),
        (second, None, "trimtab-x"),
        *((array, i, "trimtab-y") for i in range(3)),
    }
    assert rows == {(row.job, row.index, row.name) for row in member.squeue()}
    assert other.squeue() == []
    found = member.find("trimtab-y", time.time())
    assert found is not None and found.job == array and other.find("trimtab-y", time.time()) is None
    member.scancel(f"{array}_1")
    member.scancel(first)
    assert not {(first, None), (array, 1)} & {(row.job, row.index) for row in own.squeue() if row.word != "COMPLETING"}
    capacity = own.capacity()
    assert (capacity.all_cpus, capacity.all_gpus, capacity.max_array) == (16, 4, 1001)
    assert capacity.free_gpus == 4


@pytest.mark.slurm
def test_what_it_would_take_is_asked_without_submitting(slurm) -> None:
    cluster = Cluster("alpha", ClusterSpec(conf=str(slurm.conf("alpha"))))
    start = cluster.test_only(SCRIPT + "1")
    assert start is not None and abs(start - time.time()) < 120
    for wrong in ("--mem=900G", "--partition=nope", "--gpus-per-node=9"):
        with pytest.raises(ClusterError, match="alpha: "):
            cluster.test_only(f"#!/bin/sh\n#SBATCH {wrong}\n")
    assert slurm.jobs("alpha") == []
    with pytest.raises(ClusterError, match="has no partition nope; it has main, urgent"):
        Cluster("a", ClusterSpec(conf=str(slurm.conf("alpha")), partition="nope")).capacity()


@pytest.mark.slurm
@pytest.mark.parametrize("member", ["", "beta"])
def test_a_dead_controller_and_one_that_hangs(slurm, member: str) -> None:
    conf = str(slurm.conf("alpha" if member else "beta"))
    cluster = Cluster("beta", ClusterSpec(conf=conf, member=member), patience=3.0)
    os.kill(slurm.pid("beta"), signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(Unreachable):
            cluster.squeue()
        with pytest.raises(Unreachable) as caught:
            Cluster("beta", cluster.spec, patience=3.0).sbatch(SCRIPT + "1", environment={})
        assert caught.value.sent
        before = time.monotonic()
        with pytest.raises(Unreachable):  # it is not asked again at once
            cluster.scancel("1")
        assert time.monotonic() - before < 0.5
    finally:
        os.kill(slurm.pid("beta"), signal.SIGCONT)
    assert time.monotonic() - began < 20
    slurm.stop("beta")
    with pytest.raises(Unreachable):
        Cluster("beta", ClusterSpec(conf=conf, member=member)).squeue()
