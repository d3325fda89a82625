"""The import rule and the rules of style, kept over the syntax trees of src and tests."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from trimtab.config import reference
from trimtab.config.keys import options

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
DOCS = ROOT / "docs"

# -- where a module stands -------------------------------------------------------------------------------------------

STDLIB = {"spec", "errors", "files"}
MATHS = {"correction", "objective", "method", "peers"}
DATA = STDLIB | {"batch", "stat", "protocol"}
PARTS = {"rollout", "policy", "task", "track"}
TOP = {"folder", "provenance", "summary", "launch", "report", "build", "experiment", "cli", "doctor", "replay"}
TOP |= {"sweep_command", "lab"}
MAY_IMPORT: dict[str, set[str]] = {
    "spec": {"spec", "errors"},
    "errors": set(),
    "files": set(),
    "batch": DATA,
    "stat": DATA,
    "protocol": DATA,
    "recording": DATA,
    "config": STDLIB | {"config"},
    "correction": DATA | {"correction"},
    "objective": DATA | {"objective"},
    "method": DATA | {"correction", "objective", "method"},
    "peers": DATA | MATHS,
    "truth": DATA | MATHS | {"truth", "track"},
    "rollout": DATA | {"recording", "rollout"},
    "policy": DATA | {"policy"},
    "task": DATA | {"task"},
    "track": DATA | {"track"},
    "train": DATA | MATHS | {"train"},
    "hydra_plugins": {"launch"},  # Hydra finds plugins in a package of this name only
    **{name: DATA | PARTS | TOP | MATHS | {"recording", "train", "truth"} for name in TOP},
}
KNOWS_CONFIG = {"config", "build", "experiment", "summary", "run", "cli", "truth", "replay", "launch", "lab"}
HYDRA = {"hydra", "omegaconf"}

# Third parties and the only places that import them; torch and numpy are free but for ``WITHOUT_TORCH``.
THIRD_PARTIES = {
    "hydra": {"config", "run", "launch/plugin"},
    "omegaconf": {"config", "run", "cli", "launch/plugin"},
    "submitit": {"launch/slurm"},
    "yaml": {"config", "experiment", "launch/frozen", "cli", "report/sources/folder", "track/identity", "track/sync"},
    "pyarrow": {"recording", "report/sources/lines"},
    "safetensors": {"train/checkpoint", "policy"},
    "transformers": {"policy", "rollout/transformers", "lab/parity/reference"},
    "tokenizers": {"policy/tiny"},
    "huggingface_hub": {"policy/load"},
    "vllm": {
        "rollout/vllm",
        "rollout/vllm_answers",
        "rollout/vllm_options",
        "rollout/vllm_process",
        "rollout/async_vllm",
        "rollout/async_vllm_process",
        "rollout/async_vllm_worker",
    },
    "reasoning_gym": {"task/reasoning_gym"},
    "datasets": {"task/hf"},
    "math_verify": {"task/match"},
    "wandb": {"track/wandb", "track/sync", "report/wandb_report", "report/sources/offline", "report/sources/project"},
    "google": {"report/sources/offline"},
    "wandb_workspaces": {"report/wandb_report"},
    "requests": {"track/sync", "report/wandb_report"},
    "tensorboard": {"track/tensorboard"},
    "trackio": {"track/trackio"},
    "rich": {"track/console"},
    "matplotlib": {"truth/plot", "report/png"},
}
WITHOUT_TORCH = {
    "spec",
    "errors",
    "files",
    "config",
    "folder",
    "provenance",
    "cli",
    "doctor",
    "launch",
    "task",
    "track",
    "recording",
}

# (file, rule): why it may break it.
EXCEPTIONS = {
    ("trimtab/task/reasoning_gym.py", "pickle"): "talks with its own child process over a pipe; nothing is stored",
    ("trimtab/task/custom.py", "pass-through"): "asks inspect.Signature.bind whether a user's function takes them",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def sources() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def place(path: Path) -> str:
    """``policy/load`` of src/trimtab/policy/load.py; ``run`` of src/run.py."""
    relative = path.relative_to(SRC).with_suffix("")
    parts = relative.parts[1:] if relative.parts[0] == "trimtab" else relative.parts
    return "/".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, wherever in the file it stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}" if node.module == "trimtab" else str(node.module)


def at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


# -- the import rule -------------------------------------------------------------------------------------------------


def test_layers() -> None:
    found = []
    for path in sources():
        home = place(path).split("/")[0]
        if home in ("", "run"):
            continue
        allowed = MAY_IMPORT[home] | ({"config"} if home in KNOWS_CONFIG else set())
        for line, name in imports(path):
            package, _, rest = name.partition(".")
            if package == "trimtab" and rest.split(".")[0] not in allowed:
                found.append(at(path, line, f"{home} imports {name}"))
    assert found == []


def test_the_loop_knows_no_concrete_engine_policy_task_or_tracker() -> None:
    found = [
        at(path, line, name)
        for path in sources()
        if place(path).startswith(("train", "correction", "objective"))
        for line, name in imports(path)
        if name.split(".")[:1] == ["trimtab"] and name.split(".")[1] in PARTS | {"build", "recording", "config"}
    ]
    assert found == []


def test_third_parties_are_imported_where_they_belong() -> None:
    found = []
    for path in sources():
        home = place(path)
        for line, name in imports(path):
            package = name.split(".")[0]
            if package in sys.stdlib_module_names or package in ("trimtab", "__future__"):
                continue
            if package in ("torch", "numpy"):
                if home.split("/")[0] in WITHOUT_TORCH:
                    found.append(at(path, line, f"{package} in a module that starts without it"))
            elif package not in THIRD_PARTIES:
                found.append(at(path, line, f"{package} has no home; name one in THIRD_PARTIES"))
            elif not {home, home.split("/")[0]} & THIRD_PARTIES[package]:
                found.append(at(path, line, f"{package} belongs in {', '.join(sorted(THIRD_PARTIES[package]))}"))
    assert found == []


def test_spec_and_errors_are_of_the_standard_library() -> None:
    names = {n for path in sources() if place(path).split("/")[0] in STDLIB for _, n in imports(path)}
    assert {n for n in names if n.split(".")[0] not in sys.stdlib_module_names} <= {
        n for n in names if n.startswith(("trimtab.spec", "trimtab.errors"))
    }


def test_only_the_edges_know_hydra() -> None:
    found = [
        at(path, line, name)
        for path in sources()
        for line, name in imports(path)
        if (name.split(".")[0] in HYDRA or name.startswith("trimtab.config"))
        and place(path).split("/")[0] not in KNOWS_CONFIG
    ]
    assert found == []


def module_file(name: str) -> Path | None:
    base = SRC / Path(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def reached(start: Path) -> dict[Path, Path]:
    """Files of src that importing ``start`` loads, each with the one that imports it; top-level imports only."""
    found, todo = {start: start}, [start]
    while todo:
        path = todo.pop()
        for node in tree(path).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 2)}
            for file in filter(None, map(module_file, sorted(parents))):
                if file not in found:
                    found[file] = path
                    todo.append(file)
    return found


@pytest.mark.parametrize("start", [*sorted((SRC / "trimtab" / "config").glob("*.py")), SRC / "trimtab" / "cli.py",
                                   SRC / "run.py"], ids=place)  # fmt: skip
def test_composing_and_the_commands_never_reach_torch(start: Path) -> None:
    heavy = {"torch", "transformers", "vllm", "numpy", "pyarrow", "wandb"}
    found = []
    for path in reached(start):
        top = [n for n in tree(path).body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
        names |= {str(n.module) for n in top if isinstance(n, ast.ImportFrom)}
        found += [at(path, 1, name) for name in names if name.split(".")[0] in heavy]
    assert found == []


# -- style -----------------------------------------------------------------------------------------------------------


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_are_at_most_400_lines_and_functions_60() -> None:
    found = []
    for path in sources():
        lines = len(path.read_text().splitlines())
        limit = 40 if place(path).startswith(("correction", "objective")) else 60
        if lines > (60 if place(path) == "run" else 400):
            found.append(at(path, 1, f"{lines} lines"))
        for node in functions(path):
            length = int(node.end_lineno or 0) - node.lineno + 1
            if length > limit:
                found.append(at(path, node.lineno, f"{node.name} has {length} lines, allowed are {limit}"))
    assert found == []


def test_every_module_says_what_it_is() -> None:
    written = [path for path in sources() if tree(path).body]  # an empty __init__.py has nothing to say
    assert [at(path, 1, "no docstring") for path in written if not ast.get_docstring(tree(path))] == []


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    """Calls of a plain or dotted name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


