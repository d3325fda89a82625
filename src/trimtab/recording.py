"""Rollouts on disk: one Parquet file per recorded step, one schema, nothing lost (NaN, versions, chat prompts)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.batch import Finish, Problem, Prompt, Sample
from trimtab.errors import DataError
from trimtab.files import replacing

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),  # the text, or the messages as JSON where `chat`
        pa.field("chat", pa.bool_(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("extra", pa.string()),  # Problem.extra as JSON
        pa.field("prompt_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("rollout_logps", pa.list_(pa.float32()), nullable=False),
        pa.field("proximal_logps", pa.list_(pa.float32())),  # null: older bypass runs
        pa.field("versions", pa.list_(pa.int64()), nullable=False),
        pa.field("own", pa.list_(pa.bool_())),  # null: every token is the policy's own
        pa.field("finish", pa.string(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("response", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("response_tokens", pa.list_(pa.string())),  # each token's own text; null: unknown, as in version 1
    ],
    metadata={"trimtab": "rollouts 2"},
)
ADDED = ("response_tokens",)
"""Columns that files of version 1 lack; they read as null."""


@dataclass(frozen=True)
class RecordedStep:
    """One step's rollouts, row by row. ``proximal_logps[i]``: see ``write_rollouts``; None in older bypass runs."""

    step: int
    samples: list[Sample]
    rewards: list[float]
    advantages: list[float]
    proximal_logps: list[tuple[float, ...] | None]
    groups: list[int]
    texts: list[str]
    temperature: float
    tokens: list[tuple[str, ...] | None]
    """Each response token's own text, for people to read (part of a character shows as U+FFFD); None: unknown."""


