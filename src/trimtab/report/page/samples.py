"""Samples: prompt, completion, reward, and every token coloured by how far trainer and engine disagree on it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import DataError
from trimtab.report.model import Run, Setting
from trimtab.report.page.svg import tag
from trimtab.report.page.text import esc, fixed, number
from trimtab.report.page.view import View, name, section

WORST, RANDOM = 3, 2
"""Samples of a setting: those with the largest |log-ratio|, then some drawn at random."""
MOST_TOKENS, MOST_PROMPT, ALL_TOKENS = 400, 2000, 24_000
LEVELS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""|log-ratio| in nats from which a token has colour 1 … 5; bfloat16's natural gap has a standard deviation of 0.06."""


@dataclass(frozen=True)
class Token:
    """``log_ratio``: trainer minus engine, nats; None where either is unknown."""

    text: str
    id: int
    engine: float
    trainer: float | None
    own: bool

    @property
    def log_ratio(self) -> float | None:
        if not self.own or self.trainer is None or math.isnan(self.trainer) or math.isnan(self.engine):
            return None
        return 0.0 if self.trainer == self.engine else self.trainer - self.engine  # equal infinities: no gap


@dataclass(frozen=True)
class Shown:
    """One sample; ``tokens`` is empty where the file lacks their texts, and ``response`` stands in."""

    prompt: str
    response: str
    reward: float
    advantage: float
    finish: str
    step: int
    row: int
    tokens: tuple[Token, ...]
    texts: bool

    @property
    def worst(self) -> float:
        return max((abs(r) for t in self.tokens if (r := t.log_ratio) is not None), default=0.0)


def last_file(setting: Setting) -> tuple[Run, Path] | None:
    """The newest recorded step of the setting's first run that has any."""
    for run in setting.runs:
        files = sorted((run.path / "rollouts").glob("*.parquet")) if run.path is not None else []
        if files:
            return run, files[-1]
    return None


def read(file: Path) -> list[Shown]:
    """The samples of a recorded file's last step; DataError, OSError as ``read_rollouts`` has it."""
    from trimtab.recording import read_rollouts

    found = read_rollouts(file)
    if not found:
        return []
    step = found[-1]
    shown = []
    for i, sample in enumerate(step.samples):
        trainer, texts = step.proximal_logps[i], step.tokens[i]
        tokens = tuple(
            Token(
                text="" if texts is None else texts[j],
                id=token,
                engine=sample.logps[j],
                trainer=None if trainer is None else trainer[j],
                own=sample.own is None or sample.own[j],
            )
            for j, token in enumerate(sample.ids)
        )
        prompt = sample.prompt.problem.prompt
        told = prompt if isinstance(prompt, str) else "\n\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        shown.append(Shown(told, step.texts[i], step.rewards[i], step.advantages[i], sample.finish.value, step.step, i,
                           tokens, texts is not None))  # fmt: skip
    return shown


def choose(found: Sequence[Shown], seed: int = 0) -> list[tuple[Shown, str]]:
    """The worst ones, then random ones, each with why it is here; the same ones at every call."""
    by = sorted(found, key=lambda s: (-s.worst, s.row))
    worst, rest = by[:WORST], sorted(by[WORST:], key=lambda s: s.row)
    drawn = random.Random(seed).sample(rest, min(RANDOM, len(rest)))
    return [(s, "largest |log-ratio|") for s in worst] + [(s, "drawn at random") for s in drawn]


def samples(v: View) -> str:
    """The tab."""
    made, lacking = [], []
    left = ALL_TOKENS
    for setting in v.settings:
        at = last_file(setting)
        if at is None:
            lacking.append(setting.label)
            continue
        run, file = at
        try:
            found = read(file)
        except (DataError, OSError) as error:
            made.append(_group(v, setting, run, tag("p", "Cannot be read: " + esc(error), class_="note")))
            continue
        cards = []
        for shown, why in choose(found):
            most = min(MOST_TOKENS, left)
            if most < 20:
                cards.append(tag("p", "The page's room for samples is used up.", class_="note"))
                break
            left -= min(most, len(shown.tokens))
            cards.append(_card(shown, why, most))
        made.append(_group(v, setting, run, "".join(cards)))
    if not made:
        return section("samples-list", "Samples", tag("p", "No run has recorded rollouts; "
                       "<code>rollout.record_every=50</code> records each 50th step."))  # fmt: skip
    note = tag("p", "Without recorded rollouts: " + esc(", ".join(lacking)) + ".", class_="note") if lacking else ""
    lead = ("Tokens by log-ratio, trainer minus engine: where the two disagree. From each setting's newest recorded "
            f"step: {WORST} responses with the largest |log-ratio|, {RANDOM} at random.")  # fmt: skip
    return section("samples-list", "Samples", _scale(), *made, note, lead=lead)