def guesses(path: Path) -> Iterator[tuple[int, str]]:
    """getattr with a default, hasattr."""
    yield from ((n.lineno, "getattr with a default") for n in calls(path, "getattr") if len(n.args) > 2)
    yield from ((n.lineno, "hasattr") for n in calls(path, "hasattr"))


def pass_through(path: Path) -> Iterator[tuple[int, str]]:
    """A function's own **options handed on to a call."""
    for function in functions(path):
        given = function.args.kwarg
        for node in ast.walk(function) if given else ():
            if isinstance(node, ast.Call):
                on = [k.value.id for k in node.keywords if k.arg is None and isinstance(k.value, ast.Name)]
                if given is not None and given.arg in on:
                    yield node.lineno, f"**{given.arg} handed on"


def broad(path: Path) -> Iterator[tuple[int, str]]:
    """except without a name, or of everything."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = [] if node.type is None else [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)]
            if not caught and not isinstance(node.type, ast.Attribute | ast.Tuple):
                yield node.lineno, "bare except"
            if {"Exception", "BaseException"} & set(caught):
                yield node.lineno, "broad except"


def pickles(path: Path) -> Iterator[tuple[int, str]]:
    """Whatever runs code when it reads data."""
    for line, name in imports(path):
        if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"):
            yield line, name
    for node in calls(path, "torch.load"):
        if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords):
            yield node.lineno, "torch.load without weights_only=True"
    for node in ast.walk(tree(path)):
        risky = isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code")
        if isinstance(node, ast.keyword) and risky and ast.unparse(node.value) != "False":
            yield node.value.lineno, f"{node.arg}={ast.unparse(node.value)}"


def programs(path: Path) -> Iterator[tuple[int, str]]:
    """Text that is run as a program."""
    yield from ((n.lineno, ast.unparse(n.func)) for n in calls(path, "eval", "exec", "os.system", "os.popen"))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "shell=True"


RULES: dict[str, Callable[[Path], Iterator[tuple[int, str]]]] = {
    "guess": guesses, "pass-through": pass_through, "except": broad, "pickle": pickles, "program": programs,
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule_of_style(rule: str) -> None:
    found = {path: list(RULES[rule](path)) for path in sources()}
    excepted = {SRC / file for file, name in EXCEPTIONS if name == rule}
    assert [at(p, *place) for p, places in found.items() if p not in excepted for place in places] == []
    assert all(found[path] for path in excepted), "an exception that is no longer needed"


def test_the_rules_of_style_find_what_they_forbid(tmp_path: Path) -> None:
    bad = {
        "guess": ["getattr(a, 'b', 1)", "hasattr(a, 'b')"],
        "pass-through": ["def f(**k):\n    g(1, **k)"],
        "except": ["try:\n    f()\nexcept:\n    g()", "try:\n    f()\nexcept (OSError, Exception):\n    g()"],
        "pickle": ["import pickle", "torch.load(f)", "torch.load(f, weights_only=False)", "f(trust_remote_code=True)"],
        "program": ["eval(a)", "exec(a)", "subprocess.run(a, shell=True)"],
    }
    good = "getattr(a, 'b')\nf(**{'a': 1})\nmodel.eval()\ntorch.load(f, weights_only=True)\n"
    for rule, texts in bad.items():
        for i, text in enumerate([*texts, good]):
            path = tmp_path / f"{rule}{i}.py"
            path.write_text(text)
            assert bool(list(RULES[rule](path))) is (text != good), (rule, text)


ACCEPTS = {"check"}  # trimtab.config.check raises for what it refuses: calling it asserts that it doesn't


def asserts(node: ast.AST, helpers: set[str]) -> bool:
    """Whether the code asserts, expects an error, or calls something that does."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assert):
            return True
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func)
            if name in ("pytest.raises", "pytest.warns", "pytest.fail") or name.split(".")[-1].startswith("assert_"):
                return True
            if name in helpers | ACCEPTS:
                return True
    return False


def test_every_test_asserts_something() -> None:
    found = []
    for path in files_of_tests():
        helpers = {node.name for node in functions(path) if not node.name.startswith("test_") and asserts(node, set())}
        found += [
            at(path, node.lineno, node.name)
            for node in functions(path)
            if node.name.startswith("test_") and not asserts(node, helpers)
        ]
    assert found == []


# -- docs ------------------------------------------------------------------------------------------------------------


def test_the_page_of_options_is_the_one_made_from_the_schema() -> None:
    page = (DOCS / "options.md").read_text()
    assert page == reference.page(), "run: python -m trimtab.config.reference > docs/options.md"
    assert [key for key in options() if f"`{key}`" not in page] == []
