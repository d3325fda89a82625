"""Recordings: nothing lost on the way to disk and back, nothing wrong let in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab.batch import Finish, Problem, Prompt, Sample
from trimtab.build import Pieces
from trimtab.errors import DataError
from trimtab.recording import SCHEMA, RecordedStep, read_rollouts, write_rollouts

CHAT = Prompt(Problem("chat", [{"role": "user", "content": "2+2? ありがと"}], "4", {"difficulty": 3}), (1, 2, 3))
PLAIN = Prompt(Problem("plain", '[{"role": "not a chat"}]', "5"), (7,))
SAMPLES = [
    Sample(CHAT, (4, 5), (-0.1, math.nan), (3, 3), Finish.stop),
    Sample(CHAT, (), (), (), Finish.length),
    Sample(PLAIN, (6, 6, 1), (-math.inf, -0.5, 0.0), (3, 4, 4), Finish.length, own=(True, False, True)),
    Sample(PLAIN, (9,), (-2.5,), (3,), Finish.stop),
]
TOKENS = [("é\ufffd", "\x1b[31m"), (), (" a", "", "</script>"), ("\n",)]
PROXIMAL = [(-0.125, -0.25), (), (-0.5, math.nan, -1.0), (-2.0,)]


def write(
    path: Path,
    step: int = 10,
    proximal: list[tuple[float, ...]] | None = PROXIMAL,
    tokens: list[tuple[str, ...]] | None = TOKENS,
) -> RecordedStep:
    rewards, advantages, groups, texts = (
        [1.0, 0.0, 0.5, 0.0],
        [0.5, -0.5, 1.5, math.nan],
        [0, 0, 1, 1],
        ["4", "", "x", "y"],
    )
    write_rollouts(path, step, SAMPLES, rewards, advantages, proximal, groups, texts, 0.7, tokens)
    back = read_rollouts(path)
    assert len(back) == 1
    return back[0]


def text(value: object) -> str:
    """NaN compares unequal to itself; its text does not."""
    return repr(value)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    step = write(tmp_path / "deep" / "step_10.parquet")
    expected = [
        dataclasses.replace(s, logps=tuple(pa.scalar(x, pa.float32()).as_py() for x in s.logps)) for s in SAMPLES
    ]
    assert text(step.samples) == text(expected)
    assert text((step.step, step.temperature, step.groups)) == text((10, 0.7, [0, 0, 1, 1]))
    assert text((step.rewards, step.advantages)) == text(([1.0, 0.0, 0.5, 0.0], [0.5, -0.5, 1.5, math.nan]))
    assert text((step.proximal_logps, step.texts)) == text((PROXIMAL, ["4", "", "x", "y"]))
    assert step.tokens == TOKENS
    assert step.samples[0].prompt is step.samples[1].prompt
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["step_10.parquet"]


def test_unknown_proximal_log_probs_are_null(tmp_path: Path) -> None:
    assert write(tmp_path / "a.parquet", proximal=None).proximal_logps == [None] * 4


def test_files_of_version_1_lack_the_texts_of_tokens_and_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    new, now = write(path), pq.read_table(path)
    assert now.schema.metadata[b"trimtab"] == b"rollouts 2"
    old = now.drop_columns(["response_tokens"]).replace_schema_metadata({"trimtab": "rollouts 1"})
    pq.write_table(old, path)
    (step,) = read_rollouts(path)
    assert step.tokens == [None] * 4
    assert text(dataclasses.replace(step, tokens=TOKENS)) == text(new)
    assert write(path, tokens=None).tokens == [None] * 4


def test_a_lone_surrogate_in_a_token_does_not_stop_a_run(tmp_path: Path) -> None:
    step = write(tmp_path / "a.parquet", tokens=[("a\ud800", "b"), (), ("", "", ""), ("",)])
    assert step.tokens[0] == ("a\\ud800", "b")


def test_extra_that_is_not_json_does_not_stop_a_run(tmp_path: Path) -> None:
    prompt = Prompt(Problem("odd", "q", "a", {"set": {1}, "half": "é\ud800"}), (1,))
    sample = Sample(prompt, (2,), (-1.0,), (0,), Finish.stop)
    write_rollouts(tmp_path / "a.parquet", 0, [sample], [0.0], [0.0], None, [0], ["t"], 1.0)
    assert read_rollouts(tmp_path / "a.parquet")[0].samples[0].prompt.problem.extra == {"set": "{1}", "half": "é\ud800"}


def test_a_run_folder_a_folder_or_a_file_in_order_of_steps(tmp_path: Path) -> None:
    for step in (20, 3, 100):
        write(tmp_path / "rollouts" / f"step_{step}.parquet", step)
    for path in (tmp_path, tmp_path / "rollouts"):
        assert [recorded.step for recorded in read_rollouts(path)] == [3, 20, 100]
    write(tmp_path / "rollouts" / "again.parquet", 20)
    with pytest.raises(DataError, match="step 20 is recorded twice"):
        read_rollouts(tmp_path)


def test_writing_again_replaces_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1)
    assert write(tmp_path / "a.parquet", 2).step == 2


def test_a_refused_write_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 1)
    bad = dataclasses.replace(SAMPLES[0], logps=(-1.0,))
    with pytest.raises(DataError, match="sample chat: 1 log-probs for 2 response tokens"):
        write_rollouts(tmp_path / "a.parquet", 2, [bad], [0.0], [0.0], None, [0], ["t"], 1.0)
    with pytest.raises(DataError, match="sample chat: 1 proximal log-probs for 2 tokens"):
        write_rollouts(tmp_path / "a.parquet", 2, SAMPLES[:1], [0.0], [0.0], [(-1.0,)], [0], ["t"], 1.0)
    with pytest.raises(DataError, match="sample chat: 1 token texts for 2 tokens"):
        write_rollouts(tmp_path / "a.parquet", 2, SAMPLES[:1], [0.0], [0.0], None, [0], ["t"], 1.0, [("a",)])
    with pytest.raises(DataError, match="1 samples with lists of"):
        write_rollouts(tmp_path / "a.parquet", 2, SAMPLES[:1], [0.0, 1.0], [0.0], None, [0], ["t"], 1.0)
    assert read_rollouts(tmp_path / "a.parquet")[0].step == 1
    assert [f.name for f in tmp_path.iterdir()] == ["a.parquet"]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no recorded rollouts.*rollout.record_every"):
        read_rollouts(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"a.parquet cannot be read as Parquet"):
        read_rollouts(tmp_path)
    pq.write_table(pa.table({"step": [1], "reward": [0.5]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"columns that differ: \['row', .*'reward'"):
        read_rollouts(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("finish", "bored", "ended by 'bored'"),
        ("rollout_logps", [-0.1], "1 log-probs for 2 response tokens"),
        ("rollout_logps", [3.5, 1.0], "above 0"),
        ("response_ids", [4, None], "sample chat: response_ids has no value for token 1"),
        ("prompt_ids", [1, None, 3], "sample chat: prompt_ids has no value for token 1"),
        ("versions", [None, 3], "sample chat: versions has no value for token 0"),
        ("own", [True, None], "sample chat: own has no value for token 1"),
        ("response_tokens", ["a"], "sample chat: 1 token texts for 2 tokens"),
        ("row", 7, "step 10 is incomplete"),
        ("temperature", 1.0, "mixes temperatures"),
        ("prompt_ids", [9, 9], "group 0 mixes prompts"),
    ],
)
def test_rows_that_break_the_contract_are_refused(tmp_path: Path, column: str, value: object, message: str) -> None:
    write(tmp_path / "a.parquet")
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    rows[0][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        read_rollouts(tmp_path)


def test_a_log_prob_that_is_null_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    rows[0]["rollout_logps"], rows[0]["proximal_logps"] = [None, -0.5], [-0.25, None]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "a.parquet")
    step = read_rollouts(tmp_path)[0]
    assert text((step.samples[0].logps, step.proximal_logps[0])) == text(((math.nan, -0.5), (-0.25, math.nan)))


class SentencePieces:
    """Drops the space before a first token, as SentencePiece decoders do; ids 7 and 8 are the two bytes of é."""

    vocabulary, end_ids = 10, (0,)
    texts: ClassVar[dict[int, bytes]] = {0: b"", 1: b"1", 2: b" the", 7: b"\xc3", 8: b"\xa9"}

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[int, ...]:
        assert prompt == "1"
        return (0, 1)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.texts[i] for i in ids).decode(errors="replace").removeprefix(" ")

    def ids_containing(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError


def test_each_token_has_the_text_that_it_adds() -> None:
    assert Pieces(SentencePieces())((2, 7, 8, 0, 2)) == (" the", "\ufffd", "\ufffd", "", " the")