def _group(v: View, setting: Setting, run: Run, body: str) -> str:
    first = v.index[setting.label] == 0
    step = tag("span", f"seed {esc(run.seed if run.seed is not None else '–')}", class_="quiet")
    return tag("details", tag("summary", name(v, setting.label), " ", step), body, open="" if first else None,
               class_="samples")  # fmt: skip


def _scale() -> str:
    """The legend: engine finds the token likelier on the left, trainer on the right."""
    ends = [f"{level:g}" for level in LEVELS]
    low = [tag("span", f"−{end}", class_=f"tok n{i + 1}") for i, end in reversed(list(enumerate(ends)))]
    high = [tag("span", f"+{end}", class_=f"tok p{i + 1}") for i, end in enumerate(ends)]
    return tag("p", tag("span", "engine likelier", class_="quiet"), *low, tag("span", "0", class_="tok"), *high,
               tag("span", "trainer likelier, nats", class_="quiet"), tag("span", "unknown", class_="tok unknown"),
               class_="tokscale")  # fmt: skip


def level(log_ratio: float) -> int:
    """0 … 5."""
    return sum(abs(log_ratio) >= bound for bound in LEVELS)


def _card(shown: Shown, why: str, most: int) -> str:
    facts = [("reward", number(shown.reward)), ("advantage", number(shown.advantage)),
             ("tokens", str(len(shown.tokens))), ("ended by", shown.finish),
             ("largest |log-ratio|", f"{number(shown.worst)} nats"), ("step", str(shown.step))]  # fmt: skip
    head = tag("p", tag("span", esc(why), class_="badge"),
               *[tag("span", esc(key), " ", tag("b", esc(value))) for key, value in facts], class_="facts")  # fmt: skip
    prompt = shown.prompt
    if len(prompt) > MOST_PROMPT:
        prompt = prompt[:MOST_PROMPT] + f" … ({len(shown.prompt) - MOST_PROMPT} more characters)"
    body = tag("div", *map(_token, shown.tokens[:most]), class_="tokens", tabindex=0, role="group", dir="auto",
               data_points="", aria_label="Completion. Arrow keys go from token to token.")  # fmt: skip
    over = len(shown.tokens) - most
    more = tag("p", f"{over} more tokens", class_="quiet") if over > 0 else ""
    plain = "" if shown.texts else tag("pre", esc(shown.response[: 4 * MOST_PROMPT]), dir="auto")
    if not shown.texts:
        more += tag("p", "This recording has no texts of single tokens; their ids stand above.", class_="quiet")
    if all(token.trainer is None for token in shown.tokens):
        more += tag("p", "This recording has no log-probs of the trainer, so no token has a colour.", class_="quiet")
    return tag("article", head, tag("h3", "Prompt"), tag("pre", esc(prompt), dir="auto"),
               tag("h3", "Completion"), plain, body, more, class_="card")  # fmt: skip


def _token(token: Token) -> str:
    ratio = token.log_ratio
    known = "unknown" if ratio is None else f"{fixed(ratio, 3, sign=True)} nats"
    trainer = "unknown" if token.trainer is None else number(token.trainer)
    tip = f"log-ratio {known}; trainer {trainer}, engine {number(token.engine)}; token {token.id}"
    if not token.own:
        tip, class_ = f"token {token.id}: not the policy's own", "tok foreign"
    elif ratio is None:
        class_ = "tok unknown"
    else:
        class_ = "tok" if not level(ratio) else f"tok {'p' if ratio > 0 else 'n'}{level(ratio)}"
    text = esc(token.text).replace("\n", "↵\n") if token.text else f"⟨{token.id}⟩"
    return tag("span", text, class_=class_, data_tip=tip)
