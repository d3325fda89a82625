"""``trimtab report``: the spec as data, and saved with the real client against a double of the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import Arm, write_sweep
from wandb_child import child
from wandb_server import WandbServer

pytest.importorskip("wandb_workspaces")

from trimtab import cli

ARMS = {
    "standard": Arm({"algo.name": "standard"}),
    "hostile": Arm({"algo.name": "decoupled", "mis.tis_level": "sequence"}, effect=0.2, failed=(2,)),
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Six runs, two settings, one failed."""
    folder = tmp_path / "bounds<b>"
    write_sweep(folder, ARMS)
    return folder


def grids(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]


def panels(grid: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(panel["viewType"], panel["config"]) for panel in grid["panelBankSectionConfig"]["panels"]]


def test_a_dry_run_writes_the_spec_without_server_or_key(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert cli.main(["report", str(sweep), "--dry-run"]) == 0
    written = sweep / "comparison" / "report.json"
    assert f"written to {written}" in capsys.readouterr().out
    found = json.loads(written.read_text())
    assert (found["project"], found["title"]) == ("trimtab", "bounds<b>: comparison by eval/reward")
    (text,) = [block["content"] for block in found["spec"]["blocks"] if block["type"] == "markdown-block"]
    assert "better" in text and "Problems" in text and "paired t test" in text

    curves, relations, runs = grids(found["spec"])
    for grid in (curves, relations, runs):
        (runset,) = grid["runSets"]
        (only,) = runset["filters"]["filters"]
        assert (only["key"]["name"], only["op"], only["value"]) == ("group", "IN", ["bounds<b>"])
        assert runset["search"]["query"] == "" and "project" not in runset
    assert [key["name"] for key in curves["runSets"][0]["grouping"]] == ["algo.value"]
    assert relations["runSets"][0]["grouping"] == [] == runs["runSets"][0]["grouping"]
    first = panels(curves)[0]
    assert first[0] == "Run History Line Plot"
    wanted = {"xAxis": "train/step", "metrics": ["eval/reward"], "groupAgg": "mean", "groupArea": "stderr"}
    assert wanted.items() <= first[1].items()
    drawn = [config["metrics"][0] for _, config in panels(curves)]
    assert {"train/reward", "train/mis_k3_kl", "train/mis_ess", "train/entropy", "train/grad_norm"} <= set(drawn)
    kinds = dict(panels(relations))
    assert kinds["Scatter Plot"]["xAxis"] == "summary:train/mis_k3_kl"
    assert kinds["Scatter Plot"]["yAxis"] == "summary:eval/reward"
    columns = [column["accessor"] for column in kinds["Parallel Coordinates Plot"]["columns"]]
    assert columns[:5] == [f"config:{key}.value" for key in ("algo", "tis_mode", "level", "rs", "veto")]
    assert columns[-1] == "summary:eval/reward"
    assert kinds["Parameter Importance"]["targetKey"] == "eval/reward"
    assert [kind for kind, _ in panels(runs)] == ["Run Comparer"]


def test_settings_without_a_flat_key_are_grouped_by_their_own(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", {"a": Arm({"optim.lr": 1e-3}), "b": Arm({"optim.lr": 1e-4})})
    assert cli.main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "x" / "spec.json")]) == 0
    spec = json.loads((tmp_path / "x" / "spec.json").read_text())["spec"]
    (key,) = grids(spec)[0]["runSets"][0]["grouping"]
    assert (key["section"], key["name"]) == ("config", "optim.value.lr")


def test_runs_outside_of_a_sweep_are_named_by_their_ids(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", ARMS, manifest=False)
    assert cli.main(["report", str(tmp_path / "s"), "--by", "level"]) == 0
    spec = json.loads((tmp_path / "s" / "comparison" / "report.json").read_text())["spec"]
    (only,) = grids(spec)[0]["runSets"][0]["filters"]["filters"]
    assert only["op"] == "IN" and len(only["value"]) == 6 and only["key"]["name"] == "name"


def test_saving_without_a_key_is_refused(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert cli.main(["report", str(sweep), "--save"]) == 1
    assert "wandb login" in capsys.readouterr().err and not (sweep / "wandb_report.json").exists()


@pytest.mark.slow
def test_a_report_is_saved_updated_and_read_back(sweep: Path, tmp_path: Path) -> None:
    code = f"""
        from trimtab import cli
        raise SystemExit(cli.main(["report", {str(sweep)!r}, "--save", *sys.argv[1:]]))
    """
    read = f"""
        import wandb_workspaces.reports.v2 as wr
        url = json.loads(Path({str(sweep / "wandb_report.json")!r}).read_text())["url"]
        report = wr.Report.from_url(url)
        print(json.dumps([report.title, [type(block).__name__ for block in report.blocks]]))
    """
    with WandbServer() as server:
        first = child(code, tmp_path, **server.env)
        assert first.returncode == 0 and first.stdout.startswith(f"created {server.url}/team/trimtab/reports/")
        kept = json.loads((sweep / "wandb_report.json").read_text())
        second = child(code, tmp_path, **server.env)
        assert second.returncode == 0 and second.stdout.startswith(f"updated {kept['url']}"), second.stderr
        assert json.loads((sweep / "wandb_report.json").read_text()) == kept and list(server.reports) == [kept["id"]]
        back = child(read, tmp_path, **server.env)
        assert back.returncode == 0, back.stderr
        title, blocks = json.loads(back.stdout.splitlines()[-1])
        assert title == "bounds<b>: comparison by eval/reward"
        assert blocks.count("PanelGrid") == 3 and "MarkdownBlock" in blocks
        server.fail["upsertView"] = [403] * 50
        refused = child(code, tmp_path, **server.env)
        assert refused.returncode == 1 and "W&B did not take the report" in refused.stderr
        assert "Traceback" not in refused.stderr and server.unknown == []
