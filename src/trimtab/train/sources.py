"""Where a step's samples come from: sampled before the step, during the step before, or all the time.

Every source gives whole groups, prompt by prompt; what it holds back for later steps is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trimtab.batch import Finish, Prompt, Sample, Sampling
from trimtab.errors import EngineError
from trimtab.protocol import Rollout, Streaming
from trimtab.spec import RolloutMode, RunSpec, TooOld
from trimtab.train.data import PromptStream
from trimtab.train.seeds import derive


class Source(Protocol):
    """Gives the loop the samples of each step."""

    def take(self, step: int, version: int) -> list[Sample]:
        """The samples of ``step``, whose batch is trained on by policy ``version``; groups in order."""

    def metrics(self) -> dict[str, float]:
        """What became of the samples so far."""

    def state(self) -> dict[str, Any]:
        """Samples and prompts held for later steps, as plain JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's ``state``."""


def make_source(rollout: Rollout, stream: PromptStream, spec: RunSpec, stop_ids: tuple[int, ...]) -> Source:
    """The source that ``rollout.mode`` asks for."""
    asked = Request(spec, stop_ids)
    if spec.rollout.mode is RolloutMode["sync"]:
        return BeforeTheStep(rollout, stream, asked)
    if spec.rollout.mode is RolloutMode["one_step_off"]:
        return OneStepOff(rollout, stream, asked, spec.steps)
    if not isinstance(rollout, Streaming):
        raise EngineError("this engine cannot sample while the trainer trains; set rollout.mode=one_step_off")
    return AllTheTime(rollout, stream, asked, spec)


class Request:
    """How a step's or a group's responses are sampled; every seed is a function of the run's and a number."""

    def __init__(self, spec: RunSpec, stop_ids: tuple[int, ...]) -> None:
        self._spec, self._stop_ids = spec, stop_ids

    def step(self, step: int) -> Sampling:
        return self._sampling(derive(self._spec.seed, "rollout", step), step)

    def group(self, position: int, step: int) -> Sampling:
        return self._sampling(derive(self._spec.seed, "group", position), step)

    def _sampling(self, seed: int, step: int) -> Sampling:
        rollout = self._spec.rollout
        return Sampling(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            stop_ids=self._stop_ids,
            seed=seed,
            samples_per_prompt=rollout.group_size,
            step=step,
        )


