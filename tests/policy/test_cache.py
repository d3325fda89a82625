"""The cache of prepared folders: made once, verified, mended, safe for several processes at once."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from trimtab.errors import ModelError
from trimtab.policy.cache import CHECKSUMS, cache_root, cached_folder, intact


def write(folder: Path) -> None:
    (folder / "a.txt").write_text("a")
    (folder / "b.bin").write_bytes(bytes(1000))


def test_made_once_and_keyed_by_everything(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        write(folder)

    first = cached_folder(tmp_path, "m", {"x": 1}, make)
    assert cached_folder(tmp_path, "m", {"x": 1}, make) == first and len(made) == 1
    assert cached_folder(tmp_path, "m", {"x": 2}, make) != first and len(made) == 2
    assert sorted(p.name for p in first.iterdir()) == ["a.txt", "b.bin", CHECKSUMS]
    assert [p for p in tmp_path.iterdir() if p.is_dir() and p.name.startswith(".")] == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "no_list", "broken_list"])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = cached_folder(tmp_path, "m", {}, write)
    match damage:
        case "flip":
            (folder / "b.bin").write_bytes(bytes(999) + b"\x01")
        case "cut":
            (folder / "b.bin").write_bytes(bytes(10))
        case "remove":
            (folder / "a.txt").unlink()
        case "no_list":
            (folder / CHECKSUMS).unlink()
        case "broken_list":
            (folder / CHECKSUMS).write_text("{")
    assert not intact(folder)
    assert cached_folder(tmp_path, "m", {}, write) == folder
    assert intact(folder) and (folder / "b.bin").read_bytes() == bytes(1000)
    assert "is damaged" in caplog.text


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise ModelError("no")

    with pytest.raises(ModelError):
        cached_folder(tmp_path, "m", {}, fail)
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []


def slow_make(folder: Path) -> None:
    time.sleep(0.3)
    write(folder)
    with (folder.parent / "made.log").open("a") as log:
        log.write("made\n")


def make_in(root: Path) -> None:
    cached_folder(root, "m", {}, slow_make)


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=make_in, args=(tmp_path,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert (tmp_path / "made.log").read_text() == "made\n"
    assert intact(cached_folder(tmp_path, "m", {}, write))


def test_without_a_lock_the_first_to_finish_wins(tmp_path: Path) -> None:
    """What happens where the file system cannot lock: another process finishes while we are at work."""

    def overtaken(folder: Path) -> None:
        other = folder.parent / folder.name.strip(".").rsplit(".", 1)[0]
        cached_folder(tmp_path / "elsewhere", "m", {}, write).rename(other)
        (folder / "late.txt").write_text("late")

    folder = cached_folder(tmp_path, "m", {}, overtaken)
    assert intact(folder) and not (folder / "late.txt").exists()


def test_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "env"))
    assert cache_root(None) == tmp_path / "env"
    assert cache_root(str(tmp_path / "given")) == tmp_path / "given"
    monkeypatch.delenv("TRIMTAB_CACHE")
    assert cache_root(None) == Path.home() / ".cache" / "trimtab"
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"policy\.cache_dir="):
        cached_folder(tmp_path / "file" / "x", "m", {}, write)
