"""The code that a sweep's runs use: a copied tree below its folder, untouched by what happens to the checkout.

code/src, code/conf …   what ``launch.snapshot`` names, without what git ignores
                        and the user's own modules from the current folder or PYTHONPATH, with those they import
                        from there: a job imports from code/src before anywhere else
code.diff               how the checkout differed from its commit
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trimtab.config.groups import CONF
from trimtab.errors import ConfigError
from trimtab.files import write_text

ROOT = CONF.parent
LEFT_OUT = ("__pycache__", ".git")
MOST = 200 * 2**20  # bytes of a user's package


def take(code: Path, names: Sequence[str], modules: Sequence[str]) -> dict[str, Any]:
    """Copy the tree to ``code``, whole or not at all; what ``Sweep.code`` says of it.

    ``modules``: names of modules that runs import beside trimtab. ConfigError for one that is too large to copy.
    """
    beside = code.with_name(f".{code.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name in listed(ROOT, names):
            _copy(ROOT, name, beside, names)
        copied = _copy_modules(modules, beside / "src")
        shutil.rmtree(code, ignore_errors=True)
        beside.replace(code)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    patch = _git("diff", "--binary", "HEAD", "--", *names)
    if patch:
        write_text(code.with_name("code.diff"), patch.encode(errors="replace").decode() + "\n")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if patch is None else bool(_git("status", "--porcelain", "--", *names)),
        "digest": digest(code, _walk(code)),
        "modules": sorted(copied),
        "cwd": os.getcwd(),
    }


def changed(code: Path, names: Sequence[str], modules: Sequence[str]) -> bool:
    """Whether the checkout now differs from the copy; ``modules``: the user's, which are not looked at."""
    own = {os.path.join("src", name) for module in modules for name in (module, f"{module}.py")}
    copied = [name for name in _walk(code) if os.path.join(*Path(name).parts[:2]) not in own]
    return digest(ROOT, listed(ROOT, names)) != digest(code, copied)


def listed(root: Path, names: Sequence[str]) -> list[str]:
    """The files (and links) below ``names``, relative to ``root``: those that git knows or does not ignore."""
    text = _git("ls-files", "-coz", "--exclude-standard", "--", *names, cwd=root)
    if not text:  # no checkout of git, or one that lies ignored in another
        found = [str(Path(name) / below) for name in names for below in _walk(root / name)]
    else:
        found = text.split("\0")
    return sorted(
        name
        for name in set(found)
        if name and os.path.lexists(root / name) and not set(Path(name).parts) & set(LEFT_OUT)
    )


def digest(root: Path, names: Sequence[str]) -> str:
    """One number for the contents and names of all files."""
    made = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        made.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return made.hexdigest()


def _walk(root: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        found += [os.path.relpath(Path(place) / name, root) for name in (*files, *links) if not name.endswith(".pyc")]
    return [""] if not found and root.is_file() else sorted(found)


def _copy(root: Path, name: str, into: Path, names: Sequence[str]) -> None:
    """A link that stays within the copied tree remains one, another becomes what it points at."""
    source, target = root / name, into / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        inside = source.resolve().is_relative_to(root.resolve()) and not os.path.isabs(os.readlink(source))
        if inside and source.resolve().relative_to(root.resolve()).parts[:1] in {Path(one).parts[:1] for one in names}:
            target.symlink_to(os.readlink(source))
            return
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


# -- the user's own modules ------------------------------------------------------------------------------------------


def _places() -> list[str]:
    """Where modules of the user's may lie: the current folder, then PYTHONPATH; not where trimtab itself is."""
    given = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    there = [os.path.abspath(place) for place in given]
    return [
        place for place in dict.fromkeys(there) if not os.path.isfile(os.path.join(place, "trimtab", "__init__.py"))
    ]


def _copy_modules(modules: Sequence[str], into: Path) -> set[str]:
    """Copy each module that lies in one of the places, and those that it imports from there."""
    done, waiting = set[str](), [module.partition(".")[0] for module in modules]
    while waiting:
        top = waiting.pop()
        source = None if top in done or top in sys.stdlib_module_names or top == "trimtab" else _source(top)
        if source is None:
            continue
        done.add(top)
        if (into / source.name).exists():
            raise ConfigError(f"{source} has the name of a part of trimtab; give it another")
        if source.is_dir():
            size = sum((source / name).stat().st_size for name in _walk(source))
            if size > MOST:
                raise ConfigError(f"{source} is too large to copy for the runs ({size / 2**20:.0f} MiB; allowed: "
                                  f"{MOST / 2**20:.0f}); keep its data elsewhere")  # fmt: skip
            shutil.copytree(source, into / source.name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        else:
            shutil.copy2(source, into / source.name)
        files = source.rglob("*.py") if source.is_dir() else [source]
        waiting += [name for file in files if file.suffix == ".py" for name in _imported(file)]
    return done


def _source(top: str) -> Path | None:
    """The file of a module, or the folder of a package."""
    found = PathFinder.find_spec(top, _places())
    if found is None:
        return None
    if found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations)))
    return Path(found.origin) if found.origin else None


def _imported(file: Path) -> Iterator[str]:
    try:
        parsed = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # the run will say so
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _git(*arguments: str, cwd: Path | None = None) -> str | None:
    """What a git command prints; None outside of a checkout, or without git."""
    try:
        done = subprocess.run(("git", *arguments), cwd=cwd or ROOT, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="surrogateescape").strip("\n") if done.returncode == 0 else None
