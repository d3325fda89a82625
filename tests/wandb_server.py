"""A double of the W&B server for the real client: keeps in memory what the client sends, and fails on request.

    with WandbServer() as server:
        child(code, **server.env)
        server.rows("a-run-id")          # history, in the order of its lines
        server.run("a-run-id").config    # unwrapped
        server.reports                   # by id

It knows the operations that trimtab's use of the client needs (GraphQL by operation name, and the file stream); any
other is answered with an error and noted in ``unknown``, which a test holds to be empty.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "team"
Reply = dict[str, Any]


@dataclass
class ServedRun:
    """One run as the server has it."""

    project: str
    name: str
    raw_config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    group: str | None = None
    display_name: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    state: str = "running"
    upserts: int = 0
    preempting: bool = False

    @property
    def id(self) -> str:
        return f"run:{self.project}:{self.name}"

    @property
    def config(self) -> dict[str, Any]:
        return {key: entry["value"] for key, entry in self.raw_config.items() if key != "_wandb"}

    @property
    def rows(self) -> list[dict[str, Any]]:
        history = self.lines.get("wandb-history.jsonl", {})
        # the client writes NaN as it is, the server gives it back as text
        return [json.loads(history[number], parse_constant=str) for number in sorted(history)]

    def count(self, file: str) -> int:
        return len(self.lines.get(file, {}))

    def tail(self, file: str) -> str:
        lines = self.lines.get(file, {})
        return json.dumps([lines[max(lines)]] if lines else [])


class Quiet(ThreadingHTTPServer):
    """Says nothing of a client that was killed in the middle of a request."""

    def handle_error(self, *_: object) -> None:
        pass


class WandbServer:
    """Listens on a free port of this machine. ``fail``: operation (also ``file_stream``, ``*``) to statuses."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], ServedRun] = {}
        self.reports: dict[str, Reply] = {}
        self.projects: list[str] = []
        self.asked: list[str] = []
        self.unknown: list[str] = []
        self.fail: dict[str, list[int]] = {}
        self.lag = 0  # rows at the end that are there and can't be read back yet
        self._lock = threading.RLock()
        self._http = Quiet(("127.0.0.1", 0), handler_for(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away: connections are refused from now on."""
        self._http.shutdown()
        self._http.server_close()

    @property
    def env(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online",
                "WANDB_ERROR_REPORTING": "false", "NO_PROXY": "127.0.0.1"}  # fmt: skip

    # -- what a test reads -------------------------------------------------------------------------------------------

    def run(self, name: str) -> ServedRun:
        (found,) = [run for run in self.runs.values() if run.name == name]
        return found

    def rows(self, name: str, *keys: str) -> list[Any]:
        """The history; with ``keys`` only their values, one key: bare."""
        rows = self.run(name).rows
        if not keys:
            return rows
        return [row[keys[0]] if len(keys) == 1 else tuple(row.get(key) for key in keys) for row in rows]

    # -- requests ----------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """(status, reply) of one request."""
        if path == "/graphql":
            request = json.loads(body)
            named = re.search(r"\b(?:query|mutation)\s+(\w+)", request["query"])
            operation = named.group(1) if named else "nameless"
            variables = request.get("variables") or {}
            return self._reply(operation, lambda reply: reply(variables), OPERATIONS.get(operation))
        stream = re.fullmatch(r"/files/[^/]+/([^/]+)/([^/]+)/file_stream", path)
        if stream:
            sent = json.loads(body)
            return self._reply("file_stream", lambda _: self._stream(*stream.groups(), sent), None, bare=True)
        return 200, {}

    def _reply(self, operation: str, call: Callable[[Any], Any], known: Any, *, bare: bool = False) -> tuple[int, Any]:
        with self._lock:
            self.asked.append(operation)
            for name in (operation, "*"):
                if self.fail.get(name):
                    return self.fail[name].pop(0), {"errors": [{"message": "told to fail"}]}
            if bare:
                return 200, call(None)
            if known is None:
                self.unknown.append(operation)
                return 200, {"errors": [{"message": f"no such operation here: {operation}"}], "data": None}
            return 200, {"data": call(lambda variables: known(self, variables))}

    def _stream(self, project: str, name: str, sent: Reply) -> Reply:
        run = self._run(project, name)
        for file, part in (sent.get("files") or {}).items():
            for number, line in enumerate(part["content"], start=part["offset"]):
                run.lines.setdefault(file, {})[number] = line
            if file == "wandb-summary.json" and part["content"]:
                run.summary = json.loads(part["content"][-1])
        if sent.get("preempting"):
            run.state, run.preempting = "preempting", True
        if sent.get("complete") and not run.preempting:
            run.state = "failed" if sent.get("exitcode") else "finished"
        return {"exitcode": None, "limits": {}}

    def _run(self, project: str, name: str) -> ServedRun:
        if project not in self.projects:
            self.projects.append(project)
        return self.runs.setdefault((project, name), ServedRun(project, name))

    # -- operations: runs --------------------------------------------------------------------------------------------

    def viewer(self, _: Reply) -> Reply:
        return {"viewer": {"id": "me", "entity": ENTITY, "username": "me", "name": "me", "email": "me@localhost",
                           "admin": False, "flags": "{}", "deletedAt": None, "apiKeys": {"edges": []},
                           "teams": {"edges": [{"node": {"name": ENTITY}}]}}}  # fmt: skip

    def resume_status(self, given: Reply) -> Reply:
        run = self.runs.get((given["project"], given["name"]))
        if run is None:
            return {"model": None}
        run.preempting = False
        bucket = {
            "id": run.id, "name": run.name, "displayName": run.display_name, "tags": run.tags,
            "summaryMetrics": json.dumps(run.summary), "config": json.dumps(run.raw_config),
            "historyLineCount": run.count("wandb-history.jsonl"), "historyTail": run.tail("wandb-history.jsonl"),
            "eventsLineCount": run.count("wandb-events.jsonl"), "eventsTail": run.tail("wandb-events.jsonl"),
            "logLineCount": run.count("output.log"), "wandbConfig": '{"t": 1}',
        }  # fmt: skip
        return {"model": {"id": "p", "name": run.project, "entity": {"id": "e", "name": ENTITY}, "bucket": bucket}}

    def upsert_run(self, given: Reply) -> Reply:
        if given.get("name"):
            fresh = (given.get("project"), given["name"]) not in self.runs
            run = self._run(given.get("project") or "uncategorized", given["name"])
        else:
            fresh, run = False, next(run for run in self.runs.values() if run.id == given["id"])
        run.upserts += 1
        run.raw_config |= json.loads(given.get("config") or "{}")
        if given.get("summaryMetrics"):
            run.summary = json.loads(given["summaryMetrics"])
        run.group, run.job_type = given.get("groupName") or run.group, given.get("jobType") or run.job_type
        run.display_name, run.tags = given.get("displayName") or run.display_name, given.get("tags") or run.tags
        run.state = given.get("state") or ("preempting" if run.preempting else "running")
        project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": ENTITY}}
        bucket = {"id": run.id, "name": run.name, "displayName": run.display_name, "description": None,
                  "config": json.dumps(run.raw_config), "sweepName": None, "project": project,
                  "historyLineCount": run.count("wandb-history.jsonl")}  # fmt: skip
        return {"upsertBucket": {"bucket": bucket, "inserted": fresh}}

    def run_files(self, given: Reply) -> Reply:
        files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in given.get("files") or []]
        return {"createRunFiles": {"runID": given.get("run"), "uploadHeaders": [], "files": files}}

    # -- operations: reading runs back -------------------------------------------------------------------------------

    def _node(self, run: ServedRun) -> Reply:
        last = run.rows[-1]["_step"] if run.rows else -1
        return {
            "id": run.id, "projectId": "1", "name": run.name, "displayName": run.display_name, "tags": run.tags,
            "state": run.state, "config": json.dumps(run.raw_config), "summaryMetrics": json.dumps(run.summary),
            "group": run.group, "jobType": run.job_type, "sweepName": None, "commit": None, "readOnly": False,
            "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00", "description": None,
            "notes": None, "systemMetrics": "{}", "historyLineCount": run.count("wandb-history.jsonl"),
            "user": {"name": "me", "username": "me"},
            "historyKeys": {"sets": [], "keys": {}, "lastStep": last},
        }  # fmt: skip

    def one_run(self, given: Reply) -> Reply:
        run = self.runs.get((given["project"], given["name"]))
        return {"project": {"run": None if run is None else self._node(run)}}

    def some_runs(self, given: Reply) -> Reply:
        wanted = json.loads(given.get("filters") or "{}")
        found = [
            run
            for run in self.runs.values()
            if run.project == given["project"] and all({"group": run.group}.get(k) == v for k, v in wanted.items())
        ]
        edges = [{"node": self._node(run), "cursor": str(i)} for i, run in enumerate(found)]
        page = {"endCursor": None, "hasNextPage": False}
        return {"project": {"internalId": "1", "runCount": len(found), "readOnly": False,
                            "runs": {"edges": edges, "pageInfo": page}}}  # fmt: skip

    def history_keys(self, given: Reply) -> Reply:
        run = self.runs[given["project"], given["name"]]
        return {"project": {"run": {"historyKeys": self._node(run)["historyKeys"]}}}

    def readable(self, name: str) -> list[Any]:
        rows = self.rows(name)
        return rows[: len(rows) - self.lag]

    def live_history(self, given: Reply) -> Reply:
        live = self.readable(given["runName"])
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": live}}}}

    def sampled_history(self, given: Reply) -> Reply:
        keys = json.loads(given["spec"]).get("keys") or []
        rows = [row for row in self.readable(given["run"]) if all(key in row for key in keys)]
        return {"project": {"run": {"sampledHistory": [rows]}}}

    def history_page(self, given: Reply) -> Reply:
        rows = [row for row in self.readable(given["run"]) if given["minStep"] <= row["_step"] < given["maxStep"]]
        return {"project": {"run": {"history": [json.dumps(row) for row in rows]}}}

    # -- operations: reports -----------------------------------------------------------------------------------------

    def _project(self, name: str) -> Reply:
        return {"__typename": "Project", "id": f"project:{name}", "internalId": f"internal:{name}", "name": name,
                "entityName": ENTITY, "createdAt": "2026-01-01T00:00:00", "isBenchmark": False, "user": None,
                "entity": {"id": "e", "name": ENTITY}}  # fmt: skip

    def some_projects(self, _: Reply) -> Reply:
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"models": {"pageInfo": page, "edges": [{"node": self._project(name)} for name in self.projects]}}

    def create_project(self, given: Reply) -> Reply:
        name = given["input"]["name"]
        fresh = name not in self.projects
        self.projects += [name] if fresh else []
        project = {**self._project(name), "description": "", "access": "ENTITY_READ", "views": None}
        return {"result": {"project": project, "model": project, "inserted": fresh}}

    def one_project(self, given: Reply) -> Reply:
        name = given["projectName"]
        return {"project": self._project(name) if name in self.projects else None}

    def upsert_report(self, given: Reply) -> Reply:
        id = given.get("id") or f"Vmlldzo{next(NUMBERS)}"
        fresh = id not in self.reports
        self.reports[id] = {
            "id": id, "type": given["type"], "name": given["name"], "displayName": given["displayName"],
            "description": given["description"], "spec": given["spec"], "createdAt": "2026-01-01T00:00:00",
            "updatedAt": "2026-01-01T00:00:00",
            "project": {"id": "p", "name": given["projectName"], "entityName": given["entityName"]},
        }  # fmt: skip
        return {"upsertView": {"view": self.reports[id], "inserted": fresh}}

    def one_report(self, given: Reply) -> Reply:
        return {"view": self.reports.get(given["reportId"])}


NUMBERS = itertools.count(1)
OPERATIONS: dict[str, Callable[[WandbServer, Reply], Reply]] = {
    "Viewer": WandbServer.viewer,
    "GetDefaultEntity": WandbServer.viewer,
    "ServerFeaturesQuery": lambda _, __: {"serverInfo": {"features": []}},
    "OrganizationCoreWeaveOrganizationID": lambda _, __: {
        "entity": {"organization": {"coreWeaveOrganizationId": None}}
    },
    "RunResumeStatus": WandbServer.resume_status,
    "UpsertBucket": WandbServer.upsert_run,
    "CreateRunFiles": WandbServer.run_files,
    "Run": WandbServer.one_run,
    "Runs": WandbServer.some_runs,
    "RunHistoryKeys": WandbServer.history_keys,
    "RunParquetHistory": WandbServer.live_history,
    "SampledHistoryPage": WandbServer.sampled_history,
    "HistoryPage": WandbServer.history_page,
    "GetProjects": WandbServer.some_projects,
    "CreateProject": WandbServer.create_project,
    "ProjectInternalId": WandbServer.one_project,
    "upsertView": WandbServer.upsert_report,
    "SpecificReport": WandbServer.one_report,
}


def handler_for(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    """HTTP around ``server.answer``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _serve(self) -> None:
            status, reply = server.answer(self.path.split("?")[0], self._body())
            text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _body(self) -> bytes:
            body = b""
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            match self.headers.get("Content-Encoding", ""):
                case "gzip":
                    return gzip.decompress(body)
                case "deflate":
                    return zlib.decompress(body)
            return body

        do_GET = do_POST = do_PUT = _serve

    return Handler
