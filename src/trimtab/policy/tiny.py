"""``policy=tiny``: a Llama-type model of 0.9M parameters over characters, made on first use.

A short supervised warm-up on the task's own problems, whose shown answers slip now and then, leaves it in the state
of a pretrained model: it mostly knows how, and often answers wrong. The warm-up stops finely at a sampled accuracy, so
that reinforcement has both successes and room. It is always made on the CPU from one fixed seed, whatever the run's
seed, and cached.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trimtab.batch import Finish, Problem, Prompt, Sample, pack
from trimtab.errors import ModelError
from trimtab.policy.cache import cached_folder
from trimtab.policy.model import CausalPolicy
from trimtab.policy.tokenizer import HfTokenizer
from trimtab.spec import PolicySpec

Examples = Callable[[random.Random], tuple[str, str]]  # draws (prompt, answer) of a training problem
Progress = Callable[[int, int, str], None]  # per cent done, 100, what is shown

RECIPE = 2  # raise it with any change below that changes the weights
SEED = 20260
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,  # heads of 32: vLLM refuses 16 on a CPU
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,  # 1/sqrt(hidden); the usual 0.02 needs half as many steps again
}

LEARNING_RATE, SLIP_RATE, BATCH = 2e-3, 1.5e-3, 128
SKILL = 0.78  # sampled accuracy of the first part of the warm-up, before answers slip
BELOW = 0.8  # the slipping answers are right at this share of the wanted accuracy, so that it is passed, not approached
SETTLE_FROM, SETTLED = 0.35, 0.3  # accuracy from which the learning rate is this part of the full one
RAMP, MAX_STEPS, EXPECTED_STEPS = 20, 2000, 400
PROBE_EVERY, PROBE_CLOSE = 20, 4  # in steps; PROBE_CLOSE once half the wanted accuracy is reached
PROBES, CONFIRM = 256, 768  # responses of a probe, and of the second one that confirms it


def prepare_tiny(root: Path, accuracy: float, examples: Examples | None, progress: Progress | None = None) -> Path:
    """Folder of the tiny model warmed up to ``accuracy`` (sampled, temperature 1; 0: random weights)."""
    if accuracy > 0 and examples is None:
        raise ModelError("policy=tiny needs training problems for its warm-up; set policy.warmup_accuracy=0 for none")
    key: dict[str, Any] = {"recipe": RECIPE, "shape": SHAPE, "seed": SEED, "torch": torch.__version__}
    if accuracy > 0 and examples is not None:
        draw = random.Random(SEED)
        key["accuracy"] = accuracy
        key["examples"] = [examples(draw) for _ in range(BATCH)]  # what they are is known by what they draw

    def make(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            policy = new_policy()
            if accuracy > 0 and examples is not None:
                warm_up(policy, examples, accuracy, progress or _silent)
            policy.save_pretrained(folder)

    return cached_folder(root, "tiny", key, make)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One id for each printable ASCII character and newline, after four special tokens."""
    vocabulary = {token: i for i, token in enumerate((PAD, BOS, EOS, UNK, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_policy() -> CausalPolicy:
    """A tiny policy of random weights from torch's current seed."""
    inner = new_tokenizer()
    config = LlamaConfig(
        vocab_size=len(inner),
        pad_token_id=inner.pad_token_id,
        bos_token_id=inner.bos_token_id,
        eos_token_id=inner.eos_token_id,
        **SHAPE,
    )
    model = LlamaForCausalLM(config)
    return CausalPolicy(model, HfTokenizer(inner, len(inner), (inner.eos_token_id,)), PolicySpec())


def warm_up(policy: CausalPolicy, examples: Examples, accuracy: float, progress: Progress) -> float:
    """Train on drawn examples, then on slipping ones; returns the sampled accuracy reached.

    First up to ``SKILL``, with right answers; then, with digits replaced, down to ``accuracy``: what is left to
    reinforcement is mostly to prefer what the model already knows, as with a pretrained model. ModelError when it takes
    more than MAX_STEPS steps.
    """
    lesson = _Lesson(policy, examples, progress)
    reached = lesson.until(max(accuracy, SKILL), rising=True, rate=LEARNING_RATE, slip=0.0)
    if accuracy < SKILL:
        slip = slip_rate(BELOW * accuracy, [examples(lesson.draw)[1] for _ in range(PROBES)])
        reached = lesson.until(accuracy, rising=False, rate=SLIP_RATE, slip=slip)
    return reached


class _Lesson:
    """Supervised steps until a sampled accuracy is passed."""

    def __init__(self, policy: CausalPolicy, examples: Examples, progress: Progress) -> None:
        self.draw = random.Random(SEED + 1)
        self._policy, self._examples, self._progress = policy, examples, progress
        self._optimiser = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self._step, self._best = 0, 0.0

    def until(self, wanted: float, *, rising: bool, rate: float, slip: float) -> float:
        """Train until the accuracy, measured and confirmed, has risen or fallen to ``wanted``."""
        reached = 0.0 if rising else 1.0
        while self._step < MAX_STEPS:
            self._learn(rate, slip)
            every = PROBE_EVERY if rising and reached < wanted / 2 else PROBE_CLOSE
            if self._step % every:
                continue
            reached = self._accuracy(PROBES)
            self._best = max(self._best, reached)
            self._progress(self._step, EXPECTED_STEPS, f"accuracy {reached:.2f}, wanted {wanted:.2f}")
            if (reached >= wanted) == rising or reached == wanted:
                reached = self._accuracy(CONFIRM)
                if (reached >= wanted) == rising or reached == wanted:
                    return reached
        raise ModelError(
            f"the tiny model's warm-up reached an accuracy of {reached:.2f} in {MAX_STEPS} steps, not {wanted:.2f}; "
            "set policy.warmup_accuracy=0 for random weights, or an easier task.difficulty="
        )

    def _learn(self, rate: float, slip: float) -> None:
        self._step += 1
        settled = SETTLED if self._best > SETTLE_FROM else 1.0
        self._optimiser.param_groups[0]["lr"] = rate * settled * min(1.0, self._step / RAMP)
        shown = [self._examples(self.draw) for _ in range(BATCH)]
        loss = _loss(self._policy, [(prompt, slipped(answer, slip, self.draw)) for prompt, answer in shown])
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimiser.step()

    def _accuracy(self, probes: int) -> float:
        return sampled_accuracy(self._policy, [self._examples(self.draw) for _ in range(probes)], seed=self._step)


def slip_rate(accuracy: float, answers: Sequence[str]) -> float:
    """Rate at which the n digits of an answer must slip for it to stay right with probability ``accuracy``.

    (1 - rate)^n = accuracy, with n the mean over ``answers``.
    """
    digits = sum(sum(c.isdigit() for c in answer) for answer in answers) / len(answers)
    return 1.0 - accuracy ** (1.0 / max(digits, 1.0))


def slipped(answer: str, rate: float, draw: random.Random) -> str:
    """``answer`` with each digit replaced by another one at ``rate``."""
    return "".join(
        str((int(c) + draw.randint(1, 9)) % 10) if c.isdigit() and draw.random() < rate else c for c in answer
    )


def sampled_accuracy(policy: CausalPolicy, pairs: Sequence[tuple[str, str]], seed: int) -> float:
    """Share of prompts whose response, sampled at temperature 1, is the answer and then the end token."""
    end = policy.tokenizer.end_ids[0]
    prompts = [policy.tokenizer.encode(prompt) for prompt, _ in pairs]
    wanted = [(*policy.tokenizer.encode(answer), end) for _, answer in pairs]
    responses = sample(policy, prompts, max(len(w) for w in wanted), seed)
    return sum(tuple(r[: len(w)]) == w for r, w in zip(responses, wanted, strict=True)) / len(pairs)


@torch.no_grad()
def sample(policy: CausalPolicy, prompts: Sequence[tuple[int, ...]], max_tokens: int, seed: int) -> list[list[int]]:
    """``max_tokens`` ids after each prompt at temperature 1 (what follows an end token is not cut off)."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.tensor([len(p) for p in prompts])
    row = torch.arange(len(prompts))
    ids = pad_sequence([torch.tensor((*p, *[0] * max_tokens)) for p in prompts], batch_first=True)
    for i in range(max_tokens):
        used = int(length.max()) + i
        hidden: Tensor = policy.model.model(input_ids=ids[:, :used], use_cache=False).last_hidden_state
        logits = policy.model.lm_head(hidden[row, length - 1 + i])
        ids[row, length + i] = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return ids[row[:, None], length[:, None] + torch.arange(max_tokens)].tolist()


def _loss(policy: CausalPolicy, pairs: Sequence[tuple[str, str]]) -> Tensor:
    samples = [_as_sample(policy, prompt, answer) for prompt, answer in pairs]
    batch = pack(samples, [0] * len(samples), [0.0] * len(samples))
    return -policy.score(batch, grad=True).logp_N.mean()


def _as_sample(policy: CausalPolicy, prompt: str, answer: str) -> Sample:
    ids = (*policy.tokenizer.encode(answer), policy.tokenizer.end_ids[0])
    asked = Prompt(Problem("warm-up", prompt, answer), policy.tokenizer.encode(prompt))
    return Sample(asked, ids, (0.0,) * len(ids), (0,) * len(ids), Finish.stop)


def _silent(done: int, total: int, text: str) -> None:
    pass
