"""A probe's page in a real Chromium: two widths, light and dark, on paper, with hostile texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report.chromium import Browser, program

from trimtab.batch import Finish, Problem, Prompt, Sample
from trimtab.lab.bootstrap import Resamples
from trimtab.lab.curves import by_entropy, by_position, growth, worst
from trimtab.lab.gap import Pairs, measure
from trimtab.lab.page import page
from trimtab.lab.parity.model import Cause, Rung, Section, Verdict
from trimtab.lab.parity.page import page as ladder
from trimtab.lab.probe import Probed
from trimtab.spec import RunSpec

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(program() is None, reason="needs Chromium: apt-get install chromium"),
]
HOSTILE = "</title></style><script>document.title='broken'</script><img src=x onerror=alert(1)>" + "w" * 300


def made(text: str) -> Probed:
    """A probe of 8 responses without a model."""
    draw = torch.Generator().manual_seed(0)
    length_B = torch.tensor([0, 5, 9, 30, 64, 64, 17, 40])
    n = int(length_B.sum())
    rollout_N = -torch.rand(n, generator=draw, dtype=torch.float64) * 4
    trainer_N = (rollout_N + 0.2 * torch.randn(n, generator=draw, dtype=torch.float64)).clamp(max=0.0)
    entropy_N = torch.rand(n, generator=draw, dtype=torch.float64) * 4
    pairs = Pairs(rollout_N, trainer_N, length_B, torch.ones(n, dtype=torch.bool), entropy_N)
    prompt = Prompt(Problem(text, text, ""), (1, 2))
    flat = iter(rollout_N.tolist())
    samples = tuple(
        Sample(prompt, (3,) * size, tuple(next(flat) for _ in range(size)), (0,) * size, Finish.length)
        for size in length_B.tolist()
    )
    resamples = Resamples.of(pairs.rows, 0, 50)
    return Probed(
        spec=replace(RunSpec(), seed=0), overrides=(text,), source=text, engine={"engine": text, "list": [text]},
        samples=samples, pieces=tuple((text,) * size for size in length_B.tolist()),
        tails=((text, text),) * len(samples), pairs=pairs, gap=measure(pairs, draws=50),
        positions=tuple(by_position(pairs, resamples)), entropies=tuple(by_entropy(pairs, resamples)),
        prefixes=tuple(growth(pairs, resamples)), worst=tuple(worst(pairs, 40)), seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("text", [" word", HOSTILE], ids=["plain", "hostile"])
def test_no_complaint_and_nothing_over_the_edge(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(made(text), title=text), encoding="utf-8")
    with Browser() as browser:
        for width, dark in ((390, False), (390, True), (1280, False)):
            tab = browser.open(path, width, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("document.images.length") == 0
            assert tab.value("document.title") != "broken"
            assert tab.value("document.querySelectorAll('svg.chart').length") == 8
            ground = tab.value("getComputedStyle(document.body).backgroundColor")
            assert ground == ("rgb(19, 20, 23)" if dark else "rgb(251, 250, 247)")
            assert tab.complaints == []
        assert tab.pdf(tmp_path / "page.pdf").stat().st_size > 10_000


@pytest.mark.parametrize("text", ["a cause in words", HOSTILE], ids=["plain", "hostile"])
def test_the_ladder_is_read_on_a_phone(text: str, tmp_path: Path) -> None:
    cause = Cause("raw_logprobs", text, text, "engine")
    rungs = [
        Rung(part, text, text, verdict, value=0.125, error=0.01, bound=1e-4, count=10, cause=cause, note=text)
        for part in Section
        for verdict in Verdict
    ]
    path = tmp_path / "page.html"
    path.write_text(ladder(rungs, [text], [text], {"engine": text}), encoding="utf-8")
    with Browser() as browser:
        for width, dark in ((390, False), (390, True), (1280, False)):
            tab = browser.open(path, width, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") <= width
            tables = "[...document.querySelectorAll('.ladder table')]"
            assert tab.value(f"{tables}.filter(t => t.scrollWidth > t.parentElement.clientWidth).length") == 0
            assert tab.value("document.images.length") == 0 and tab.value("document.title") != "broken"
            assert tab.value("document.querySelectorAll('.changes li').length") == 1  # one cause, named once