def write_rollouts(
    path: Path,
    step: int,
    samples: Sequence[Sample],
    rewards: Sequence[float],
    advantages: Sequence[float],
    proximal_logps: Sequence[Sequence[float]] | None,
    groups: Sequence[int],
    texts: Sequence[str],
    temperature: float,
    tokens: Sequence[Sequence[str]] | None = None,
) -> None:
    """Write one step to ``path``: beside it first, synced, then renamed, so a kill leaves the old file or the new one.

    ``proximal_logps``: the trainer's log-probs at each token's first forward, NaN at tokens that took no part; those of
    the proximal policy, but that in bypass and on_policy a token of a later minibatch has been scored after the updates
    before it. None: unknown. ``tokens``: each response token's own text; None: unknown. Log-probs, rewards and
    advantages are stored as float32. Raises DataError when the lists differ in length, OSError when the disk refuses.
    """
    count = len(samples)
    proximal = [None] * count if proximal_logps is None else [tuple(logps) for logps in proximal_logps]
    pieces = [None] * count if tokens is None else [tuple(row) for row in tokens]
    lists = (rewards, advantages, proximal, groups, texts, pieces)
    if any(len(values) != count for values in lists):
        raise DataError(f"step {step}: {count} samples with lists of {[len(values) for values in lists]} entries")
    recorded = RecordedStep(
        step,
        list(samples),
        list(rewards),
        list(advantages),
        list(proximal),
        list(groups),
        list(texts),
        temperature,
        list(pieces),
    )
    rows = [_row(recorded, i) for i in range(count)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")


def read_rollouts(path: Path) -> list[RecordedStep]:
    """Steps recorded in a file, a folder of Parquet files or a run folder, by step number.

    Raises DataError for a path without recordings, a damaged file, another schema, or a step that is there twice.
    """
    steps: dict[int, tuple[RecordedStep, Path]] = {}
    for file in _files(path):
        for recorded in _read(file):
            if recorded.step in steps:
                raise DataError(f"step {recorded.step} is recorded twice: in {steps[recorded.step][1]} and {file}")
            steps[recorded.step] = (recorded, file)
    return [steps[step][0] for step in sorted(steps)]


def _row(recorded: RecordedStep, i: int) -> dict[str, Any]:
    sample = recorded.samples[i]
    sample.check()
    problem = sample.prompt.problem
    proximal = recorded.proximal_logps[i]
    if proximal is not None and len(proximal) != len(sample.ids):
        raise DataError(f"sample {problem.id}: {len(proximal)} proximal log-probs for {len(sample.ids)} tokens")
    pieces = recorded.tokens[i]
    if pieces is not None and len(pieces) != len(sample.ids):
        raise DataError(f"sample {problem.id}: {len(pieces)} token texts for {len(sample.ids)} tokens")
    chat = not isinstance(problem.prompt, str)
    return {
        "step": recorded.step,
        "row": i,
        "group": recorded.groups[i],
        "problem_id": problem.id,
        "prompt": json.dumps(problem.prompt, ensure_ascii=False) if chat else problem.prompt,
        "chat": chat,
        "answer": problem.answer,
        # What JSON cannot hold is kept as its repr: a recording is for reading, and must not stop a run.
        "extra": None if problem.extra is None else _json(problem.extra),
        "prompt_ids": sample.prompt.ids,
        "response_ids": sample.ids,
        "rollout_logps": sample.logps,
        "proximal_logps": proximal,
        "versions": sample.versions,
        "own": sample.own,
        "finish": sample.finish.value,
        "reward": recorded.rewards[i],
        "advantage": recorded.advantages[i],
        "response": recorded.texts[i],
        "temperature": recorded.temperature,
        "response_tokens": None if pieces is None else [_storable(piece) for piece in pieces],
    }


def _json(extra: Mapping[str, Any]) -> str:
    return _storable(json.dumps(dict(extra), ensure_ascii=False, default=repr))


def _storable(text: str) -> str:
    """A lone surrogate, which Parquet refuses, as JSON writes it."""
    return text.encode(errors="backslashreplace").decode()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for folder in (path / "rollouts", path):
        found = sorted(folder.glob("*.parquet"))
        if found:
            return found
    raise DataError(
        f"{path} holds no recorded rollouts (*.parquet); give a run folder, or a folder or file that a run wrote "
        "with rollout.record_every above 0"
    )


def _read(file: Path) -> list[RecordedStep]:
    try:
        table = pq.read_table(file, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error
    for name in ADDED:
        if name not in table.schema.names:
            table = table.append_column(SCHEMA.field(name), pa.nulls(table.num_rows, SCHEMA.field(name).type))
    if not table.schema.equals(SCHEMA):
        there = {field.name: field.type for field in table.schema}
        wrong = [f.name for f in SCHEMA if there.get(f.name) != f.type] + [n for n in there if n not in SCHEMA.names]
        raise DataError(f"{file} does not hold rollouts of this version; columns that differ: {wrong or 'nullability'}")
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        steps.setdefault(row["step"], []).append(row)
    return [_step(step, rows, file) for step, rows in steps.items()]


def _step(step: int, rows: list[dict[str, Any]], file: Path) -> RecordedStep:
    rows = sorted(rows, key=lambda row: row["row"])
    temperatures = {row["temperature"] for row in rows}
    if len(temperatures) != 1 or [row["row"] for row in rows] != list(range(len(rows))):
        raise DataError(f"{file}: step {step} is incomplete or mixes temperatures {sorted(temperatures)}")
    # One Prompt object per group, as the loop made them.
    prompts: dict[tuple[int, str], Prompt] = {}
    samples = []
    for row in rows:
        prompt = prompts.setdefault((row["group"], row["problem_id"]), _prompt(row))
        for column in ("prompt_ids", "response_ids", "versions", "own"):
            if row[column] is not None and None in row[column]:
                at = row[column].index(None)
                raise DataError(f"{file}: sample {row['problem_id']}: {column} has no value for token {at}")
        if prompt.ids != tuple(row["prompt_ids"]):
            raise DataError(f"{file}: step {step}: group {row['group']} mixes prompts")
        samples.append(_sample(row, prompt, file))
    return RecordedStep(
        step=step,
        samples=samples,
        rewards=[row["reward"] for row in rows],
        advantages=[row["advantage"] for row in rows],
        proximal_logps=[None if row["proximal_logps"] is None else _logps(row["proximal_logps"]) for row in rows],
        groups=[row["group"] for row in rows],
        texts=[row["response"] for row in rows],
        temperature=temperatures.pop(),
        tokens=[_texts(row, file) for row in rows],
    )


def _logps(values: Sequence[float | None]) -> tuple[float, ...]:
    """Log-probs; null, as other writers put it, is missing like NaN."""
    return tuple(math.nan if value is None else value for value in values)


def _texts(row: dict[str, Any], file: Path) -> tuple[str, ...] | None:
    pieces = row["response_tokens"]
    if pieces is None:
        return None
    if len(pieces) != len(row["response_ids"]):
        raise DataError(
            f"{file}: sample {row['problem_id']}: {len(pieces)} token texts for {len(row['response_ids'])} tokens"
        )
    return tuple("" if piece is None else piece for piece in pieces)


def _prompt(row: dict[str, Any]) -> Prompt:
    text = json.loads(row["prompt"]) if row["chat"] else row["prompt"]
    extra = None if row["extra"] is None else json.loads(row["extra"])
    return Prompt(Problem(row["problem_id"], text, row["answer"], extra), tuple(row["prompt_ids"]))


def _sample(row: dict[str, Any], prompt: Prompt, file: Path) -> Sample:
    if row["finish"] not in [finish.value for finish in Finish]:
        raise DataError(
            f"{file}: sample {row['problem_id']} ended by {row['finish']!r}, not by {[f.value for f in Finish]}"
        )
    sample = Sample(
        prompt=prompt,
        ids=tuple(row["response_ids"]),
        logps=_logps(row["rollout_logps"]),
        versions=tuple(row["versions"]),
        finish=Finish(row["finish"]),
        own=None if row["own"] is None else tuple(row["own"]),
    )
    sample.check()
    return sample
