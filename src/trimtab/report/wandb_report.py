"""A comparison as a W&B report: data first (the spec as JSON), the server second.

wandb-workspaces is pinned: the spec without a server comes from ``Report._to_model``, for which it has no public call.
Facts of it that shape this file: a runset that is bound to a project asks the server for it, an unbound one is of the
report's project; nested config keys cannot be filtered and grouped by reliably, so the flat ones are used where there
are any; filters given as text or as expressions have ``<`` and ``>`` in their values rewritten, so they are given as
the package keeps those of a report that it loaded; parallel coordinates average within a grouped runset, so they and
the scatter stand over an ungrouped one.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from trimtab.errors import ConfigError, TrimtabError
from trimtab.files import write_text
from trimtab.report.model import Comparison, Run
from trimtab.report.settings import SHORT, canonical, resolve, text
from trimtab.report.tables import markdown
from trimtab.track.identity import identify, read_object, recall
from trimtab.track.wandb import CLIENT_ERRORS, STEP, has_key, short

PINNED = "wandb-workspaces==0.4.13"
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own use of pydantic
        import wandb_workspaces.reports.v2 as wr
except ImportError as error:
    raise ConfigError(f"trimtab report cannot load wandb-workspaces ({error}): pip install '{PINNED}'") from error

SAVED = "wandb_report.json"
FLAT = ("algo", "tis_mode", "level", "rs", "veto")
KL = "train/mis_k3_kl"
TITLE_LENGTH = 128
LINES: Mapping[str, str] = {
    "eval/reward": "Evaluation reward",
    "train/reward": "Training reward, under the engine's policy",
    "train/reward_weighted": "Training reward, weighted by the correction",
    KL: "Mismatch KL (k3)",
    "train/mis_ess": "Effective sample size",
    "train/mis_kept_token_fraction": "Kept tokens",
    "train/tis_clipfrac": "Weights at their bound",
    "train/clip_fraction_high": "Clipped above",
    "train/clip_fraction_low": "Clipped below",
    "train/mis_rs_catastrophic_seq_fraction": "Vetoed responses",
    "train/entropy": "Entropy",
    "train/response_length": "Response length",
    "train/grad_norm": "Gradient norm",
}
"""What is drawn against the step, where a run has it; the comparison's own metric comes first."""


@dataclass(frozen=True)
class Place:
    """Where the report and its runs are; ``groups``: the sweeps, none if a run is in none; ``ids``: W&B's."""

    project: str
    entity: str
    groups: tuple[str, ...]
    ids: tuple[str, ...]


def place_of(runs: Sequence[Run], project: str | None, entity: str | None) -> Place:
    """Where the runs are tracked, by their configs and what their trackers kept. ConfigError if in several projects."""
    kept = [recall(run.path) if run.path else {} for run in runs]
    projects = {str(k.get("project") or run.config.get("tracker.project") or "trimtab")
                for run, k in zip(runs, kept, strict=True)}  # fmt: skip
    if project is None and len(projects) > 1:
        raise ConfigError(f"the runs are in several W&B projects ({', '.join(sorted(projects))}); give --project")
    named = [run.config.get("tracker.entity") or k.get("entity") for run, k in zip(runs, kept, strict=True)]
    found = [identify(run.path, run.run_id, run.name, run.config.get("tracker.group")) for run in runs if run.path]
    return Place(
        project=project or min(projects, default="trimtab"),
        entity=str(entity or next((name for name in named if name), "")),
        groups=tuple(sorted({str(who.group) for who in found})) if all(who.group for who in found) else (),
        ids=tuple(sorted(who.id for who in found)),
    )


def runset(name: str, place: Place, groupby: Sequence[str] = ()) -> wr.Runset:
    """The runs by exact group, or by exact id: nothing that a search text could also hit."""
    key, values = ("group", place.groups) if place.groups else ("name", place.ids)  # W&B's "name" is the id
    only = {"key": {"section": "run", "name": key}, "op": "IN", "value": list(values), "disabled": False}
    made = wr.Runset(name=name, groupby=list(groupby))
    made._stashed_filter_string = made.filters
    made._stashed_filters_v2 = {"filterFormat": "filterV2", "filters": [only]}
    return made


def keys_of(comparison: Comparison, runs: Sequence[Run]) -> list[str]:
    """W&B's config keys of what differs: flat where there is a flat one, else dotted."""
    configs = [{key: text(value) for key, value in canonical(run.config).items()} for run in runs]
    full = [resolve(key, configs) for key in comparison.keys]
    return [SHORT[key] if SHORT.get(key) in FLAT else key for key in full if key != "preset"]


