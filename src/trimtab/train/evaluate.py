"""Pass rates of the policy on the evaluation split, greedy and sampled, without the gap that a run injects."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.batch import Problem, Sampling
from trimtab.protocol import Rollout, Task, Tokenizer
from trimtab.spec import RunSpec
from trimtab.train.data import encode_prompts
from trimtab.train.seeds import derive


class Evaluator:
    """Evaluates with the same prompts and the same seeds each time, so that differences are the policy's."""

    def __init__(self, task: Task, tokenizer: Tokenizer, spec: RunSpec, stop_ids: tuple[int, ...]) -> None:
        problems: Sequence[Problem] = task.evaluation()
        self._task, self._tokenizer, self._spec, self._stop_ids = task, tokenizer, spec, stop_ids
        self._prompts = encode_prompts(problems, tokenizer, spec.rollout)

    def _rewards(self, rollout: Rollout, temperature: float, samples: int) -> list[list[float]]:
        """Rewards of each problem's responses."""
        sampling = Sampling(
            max_tokens=self._spec.rollout.max_tokens,
            temperature=temperature,
            stop_ids=self._stop_ids,
            seed=derive(self._spec.seed, "evaluation"),
            samples_per_prompt=samples,
            gap=False,
        )
        done = rollout.generate(self._prompts, sampling)
        flat = [self._task.reward(s.prompt.problem, self._tokenizer.decode(s.ids)) for s in done]
        return [flat[i : i + samples] for i in range(0, len(flat), samples)]

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """``eval/reward`` (sampled at rollout.temperature; greedy where evaluation.samples=0), ``eval/reward_greedy``,

        and with several samples ``eval/pass_at_k``: the share of problems with at least one reward of 1.
        """
        plan, metrics = self._spec.evaluation, {}
        if not self._prompts:
            return {}
        if plan.greedy:
            greedy = self._rewards(rollout, 0.0, 1)
            metrics["eval/reward_greedy"] = sum(r[0] for r in greedy) / len(greedy)
            metrics["eval/reward"] = metrics["eval/reward_greedy"]
        if plan.samples > 0:
            sampled = self._rewards(rollout, self._spec.rollout.temperature, plan.samples)
            metrics["eval/reward"] = sum(map(sum, sampled)) / (len(sampled) * plan.samples)
            if plan.samples > 1:
                metrics["eval/pass_at_k"] = sum(max(r) >= 1.0 for r in sampled) / len(sampled)
        return metrics
