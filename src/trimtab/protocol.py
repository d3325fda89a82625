"""What the training loop asks of the parts around it. Concrete classes are known to ``build.py`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Protocol, Sequence, runtime_checkable

from torch import Tensor

from trimtab.batch import Batch, Problem, Prompt, Sample, Sampling, Scores


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocabulary(self) -> int:
        """Number of ids the model scores."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""

    def encode(self, prompt: str | list[dict[str, str]]) -> tuple[int, ...]:
        """Ids of a text, or of chat messages through the model's chat template with its generation prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Every id whose own text holds ``text``; used as stop ids."""


class Policy(Protocol):
    """The trained model; hides where and how its parameters lie."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def score(self, batch: Batch, temperature: float = 1.0, grad: bool = False, entropy: bool = False) -> Scores:
        """Log-probs of each response token given what precedes it, at ``temperature``, without a whole [N, V]."""

    def score_reference(self, batch: Batch, temperature: float = 1.0) -> Scores:
        """Log-probs under the frozen initial weights."""

    def parameters(self) -> Iterable[Tensor]:
        """Trainable parameters, in a fixed order."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of every weight, for the hand-over to an engine; tied ones once."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the weights from a checkpoint."""

    def save_pretrained(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face form."""


class Rollout(Protocol):
    """An engine that samples. It never assumes that it lives in the trainer's process."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """``samples_per_prompt`` responses of each prompt, prompt by prompt; each response has its own seed."""

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the trainer's weights; whatever was cached under the old ones is dropped."""

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs at T=1 of tokens 1.. of each row of ids under the loaded weights; None if it cannot score."""

    def describe(self) -> dict[str, Any]:
        """Effective settings read back from the engine: versions, dtype, semantics of its log-probs."""

    def close(self) -> None:
        """Free the engine's memory and processes."""


@runtime_checkable
class Stateful(Protocol):
    """An engine with something that a resumed run can't make anew: weights older than the checkpoint's, say."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores beside the policy; empty for nothing."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state``; called before the resumed run's first hand-over."""


@runtime_checkable
class Streaming(Rollout, Protocol):
    """An engine that samples all the time: ``load`` reaches responses that are being written."""

    def submit(self, key: int, prompt: Prompt, sampling: Sampling) -> None:
        """Begin ``samples_per_prompt`` responses to ``prompt``; ``finished`` returns them under ``key``."""

    def finished(self, wait: bool = True) -> tuple[int, list[Sample]] | None:
        """The next group that is finished; None when none is open, or with ``wait`` false, when none is finished."""

    def restarts(self) -> int:
        """How often the engine had to be started again."""


class Task(Protocol):
    """Problems and rewards. Index i always gives the same problem."""

    def train(self) -> Sequence[Problem]:
        """Problems to train on."""

    def evaluation(self) -> Sequence[Problem]:
        """Problems to evaluate on; none of them is trained on."""

    def reward(self, problem: Problem, response: str) -> float:
        """Reward of a response's text, usually 0 or 1; never raises for any text."""

    def fingerprint(self) -> str:
        """Hash of the data; a resumed run refuses other data."""


class Tracker(Protocol):
    """A sink for metrics. It may fail without stopping the run."""

    def start(self, config: Mapping[str, Any], run_id: str, name: str, run_dir: Path) -> None:
        """Begin or continue the run ``run_id``."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """End the run; never raises."""


class Probe(Protocol):
    """Compares the engine's log-probs with the trainer's after a hand-over."""

    def __call__(self, policy: Policy, rollout: Rollout, samples: Sequence[Sample]) -> dict[str, float]:
        """Metrics of the gap; raises EngineError when it is above the bound."""


class Recorder(Protocol):
    """Keeps the rollouts of a step."""

    def __call__(
        self,
        step: int,
        samples: Sequence[Sample],
        texts: Sequence[str],
        batch: Batch,
        advantage_B: Tensor,
        proximal_N: Tensor | None,
    ) -> None:
        """Write one step's samples with rewards, advantages and both log-probs.

        ``proximal_N``: the trainer's, of each token's first forward; NaN at tokens that took no part.
        """