def build(comparison: Comparison, runs: Sequence[Run], place: Place, title: str) -> wr.Report:
    """The report, in the order of the page: what is better, curves, reward against mismatch, settings, runs."""
    keys = keys_of(comparison, runs) or ["algo"]
    grouped = runset("settings", place, [f"config.{key}" for key in keys])
    return wr.Report(
        project=place.project,
        entity=place.entity,
        title=title[:TITLE_LENGTH],
        description=f"{len(comparison.rows)} settings, {len(runs)} runs; by {comparison.metric}",
        width="fluid",
        blocks=[
            wr.TableOfContents(),
            wr.MarkdownBlock(text=markdown(comparison)),
            wr.H1("Curves"),
            wr.P(
                "A line is the mean of a setting's runs, its band their standard error, as W&B draws it: the intervals "
                "above are t intervals, and differences are paired by seed."
            ),
            wr.PanelGrid(runsets=[grouped], panels=lines(comparison, runs)),
            wr.H1("Reward against mismatch, and the settings"),
            wr.P("Each point and each line is one run: this set of runs is not grouped."),
            wr.PanelGrid(runsets=[runset("runs", place)], panels=relations(comparison, keys)),
            wr.H1("Runs beside each other"),
            wr.PanelGrid(
                runsets=[runset("runs", place)],
                panels=[wr.RunComparer(diff_only="split", layout=wr.Layout(w=24, h=12))],
            ),
        ],
    )


def lines(comparison: Comparison, runs: Sequence[Run]) -> list[Any]:
    """Line plots with bands of each metric that a run has."""
    titles = {comparison.metric: LINES.get(comparison.metric, comparison.metric), **LINES}
    there = [name for name in titles if any(name in run.columns for run in runs)]
    return [
        wr.LinePlot(
            title=titles[name], x=STEP, y=[name], title_x="step", groupby_aggfunc="mean", groupby_rangefunc="stderr",
            aggregate=True, ignore_outliers=False, smoothing_type="none", log_y=True if name == KL else None,
            max_runs_to_show=100, layout=wr.Layout(x=8 * (i % 3), y=6 * (i // 3), w=8, h=6),
        )
        for i, name in enumerate(there)
    ]  # fmt: skip


def relations(comparison: Comparison, keys: Sequence[str]) -> list[Any]:
    """Scatter, parallel coordinates and parameter importance."""
    score = wr.SummaryMetric(comparison.metric)
    columns = [*(wr.Config(key) for key in dict.fromkeys((*FLAT, *keys))), wr.SummaryMetric(KL), score]
    return [
        wr.ScatterPlot(title=f"{comparison.metric} against mismatch KL", x=wr.SummaryMetric(KL), y=score, log_x=True,
                       layout=wr.Layout(w=12, h=9)),
        wr.ParameterImportancePlot(with_respect_to=comparison.metric, layout=wr.Layout(x=12, w=12, h=9)),
        wr.ParallelCoordinatesPlot(title="Settings and score",
                                   columns=[wr.ParallelCoordinatesPlotColumn(metric=column) for column in columns],
                                   layout=wr.Layout(y=9, w=24, h=9)),
    ]  # fmt: skip


def spec_of(report: wr.Report) -> dict[str, Any]:
    """Everything that ``save`` would send, as data."""
    spec = json.loads(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    return {"title": report.title, "description": report.description, "project": report.project,
            "entity": report.entity, "spec": spec}  # fmt: skip


def address_of(report: wr.Report) -> str:
    """The report's address; what the package makes of a title with a slash in it leads nowhere."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", report.title).strip("-")
    return f"{report.url.split('/reports/')[0]}/reports/{slug}--{report.id}"


def save(comparison: Comparison, runs: Sequence[Run], place: Place, title: str, beside: Path) -> tuple[str, bool]:
    """Create the report, or update the one that ``beside`` remembers; its address, and whether it is new."""
    if not has_key(os.environ):
        raise ConfigError("saving a report needs a key: `wandb login`, or WANDB_API_KEY; --dry-run needs none")
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # it prints an address that leads nowhere
    try:
        entity = place.entity or str(wandb.Api(timeout=30).default_entity)
        report = build(comparison, runs, Place(place.project, entity, place.groups, place.ids), title)
        kept = read_object(beside / SAVED)
        same = (kept.get("entity"), kept.get("project")) == (entity, place.project)
        report.id = str(kept["id"]) if same and kept.get("id") else ""
        fresh = not report.id
        report.save()
        facts = {"id": report.id, "url": address_of(report), "entity": entity, "project": place.project}
    except (*CLIENT_ERRORS, requests.RequestException, AttributeError, KeyError) as error:
        raise TrimtabError(
            f"W&B did not take the report ({short(error)}); if it was deleted there, remove {beside / SAVED} to make a "
            "new one"
        ) from error
    write_text(beside / SAVED, json.dumps(facts, indent=1) + "\n")
    return str(facts["url"]), fresh
