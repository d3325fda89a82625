"""How it was computed, where it came from, and how the settings' configs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.report.page.svg import tag
from trimtab.report.page.text import count, esc, visible
from trimtab.report.page.view import MISMATCH, View, injected, metric_of, name, section
from trimtab.report.score import NEAR
from trimtab.report.statistics import ALPHA

NOT_SETTINGS = ("seed", "run_dir", "resume", "tracker.", "hydra.")
MOST_OTHERS = 60


def how(v: View) -> str:
    """Definitions, so that each number can be checked."""
    c = v.comparison
    title = metric_of(c.metric).title
    tested = sum(row.difference.p_corrected is not None for row in v.order)
    items = {
        "Score": f"Mean of a run's last {count(c.last, 'value')} of <code>{esc(c.metric)}</code> ({esc(title)}). Never "
                 "the best value, which favours noise.",
        "Interval": "95% t interval of the mean over seeds: mean ± t · s / √n. Refused below two seeds.",
        "Paired difference": "Score minus the baseline's score at the same seed; t interval and two-sided t test of "
                             "these differences. A seed that was started for one of them only takes no part.",
        "Lost seeds": "Which runs fail may depend on how they do, so a verdict must hold with the lost seeds (failed, "
                      "diverged, ended early, not finished yet) counted too: for “better” the setting's at the worst "
                      "score of all runs and the baseline's at the best, for “worse” the other way round. The larger "
                      "of the two p values is taken. The assumption: a lost seed would have scored within that "
                      "range (last values of runs without a score included). A seed that left neither a folder nor a "
                      "line in sweep.json cannot be counted so. Means and intervals are over the seeds that are left.",
        "Length": "All are scored at the last step that every setting reaches, unless the number of steps is a setting "
                  f"itself. A run that ends before {NEAR:.0%} of it counts as a lost seed.",
        "Corrected p": f"Holm's correction over {count(tested, 'comparison')}; better or worse: p ≤ {ALPHA}. So the "
                       "chance of any wrong “better” or “worse” on this page is at most 5% if its assumptions hold.",
        "Interquartile mean": "Only from 10 runs on: mean of the middle half; interval by stratified bootstrap.",
        "Curves": "Mean over the seeds that have the value; a line breaks where a run ends or drops out, as its mean "
                  "would jump by who is left: from there on it is the mean of fewer. Bands are 95% t intervals, absent "
                  "for one seed; wide ones may leave the frame. "
                  "A step that several attempts of a run wrote counts once, the last attempt's.",
        "Against tokens and time": "Runs end at one step but not at one token or second. Where they drop out within "
                  "the last 5% of the axis the curve ends, as its mean would jump by who is left.",
        "Thinning": "Long curves are thinned out for the screen: each stretch keeps its first and last value, its "
                    "lowest and its highest, so no spike is lost. Numbers in tables use every value.",
        "Mismatch KL": f"<code>{MISMATCH}</code>: mean of exp(d) − 1 − d with d = trainer's minus engine's log-prob of "
                       "a sampled token, in nats.",
        "Injected mismatch": "A gap put in on purpose, to study corrections: its size is a setting, not a finding.",
    }  # fmt: skip
    body = tag("dl", *[tag("div", tag("dt", esc(key)), tag("dd", text)) for key, text in items.items()])
    sources = tag("ul", *[tag("li", tag("code", esc(source))) for source in c.sources])
    return (
        section("how", "How it was computed", body)
        + _injected(v)
        + (section("sources", "Read from", sources) if c.sources else "")
    )


def _injected(v: View) -> str:
    found = [s for s in v.settings if injected(s)]
    if not found:
        return ""
    items = [tag("li", name(v, s.label, badge=False), ": ", esc(injected(s))) for s in found]
    lead = "The gap between engine and trainer of these settings was put in on purpose."
    return section("injected", "Injected mismatch", tag("ul", *items), lead=lead)


def differences(v: View) -> str:
    """Settings by what differs, and every other key of the configs that isn't the same everywhere."""
    keys = v.comparison.keys
    if not keys:
        return section("diff", "What differs", tag("p", "Nothing but the seed."))
    base = v.base.setting.values if v.base else {}
    heads = [tag("th", "Setting", scope="col"), *[tag("th", tag("code", esc(key)), scope="col") for key in keys]]
    rows = []
    for setting in v.settings:
        cells = [
            tag("td", tag("mark", esc(value)) if base and value != base.get(key) else esc(value))
            for key in keys
            for value in [setting.values.get(key, "–")]
        ]
        rows.append(tag("tr", tag("th", name(v, setting.label), scope="row", class_="setting"), *cells))
    body = tag("thead", tag("tr", *heads)) + tag("tbody", *rows)
    made = tag("table", body, class_="diff", aria_label="Settings by what differs")
    lead = "Found from the runs' configs." + (" Marked: what differs from the baseline." if base else "")
    return section("diff", "What differs", tag("div", made, class_="scroll", tabindex=0, role="region",
                                                 aria_label="What differs"), _others(v), lead=lead)  # fmt: skip


def _others(v: View) -> str:
    """Keys that differ and make no setting: they may explain a result all the same."""
    seen: dict[str, dict[str, int]] = {}
    for run in v.runs:
        for key, value in run.config.items():
            if not key.startswith(NOT_SETTINGS) and key not in v.comparison.keys:
                told = _told(value)
                seen.setdefault(key, {}).setdefault(told, 0)
                seen[key][told] += 1
    there = sum(bool(run.config) for run in v.runs)
    apart = {key: values for key, values in sorted(seen.items()) if len(values) > 1 or sum(values.values()) < there}
    if not apart:
        return ""
    rows = [
        tag("tr", tag("th", tag("code", esc(key)), scope="row"), tag("td", _counts(values)))
        for key, values in list(apart.items())[:MOST_OTHERS]
    ]
    more = f" ({len(apart) - MOST_OTHERS} more are not listed)" if len(apart) > MOST_OTHERS else ""
    made = tag("table", tag("tbody", *rows), class_="diff", aria_label="Other keys that differ")
    box = tag("div", made, class_="scroll", tabindex=0, role="region", aria_label="Other keys that differ")
    return tag("details", tag("summary", f"{count(len(apart), 'other key')} of the configs differ{more}"), box)


def _counts(values: Mapping[str, int]) -> str:
    told = [f"{esc(value)} ({count(n, 'run')})" for value, n in sorted(values.items(), key=lambda item: -item[1])[:6]]
    return "; ".join(told) + (f"; and {len(values) - 6} more" if len(values) > 6 else "")


def _told(value: Any) -> str:
    text = visible(value)
    return text if len(text) <= 120 else text[:119] + "…"
