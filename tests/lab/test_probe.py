"""``trimtab probe`` end to end on the tiny model: files, figures against an independent forward, refusals, the page."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.test_gap import Row, oracle
from transformers import AutoModelForCausalLM

from trimtab.batch import Problem, Prompt, Sample, Sampling
from trimtab.cli import main
from trimtab.config.groups import choices, recipes
from trimtab.errors import ConfigError, DataError
from trimtab.lab.bench import Bench, compose_to_measure, opened
from trimtab.lab.page import page
from trimtab.lab.probe import Probed, probe
from trimtab.lab.prompts import QUESTIONS, problems, shares
from trimtab.lab.tables import as_text, document, tokens_csv
from trimtab.spec import Dtype
from trimtab.track.console import setup_progress

HOSTILE = "</style><script>alert(1)</script><b>&amp;\x1b[31m\u202e"
T = 0.7
SETUP = ("rollout=transformers", f"rollout.temperature={T}", "policy.warmup_accuracy=0", "mismatch=logit_noise",
         "mismatch.strength=0.4", "rollout.max_tokens=6")  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def written(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "probe"
    arguments = [*SETUP, f"policy.cache_dir={cache}", "--responses", "24", "--out", str(out)]
    assert main(["probe", *arguments]) == 0
    return out


@pytest.fixture(scope="module")
def probed(cache: Path) -> Probed:
    spec = compose_to_measure([*SETUP, f"policy.cache_dir={cache}"])
    with opened(spec) as bench:
        return probe(bench, "task", 12, setup_progress, SETUP)


def tokens(folder: Path) -> list[dict[str, str]]:
    with (folder / "tokens.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def rows_of(lines: list[dict[str, str]]) -> list[Row]:
    rows: dict[str, Row] = {}
    for line in lines:
        rows.setdefault(line["response"], []).append((float(line["rollout_logp"]), float(line["trainer_logp"])))
    return list(rows.values())


def test_files_are_written_and_agree(written: Path) -> None:
    assert {f.name for f in written.iterdir()} == {
        "probe.html", "probe.json", "figures.csv", "curves.csv", "tokens.csv",
    }  # fmt: skip
    told: dict[str, Any] = json.loads((written / "probe.json").read_text())
    expected = oracle(rows_of(tokens(written)))
    assert {name: f["value"] for name, f in told["figures"].items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    with (written / "figures.csv").open(newline="") as file:
        assert {line["figure"]: float(line["value"]) for line in csv.DictReader(file)} == pytest.approx(expected)
    assert told["counts"]["responses"] == 24
    assert told["counts"]["scored"] == told["counts"]["tokens"] == len(tokens(written))
    assert told["figures"]["token_k3"]["low"] < told["figures"]["token_k3"]["value"]
    assert told["prompts"] == "task" and told["engine"]["engine"] == "transformers"


def test_each_token_is_scored_at_the_rollouts_temperature(probed: Probed, cache: Path) -> None:
    (folder,) = [path.parent for path in cache.rglob("model.safetensors")]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    trainer, entropy = iter(probed.pairs.trainer_N.tolist()), iter(probed.pairs.entropy_N.tolist())  # type: ignore[union-attr]
    rollout = iter(probed.pairs.rollout_N.tolist())
    apart = 0.0
    for sample in probed.samples:
        ids = torch.tensor([(*sample.prompt.ids, *sample.ids)])
        with torch.no_grad():
            logp = (model(ids).logits[0] / T).log_softmax(-1)[len(sample.prompt.ids) - 1 : -1]
        for at, token in enumerate(sample.ids):
            assert next(trainer) == pytest.approx(float(logp[at, token]), abs=1e-4)
            assert next(entropy) == pytest.approx(-float((logp[at].exp() * logp[at]).sum()), abs=1e-4)
            apart = max(apart, abs(next(rollout) - float(logp[at, token])))
    assert apart > 0.1  # the injected noise is in the engine's own log-probs


def test_worst_tokens_stand_in_their_context(probed: Probed) -> None:
    told = document(probed)["worst"]
    sizes = [abs(token["difference"]) for token in told]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(probed.gap["dp_max"].value)
    for token in told[:10]:
        response = "".join(probed.pieces[token["row"]])
        before = "".join(probed.pieces[token["row"]][: token["position"]])
        assert token["before"].endswith(before) and "=" in token["before"]  # the prompt's end stands before it
        assert response.startswith(before + token["text"] + token["after"])


def test_one_line_of_json_and_nothing_else(cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("1+2=\n\n30+41=\n", encoding="utf-8")
    arguments = [*SETUP, f"policy.cache_dir={cache}", "--responses", "3", "--prompts", str(questions), "--json"]
    assert main(["probe", *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["counts"]["responses"] == 4  # two prompts, two each
    assert told["overrides"] == arguments[: len(SETUP) + 1] and told["prompts"] == str(questions)


def test_text(probed: Probed) -> None:
    text = "\n".join(as_text(probed))
    assert "transformers float32 against trainer float32; tiny, T=0.7, injected: logit_noise 0.4" in text
    assert re.search(r"share \|Δp\| ≥ 0.01 +\d+\.\d\d% +[\d.]+% to [\d.]+%", text)
    assert re.search(r"sequence +-?[\d.e-]+ +[\d.e-]+ ", text)


# -- what is refused, what is allowed --------------------------------------------------------------------------------


def test_what_a_run_refuses_can_be_measured() -> None:
    spec = compose_to_measure(["rollout.top_p=0.9", "rollout.logprobs_mode=raw", "rollout.temperature=0.7"])
    assert (spec.rollout.top_p, spec.rollout.temperature) == (0.9, 0.7)
    with pytest.raises(ConfigError, match=r"rollout\.top_p=1\.5"):
        compose_to_measure(["rollout.top_p=1.5"])


@pytest.mark.parametrize(("arguments", "said"), [
    (["rollout=replay", "rollout.path=."], "samples nothing"),
    (["rollout=nosuch"], "rollout"),
    (["rollout.top_k=5"], "sampled with by no engine"),
    ([*SETUP, "--prompts", "no/such.txt"], "no such file"),
])  # fmt: skip
def test_refusals(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["probe", f"policy.cache_dir={cache}", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["0", "-1", "x", "1e3"])
def test_a_number_of_responses_that_is_none(typed: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["probe", f"--responses={typed}"])
    assert ended.value.code == 2


def test_out_that_cannot_be_written_to(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["probe", *SETUP, f"policy.cache_dir={cache}", "--responses=2", "--out", str(tmp_path / "file")]) == 1
    assert "--out=" in capsys.readouterr().err


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("available", "responses", "got"), [
    (16, 16, (16, 1)), (16, 4, (4, 1)), (16, 17, (16, 2)), (7000, 64, (64, 1)), (1, 5, (1, 5)),
])  # fmt: skip
def test_shares(available: int, responses: int, got: tuple[int, int]) -> None:
    assert shares(available, responses) == got
    assert got[0] * got[1] >= responses


def test_prompts_of_a_file(cache: Path, tmp_path: Path) -> None:
    spec = compose_to_measure([*SETUP, f"policy.cache_dir={cache}"])
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "1+1="}\n{"prompt": [{"role": "user", "content": "hi"}]}\n')
    with opened(spec) as bench:
        found = problems(str(lines), spec, bench.policy)
        assert [p.prompt for p in found] == ["1+1=", [{"role": "user", "content": "hi"}]]
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        assert [p.prompt for p in problems("builtin", spec, bench.policy)] == asked
        bench.policy.tokenizer.inner.chat_template = None
        assert [p.prompt for p in problems("builtin", spec, bench.policy)] == list(QUESTIONS)
        (tmp_path / "empty.txt").write_text("\n \n")
        with pytest.raises(DataError, match="holds no prompt"):
            problems(str(tmp_path / "empty.txt"), spec, bench.policy)
        (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
        with pytest.raises(DataError, match="UTF-8"):
            problems(str(tmp_path / "latin.txt"), spec, bench.policy)


# -- the bench -------------------------------------------------------------------------------------------------------


def test_sampling_is_a_function_of_the_seed_and_the_engine_can_be_changed(cache: Path) -> None:
    spec = compose_to_measure([*SETUP, f"policy.cache_dir={cache}", "rollout.max_num_seqs=4"])
    with opened(spec) as bench:
        prompts = bench.encode([Problem(str(i), f"{i}+{i}=", "") for i in range(6)])
        first = bench.sample(prompts)
        assert [s.ids for s in bench.sample(prompts)] == [s.ids for s in first]
        assert [s.ids for s in bench.sample(prompts, bench.sampling(seed=9))] != [s.ids for s in first]
        noisy = bench.pairs(first).log_ratio_N.abs().mean()
        bench.restart(mismatch=replace(spec.mismatch, strength=0.0))
        assert bench.pairs(bench.sample(prompts)).log_ratio_N.abs().max() < 1e-4 < noisy
        moved(bench)
        assert bench.pairs(bench.sample(prompts)).log_ratio_N.abs().mean() > 1e-3
        bench.hand_over()
        again = bench.sample(prompts)
        assert bench.pairs(again).log_ratio_N.abs().max() < 1e-4
        assert {v for s in again for v in s.versions} == {bench.version}


def moved(bench: Bench) -> None:
    with torch.no_grad():
        for parameter in bench.policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


# -- the page --------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "style")], tag
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_the_page_has_every_figure_and_no_script(probed: Probed) -> None:
    html = page(probed)
    found = read(html)  # below: single responses; scatter, histogram; mean; length; entropy
    assert found.tags.count("svg") == 3 + 2 + 1 + 1 + 1
    assert "script" not in found.tags and "default-src 'none'" in html
    assert len(found.ids) == len(set(found.ids))
    assert "trimtab probe rollout=transformers" in html


def test_hostile_texts_stay_texts(probed: Probed) -> None:
    pieces = tuple(tuple(HOSTILE for _ in row) for row in probed.pieces)
    bad = replace(probed, pieces=pieces, tails=pieces, source=HOSTILE, overrides=(HOSTILE,), engine={HOSTILE: HOSTILE})
    html = page(bad, title=HOSTILE)
    found = read(html)
    assert "script" not in found.tags and "b" not in found.tags and found.tags.count("style") == 1
    assert "\x1b" not in html and "\u202e" not in html
    text = "\n".join(as_text(bad))
    assert "\x1b" not in text and "\u202e" not in text
    assert next(csv.DictReader(tokens_csv(bad).splitlines()))["text"].startswith("</style>")


def test_a_gap_without_a_single_number_has_a_page(probed: Probed) -> None:
    lost = probed.pairs
    pairs = replace(lost, rollout_N=torch.full_like(lost.rollout_N, math.nan))
    from trimtab.lab.curves import worst
    from trimtab.lab.gap import measure

    none = replace(probed, pairs=pairs, gap=measure(pairs), positions=(), entropies=(), prefixes=(),
                   worst=tuple(worst(pairs, 5)))  # fmt: skip
    assert "No token has a log-prob from both sides" in page(none)
    assert json.loads(json.dumps(document(none), allow_nan=False))["figures"]["dp_max"]["value"] is None
    assert any("without a log-prob from the engine" in line for line in as_text(none))


# -- the preset ------------------------------------------------------------------------------------------------------


def test_abeja_is_a_set_up_for_any_model_and_no_method() -> None:
    spec = compose_to_measure(["preset=abeja"])
    assert (spec.rollout.dtype, spec.policy.dtype) == (Dtype.bfloat16, Dtype.bfloat16)
    assert spec.rollout.temperature == 1.0 and spec.rollout.max_tokens >= 512
    assert compose_to_measure(["preset=abeja", "policy=smollm2"]).policy.dtype is Dtype.bfloat16
    assert "abeja" in choices("preset") and "abeja" not in recipes()
    plain = compose_to_measure([])
    assert (spec.algo, spec.mis, spec.loss) == (plain.algo, plain.mis, plain.loss)


def test_the_built_in_prompts_hold_the_articles_question() -> None:
    assert QUESTIONS[0] == "What is the capital of Australia, and why is it not Sydney?"
    assert len(set(QUESTIONS)) == len(QUESTIONS) == 16


def test_answers_to_questions_end_by_the_models_own_tokens(cache: Path) -> None:
    ends: list[tuple[int, ...]] = []
    spec = compose_to_measure([*SETUP, f"policy.cache_dir={cache}", "task.stop='1'"])
    with opened(spec) as bench:
        generate = bench.engine.generate

        def seen(prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
            ends.append(sampling.stop_ids)
            return generate(prompts, sampling)

        bench.engine.generate = seen  # type: ignore[method-assign]
        probe(bench, "builtin", 2, setup_progress)
        probe(bench, "task", 2, setup_progress)
        assert ends == [tuple(bench.policy.tokenizer.end_ids), bench.stop_ids]
        assert len(ends[1]) > len(ends[0])
