"""JSON lines: values, splits, and messages that name file, line and key."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from trimtab.errors import ConfigError, DataError
from trimtab.spec import Match, PromptStyle, TaskName, TaskSpec
from trimtab.task import make_task


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def rows(n: int) -> list[dict[str, object]]:
    return [{"prompt": f"q{i}", "answer": str(i)} for i in range(n)]


def spec(path: str, **changes: object) -> TaskSpec:
    return TaskSpec(name=TaskName.jsonl, path=path, **changes)


def test_the_tail_is_held_out(tmp_path: Path) -> None:
    task = make_task(spec(write(tmp_path / "d.jsonl", *rows(10)), eval_size=3))
    assert [p.prompt for p in task.train()] == [f"q{i}" for i in range(7)]
    assert [p.prompt for p in task.evaluation()] == ["q7", "q8", "q9"]
    assert task.train()[2].id == "d.jsonl:3"
    assert task.reward(task.train()[2], " 2\n") == 1.0 and task.reward(task.train()[2], "3") == 0.0


def test_an_evaluation_file_and_its_overlap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(tmp_path / "t.jsonl", *rows(5))
    evaluation = write(tmp_path / "e.jsonl", {"prompt": "q1", "answer": "1"}, {"prompt": "new", "answer": 7})
    with caplog.at_level(logging.WARNING):
        task = make_task(spec(train, eval_path=evaluation))
    assert [p.prompt for p in task.train()] == ["q0", "q2", "q3", "q4"]
    assert [(p.prompt, p.answer) for p in task.evaluation()] == [("q1", "1"), ("new", "7")]
    assert "1 training problems are also evaluated" in caplog.text


def test_own_keys_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a", "a": 1.5}\n\n   \n{"q": "\xc3\xa9", "a": "x"}\r\n')
    task = make_task(spec(str(path), prompt_key="q", answer_key="a", eval_size=1))
    assert [(p.id, p.prompt, p.answer) for p in task.train()] == [("d.jsonl:1", "a", "1.5")]
    assert [(p.id, p.prompt) for p in task.evaluation()] == [("d.jsonl:4", "é")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"d\.jsonl:2: not a JSON object"),
        ("[1]", r"d\.jsonl:2: a line must be a JSON object"),
        ('{"prompt": "x"}', r"d\.jsonl:2: no key 'answer'; keys here: prompt\. Set task\.answer_key"),
        ('{"answer": "x"}', r"d\.jsonl:2: no key 'prompt'"),
        ('{"prompt": "", "answer": "x"}', r"d\.jsonl:2: 'prompt' must be text"),
        ('{"prompt": 3, "answer": "x"}', r"d\.jsonl:2: 'prompt' must be text"),
        ('{"prompt": [], "answer": "x"}', r"d\.jsonl:2: 'prompt' must be text"),
        ('{"prompt": [{"role": "user"}], "answer": "x"}', r"d\.jsonl:2: 'prompt' has a message without"),
        ('{"prompt": "x", "answer": null}', r"d\.jsonl:2: 'answer' must be text or a finite number"),
        ('{"prompt": "x", "answer": true}', r"d\.jsonl:2: 'answer' must be text or a finite number"),
        ('{"prompt": "x", "answer": NaN}', r"d\.jsonl:2: .*NaN is not JSON"),
        ('{"prompt": "x", "answer": 1e400}', r"d\.jsonl:2: .*1e400 is beyond"),
        ('{"prompt": "x", "answer": -1e400}', r"d\.jsonl:2: .*-1e400 is beyond"),
        ('{"prompt": "x", "answer": "1", "other": [1e999]}', r"d\.jsonl:2: .*1e999 is beyond"),
        (r'{"prompt": "\ud800 x", "answer": "x"}', r"d\.jsonl:2: 'prompt' holds '\\ud800' at character 0"),
        (r'{"prompt": "x", "answer": "x\udfff"}', r"d\.jsonl:2: 'answer' holds '\\udfff' at character 1"),
        (
            r'{"prompt": [{"role": "user", "content": "\udc00"}], "answer": "x"}',
            r"d\.jsonl:2: 'prompt' holds '\\udc00'",
        ),
        ("[" * 100_000, r"d\.jsonl:2: not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_task(spec(write(tmp_path / "d.jsonl", rows(1)[0], line), eval_size=0))


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    task = make_task(spec(write(tmp_path / "d.jsonl", r'{"prompt": "\ud83d\ude00", "answer": 1e300}'), eval_size=0))
    assert [(p.prompt, p.answer) for p in task.train()] == [("\U0001f600", "1e+300")]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "b"}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:2"):
        make_task(spec(str(path), eval_size=0))


def test_no_file_no_path_nothing_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path=.*no such file"):
        make_task(spec(str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match=r"task\.path=FILE"):
        make_task(TaskSpec(name=TaskName.jsonl))
    with pytest.raises(ConfigError, match=r"task\.eval_path=.*no such file"):
        make_task(spec(write(tmp_path / "d.jsonl", *rows(3)), eval_path=str(tmp_path / "none")))
    with pytest.raises(DataError, match=r"no problem is left .*task\.eval_size"):
        make_task(spec(write(tmp_path / "d.jsonl", *rows(3)), eval_size=5))


def test_messages_pass_through_and_the_system_message_is_put_first(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    own = [{"role": "system", "content": "own"}, *chat]
    path = write(tmp_path / "d.jsonl", {"prompt": chat, "answer": "a"}, {"prompt": own, "answer": "a"}, *rows(1))
    task = make_task(spec(path, eval_size=0, style=PromptStyle.chat, system="S"))
    system = {"role": "system", "content": "S"}
    assert [p.prompt for p in task.train()] == [[system, *chat], own, [system, {"role": "user", "content": "q0"}]]
    assert make_task(spec(path, eval_size=0)).train()[0].prompt == chat
    with pytest.raises(DataError, match=r"task\.style=chat"):
        make_task(spec(path, eval_size=0, style=PromptStyle.few_shot, shots=0))


def test_few_shot_examples_are_taken_out_of_training(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", *rows(6))
    task = make_task(spec(path, eval_size=2, style=PromptStyle.few_shot, shots=2))
    assert [p.answer for p in task.train()] == ["2", "3"]
    assert task.evaluation()[0].prompt == "Q: q0\nA: 0\n\nQ: q1\nA: 1\n\nQ: q4\nA:"
    assert task.reward(task.train()[0], " 2\nQ: more") == 1.0
    with pytest.raises(DataError, match=r"task\.shots=4"):
        make_task(spec(path, eval_size=2, style=PromptStyle.few_shot, shots=4))


def test_regex_match_is_used(tmp_path: Path) -> None:
    task = make_task(spec(write(tmp_path / "d.jsonl", *rows(3)), eval_size=1, match=Match.regex, pattern=r"= (\d+)"))
    assert task.reward(task.train()[1], "x = 1") == 1.0 and task.reward(task.train()[1], "1") == 0.0


def test_fingerprint_follows_the_data(tmp_path: Path) -> None:
    a = make_task(spec(write(tmp_path / "d.jsonl", *rows(5)), eval_size=1)).fingerprint()
    changed = [*rows(4), {"prompt": "q4", "answer": "5"}]
    assert make_task(spec(write(tmp_path / "d.jsonl", *changed), eval_size=1)).fingerprint() != a
    assert make_task(spec(write(tmp_path / "d.jsonl", *rows(5)), eval_size=1)).fingerprint() == a
