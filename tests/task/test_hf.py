"""Hugging Face datasets from local folders and files; nothing here asks the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.errors import ConfigError, DataError
from trimtab.spec import TaskName, TaskSpec
from trimtab.task import make_task

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def table(n: int, start: int = 0) -> dict[str, list[str]]:
    return {"prompt": [f"q{i}" for i in range(start, start + n)], "answer": [str(i) for i in range(start, start + n)]}


def spec(path: Path, **changes: object) -> TaskSpec:
    return TaskSpec(name=TaskName.hf, path=str(path), **changes)


def saved(path: Path) -> Path:
    parts = {"train": datasets.Dataset.from_dict(table(6)), "test": datasets.Dataset.from_dict(table(2, 10))}
    datasets.DatasetDict(parts).save_to_disk(str(path))
    return path


def test_a_saved_folder_with_splits(tmp_path: Path) -> None:
    task = make_task(spec(saved(tmp_path / "d"), eval_split="test"))
    assert [p.prompt for p in task.train()] == [f"q{i}" for i in range(6)]
    assert [(p.id, p.prompt) for p in task.evaluation()] == [("d[test]:0", "q10"), ("d[test]:1", "q11")]
    assert task.reward(task.train()[3], "3") == 1.0 and task.reward(task.train()[3], "4") == 0.0


def test_the_tail_of_a_single_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(table(5)).save_to_disk(str(tmp_path / "one"))
    task = make_task(spec(tmp_path / "one", eval_size=2))
    assert [p.prompt for p in task.evaluation()] == ["q3", "q4"] and len(task.train()) == 3


def test_local_files_and_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"q": f"q{i}", "a": i, "other": [i]}) + "\n" for i in range(4)))
    task = make_task(spec(file, prompt_key="q", answer_key="a", eval_size=1))
    assert [(p.prompt, p.answer) for p in task.train()] == [("q0", "0"), ("q1", "1"), ("q2", "2")]


def test_refusals(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"task\.split=dev: .* has the splits train, test"):
        make_task(spec(folder, split="dev"))
    with pytest.raises(ConfigError, match=r"task\.eval_split=dev"):
        make_task(spec(folder, eval_split="dev"))
    with pytest.raises(
        DataError, match=r"no column 'q' in split 'train'; columns: prompt, answer\. Set task\.prompt_key"
    ):
        make_task(spec(folder, prompt_key="q"))
    with pytest.raises(DataError, match=r"no column 'a' .*Set task\.answer_key"):
        make_task(spec(folder, answer_key="a"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_task(spec(tmp_path / "no" / "such"))
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"known kinds of file are \.json"):
        make_task(spec(tmp_path / "x.txt"))
    with pytest.raises(ConfigError, match=r"task\.path=FOLDER"):
        make_task(TaskSpec(name=TaskName.hf))


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_an_answer_that_is_no_finite_number_is_named(tmp_path: Path, answer: float) -> None:
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": [answer]}).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(DataError, match=r"one\[train\]:0: 'answer' must be text or a finite number"):
        make_task(spec(tmp_path / "one", eval_size=0))
