"""How a question becomes a prompt: as it stands, as chat messages, or after worked examples."""

from __future__ import annotations

from typing import Sequence

from trimtab.errors import DataError
from trimtab.spec import PromptStyle, TaskSpec

Messages = list[dict[str, str]]


def render(question: str | Messages, spec: TaskSpec, shots: Sequence[tuple[str, str]] = ()) -> str | Messages:
    """The prompt of ``question`` in ``spec.style``; ``shots`` are (question, answer) pairs for few_shot.

    A question that already is chat messages stays so (few_shot refuses it with DataError).
    """
    match spec.style:
        case PromptStyle.plain:
            return question
        case PromptStyle.chat:
            messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
            if spec.system is None or messages[0]["role"] == "system":
                return messages
            return [{"role": "system", "content": spec.system}, *messages]
        case PromptStyle.few_shot:
            if not isinstance(question, str):
                raise DataError("task.style=few_shot needs text prompts, got chat messages; use task.style=chat")
            return "".join(f"Q: {q}\nA: {a}\n\n" for q, a in shots) + f"Q: {question}\nA:"


def answer_text(response: str, style: PromptStyle) -> str:
    """The part of a response that is judged: all of it, or its first line after worked examples; stripped."""
    match style:
        case PromptStyle.plain | PromptStyle.chat:
            return response.strip()
        case PromptStyle.few_shot:
            return response.split("\n", 1)[0].strip()
