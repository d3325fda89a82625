"""What the engine is asked: the built-in questions, a file's, or the task's problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.batch import Problem
from trimtab.errors import ConfigError, DataError
from trimtab.policy.model import CausalPolicy
from trimtab.spec import PolicyKind, RunSpec
from trimtab.task import make_task
from trimtab.task.jsonl import read_lines
from trimtab.task.records import field, question_of

BUILTIN, TASK = "builtin", "task"

# Questions with long answers, so that a gap has room to grow; the first is the one of the article that the preset
# abeja follows (tech-blog.abeja.asia, "rollout mismatch").
QUESTIONS = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Explain in a few paragraphs how a refrigerator keeps food cold.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Show each step.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "What are the main causes of the seasons on Earth?",
    "List five ways to save energy at home, with one sentence of explanation for each.",
    "Compare cats and dogs as pets for someone who lives in a small flat.",
    "How does a bill become a law in a parliamentary democracy?",
    "Describe the water cycle to a ten-year-old.",
    "What is the difference between a virus and a bacterium?",
    "Plan a three-day trip to Rome for a family with two children.",
    "Why is the sky blue, and why are sunsets red?",
    "Solve for x: 3x + 7 = 2x - 5. Show each step.",
    "Give a recipe for vegetable soup with quantities and times.",
    "Summarise the plot of Romeo and Juliet.",
)


def default_source(spec: RunSpec) -> str:
    """The tiny model's tokenizer knows little beyond its task's characters."""
    return TASK if spec.policy.kind is PolicyKind.tiny else BUILTIN


def problems(source: str, spec: RunSpec, policy: CausalPolicy) -> list[Problem]:
    """What ``source`` names: ``builtin``, ``task`` or a file, in its order.

    Built-in questions and lines of a text file go through the model's chat template where it has one. A file whose name
    ends with .jsonl holds objects with ``task.prompt_key``: a text, taken as it stands, or chat messages.
    """
    match source:
        case "builtin":
            return asked(BUILTIN, QUESTIONS, policy)
        case "task":
            return list(make_task(spec.task).train())
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"--prompts={source}: there is no such file; allowed: builtin, task, a text file with a "
                          "prompt a line, a .jsonl file")  # fmt: skip
    if path.suffix == ".jsonl":
        key = spec.task.prompt_key
        found = [Problem(where, question_of(where, field(where, record, key, "prompt_key"), key), "")
                 for where, record in read_lines(str(path), "path")]  # fmt: skip
    else:
        found = asked(path.name, text_lines(path), policy)
    if not found:
        raise DataError(f"--prompts={source} holds no prompt; give a line for each")
    return found


def text_lines(path: Path) -> list[str]:
    """The lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompts={path} cannot be read as UTF-8 text: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def asked(name: str, questions: Sequence[str], policy: CausalPolicy) -> list[Problem]:
    """Questions as this model is asked: chat messages, or the bare text without a chat template."""
    chat = bool(policy.tokenizer.inner.chat_template)
    return [
        Problem(f"{name}:{i}", [{"role": "user", "content": question}] if chat else question, "")
        for i, question in enumerate(questions, start=1)
    ]


def shares(available: int, responses: int) -> tuple[int, int]:
    """(prompts, responses of each) for at least ``responses`` in all, over as many prompts as there are."""
    prompts = min(available, responses)
    return prompts, -(-responses // prompts)