class BeforeTheStep:
    """Sampled by the weights that are then trained: nothing is held back."""

    def __init__(self, rollout: Rollout, stream: PromptStream, request: Request) -> None:
        self._rollout, self._stream, self._request = rollout, stream, request

    def take(self, step: int, version: int) -> list[Sample]:
        return self._rollout.generate(self._stream.step(step), self._request.step(step))

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing was held back."""


class OneStepOff:
    """Step t + 1 is sampled by the weights before update t, so every batch but the first is one version old.

    With an engine in the trainer's process the two take turns: what this gives is the staleness, not the speed. The
    samples of the next step are in the checkpoint, so a resumed run equals one that was never stopped.
    """

    def __init__(self, rollout: Rollout, stream: PromptStream, request: Request, steps: int) -> None:
        self._rollout, self._stream, self._request, self._steps = rollout, stream, request, steps
        self._next: tuple[int, list[Sample]] | None = None

    def take(self, step: int, version: int) -> list[Sample]:
        held, now = self._next, []
        now = held[1] if held is not None and held[0] == step else self._sample(step)
        self._next = (step + 1, self._sample(step + 1)) if step < self._steps else None
        return now

    def _sample(self, step: int) -> list[Sample]:
        return self._rollout.generate(self._stream.step(step), self._request.step(step))

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        if self._next is None:
            return {}
        step, samples = self._next
        return {"step": step, "samples": [_plain(sample) for sample in samples]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = None
        if state:
            prompts = self._stream.step(state["step"])
            each = len(state["samples"]) // len(prompts)
            samples = [_sample(prompts[i // each], given) for i, given in enumerate(state["samples"])]
            self._next = (state["step"], samples)


class AllTheTime:
    """The engine samples while the trainer trains, and takes new weights in mid-response.

    ``(max_lag + 1)`` batches of groups are sampled or wait at any time, so a group that is trained on in its turn is at
    most ``max_lag`` versions old; a batch is the groups that finished, the oldest first. One that was overtaken until
    it is older is dropped or left to the correction, by ``rollout.too_old``; both are counted.

    A checkpoint holds the finished groups; those in flight are sampled anew from the same prompts after a resume. Which
    tokens which version samples depends on the clock: runs of this mode are not bit-equal.
    """

    def __init__(self, rollout: Streaming, stream: PromptStream, request: Request, spec: RunSpec) -> None:
        self._rollout, self._stream, self._request = rollout, stream, request
        self._steps, self._max_lag, self._too_old = spec.steps, spec.rollout.max_lag, spec.rollout.too_old
        self._per_step = spec.rollout.batch_size // spec.rollout.group_size
        self._next = 0  # position of the next prompt that nobody sampled yet
        self._again: list[int] = []  # positions that a resumed run samples once more
        self._flying: set[int] = set()
        self._ready: dict[int, list[Sample]] = {}
        self._dropped = self._corrected = self._waited = 0

    def take(self, step: int, version: int) -> list[Sample]:
        self._collect()
        self._waited = self._per_step - min(self._per_step, len(self._ready))
        used: list[list[Sample]] = []
        while len(used) < self._per_step:
            self._fill(step, len(used))
            group = self._oldest()
            old = version - min(v for sample in group for v in sample.versions) > self._max_lag
            if old and self._too_old is TooOld.drop:
                self._dropped += 1
                continue
            self._corrected += old
            used.append(group)
        return [sample for group in used for sample in group]

    def metrics(self) -> dict[str, float]:
        return {
            "train/too_old_dropped": self._dropped,
            "train/too_old_corrected": self._corrected,
            "train/groups_waited_for": self._waited,
            "train/groups_in_flight": len(self._flying),
            "train/groups_ready": len(self._ready),
            "train/engine_restarts": self._rollout.restarts(),
        }

    def state(self) -> dict[str, Any]:
        self._collect()
        ready = [{"position": p, "samples": [_plain(s) for s in group]} for p, group in self._ready.items()]
        flying = sorted({*self._flying, *self._again})
        return {"next": self._next, "flying": flying, "ready": ready, "dropped": self._dropped,
                "corrected": self._corrected}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._next, self._again = state["next"], list(state["flying"])
        self._dropped, self._corrected = state["dropped"], state["corrected"]
        for group in state["ready"]:
            prompt = self._stream.at(group["position"])
            self._ready[group["position"]] = [_sample(prompt, given) for given in group["samples"]]

    def _fill(self, step: int, used: int) -> None:
        """Submit as many groups as may be under way; towards the end, no more than will be trained on."""
        wanted = min(self._max_lag + 1, self._steps - step + 1) * self._per_step - used
        while len(self._flying) + len(self._ready) < wanted:
            if self._again:
                position = self._again.pop(0)
            else:
                position, self._next = self._next, self._next + 1
            self._rollout.submit(position, self._stream.at(position), self._request.group(position, step))
            self._flying.add(position)

    def _oldest(self) -> list[Sample]:
        """The finished group that was submitted first; waits where none is finished."""
        self._collect()
        if not self._ready:
            self._keep(self._rollout.finished())
        if not self._ready:
            raise EngineError("the engine lost the groups that it was sampling")
        return self._ready.pop(min(self._ready))

    def _collect(self) -> None:
        while self._keep(self._rollout.finished(wait=False)):
            pass

    def _keep(self, found: tuple[int, list[Sample]] | None) -> bool:
        if found is not None:
            position, samples = found
            self._flying.discard(position)
            self._ready[position] = samples
        return found is not None


def _plain(sample: Sample) -> dict[str, Any]:
    """A sample without its prompt, which its position in the data gives."""
    return {
        "ids": list(sample.ids),
        "logps": list(sample.logps),
        "versions": list(sample.versions),
        "finish": sample.finish.value,
        "own": None if sample.own is None else list(sample.own),
    }


def _sample(prompt: Prompt, given: Mapping[str, Any]) -> Sample:
    own: Sequence[bool] | None = given["own"]
    return Sample(
        prompt=prompt,
        ids=tuple(given["ids"]),
        logps=tuple(given["logps"]),
        versions=tuple(given["versions"]),
        finish=Finish(given["finish"]),
        own=None if own is None else tuple(own),
    )
