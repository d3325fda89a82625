"""Prompts and rewards: arithmetic, reasoning-gym, JSON lines, Hugging Face datasets, the user's own."""

from __future__ import annotations

from trimtab.protocol import Task
from trimtab.spec import TaskName, TaskSpec

__all__ = ["make_task"]


def make_task(spec: TaskSpec) -> Task:
    """The task that ``spec`` names; third parties are imported only by the task that needs them.

    Raises ConfigError for options that cannot work, DataError for data that break the contract.
    """
    match spec.name:
        case TaskName.arithmetic:
            from trimtab.task.arithmetic import ArithmeticTask

            return ArithmeticTask(spec)
        case TaskName.reasoning_gym:
            from trimtab.task.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(spec)
        case TaskName.jsonl:
            from trimtab.task.jsonl import jsonl_task

            return jsonl_task(spec)
        case TaskName.hf:
            from trimtab.task.hf import hf_task

            return hf_task(spec)
        case TaskName.custom:
            from trimtab.task.custom import CustomTask

            return CustomTask(spec)
