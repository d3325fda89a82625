"""The ladder as text, JSON, CSV and page; what is to change, in order; sizes and bounds."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
import torch

from trimtab.lab.parity.model import Bound, Cause, Rung, Section, Verdict, changes, healthy, measured, size_of
from trimtab.lab.parity.page import headline, page
from trimtab.lab.parity.tables import as_csv, as_text, document, told

HOSTILE = "<script>alert(1)</script>\u202e"


def rung(section: Section, name: str, verdict: Verdict, cause: Cause | None = None, follows: bool = False) -> Rung:
    return Rung(section, name, "a, and b", verdict, value=0.034, error=0.002, bound=1e-4, count=99, cause=cause,
                follows=follows)  # fmt: skip


LATE = Cause("stale", "the engine has old weights", "hand over", "hand-over")
EARLY = Cause("raw_logprobs", HOSTILE, "rollout.logprobs_mode=processed", "engine")
RUNGS = [
    rung(Section.weights, "hand-over 1", Verdict.differs, LATE),
    rung(Section.semantics, "log-probs", Verdict.differs, EARLY),
    rung(Section.semantics, "again", Verdict.differs, EARLY),
    rung(Section.semantics, "ratio", Verdict.differs, Cause("x", "x", "x", "engine"), follows=True),
    rung(Section.numerics, "dtype", Verdict.rounding),
    Rung(Section.path, "cascade", "a, and b", Verdict.untestable, note="not on a CPU"),
]


def test_changes_come_section_by_section_each_cause_once() -> None:
    assert [r.name for r in changes(RUNGS)] == ["log-probs", "hand-over 1"]
    assert not healthy(RUNGS)
    assert healthy(RUNGS[4:])
    assert changes(RUNGS[4:]) == []


def test_verdicts_in_words() -> None:
    assert told(RUNGS[0]) == "differs by 0.034 ± 0.002 nats, mean |d|"
    assert told(RUNGS[4]) == "rounding, 0.034 ± 0.002 nats, mean |d|"
    assert told(RUNGS[5]) == "not testable here"
    lines = as_text(RUNGS, ["about"])
    assert lines[0] == "about"
    end = lines.index("What to change, in order, before any correction is switched on:")
    assert "rollout.logprobs_mode=processed" in lines[end + 1]
    assert as_text(RUNGS[4:], [])[-1].startswith("Nothing to change: no rung differs; what is left is rounding")


def test_json_and_csv_hold_every_rung() -> None:
    plain = json.loads(json.dumps(document(RUNGS, ["a=b"], {"device": "cpu"}), allow_nan=False))
    assert plain["healthy"] is False
    assert [c["cause"] for c in plain["changes"]] == ["raw_logprobs", "stale"]
    assert [r["verdict"] for r in plain["rungs"]] == [r.verdict.name for r in RUNGS]
    rows = list(csv.DictReader(io.StringIO(as_csv(RUNGS))))
    assert [row["rung"] for row in rows] == [r.name for r in RUNGS]
    assert float(rows[0]["value"]) == 0.034


def test_the_page_ends_with_what_to_change_and_escapes_what_it_is_told() -> None:
    text = page(RUNGS, ["about"], ["rollout=transformers"], {"device": HOSTILE})
    assert "<script>" not in text and "\u202e" not in text
    assert text.index('id="changes"') > text.index('id="numerics"')
    assert text.index("rollout.logprobs_mode=processed", text.index('id="changes"')) < text.rindex("hand over")
    assert headline(RUNGS[4:]) == "Engine and trainer agree within the rounding of their dtypes"
    assert headline([]) == "Engine and trainer agree"


def test_sizes_by_a_loop() -> None:
    gap = torch.tensor([0.1, -0.2, 0.3, math.nan, 0.05], dtype=torch.float64)
    row = torch.tensor([0, 0, 1, 1, 2])
    size = size_of(gap, row)
    values = [0.1, 0.2, 0.3, 0.05]
    mean = sum(values) / 4
    sums = [(0.1 - mean) + (0.2 - mean), 0.3 - mean, 0.05 - mean]
    assert (size.tokens, size.missing) == (4, 1)
    assert size.mean == pytest.approx(0.25 / 4)
    assert size.mean_abs == pytest.approx(mean)
    assert size.rms == pytest.approx(math.sqrt(sum(v * v for v in values) / 4))
    assert size.error == pytest.approx(math.sqrt(sum(s * s for s in sums) * 3 / 2) / 4)
    assert not size.within(Bound(9, 9, 9))  # a missing figure is no noise
    assert size_of(gap[:3], row[:3]).within(Bound(0.2001, 0.3, 0.3))
    assert not size_of(torch.tensor([0.0, math.inf])).within(Bound(9, 9, 9))
    assert measured(Section.path, "a", "b", Verdict.equal, size, Bound(0.5, 1, 1)).bound == 0.5
