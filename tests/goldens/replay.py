"""Run golden cases of eight systems through trimtab's public functions: ``python tests/goldens/replay.py DIR``.

DIR holds ``<system>/<case>.json``, or packed ``<system>.json.gz``. Each number of a case's outputs (weights, masks,
losses, gradients, every metric) is compared at a relative 1e-9 in float64 and 2e-5 in float32. One line for each
failure; the last line counts. In a case that an entry of docs/differences.md covers, trimtab must give the value that
the entry claims to be right.

``python tests/goldens/replay.py --pack DIR`` writes DIR's cases beside this file, one compressed file a system.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from adapt.compare import Fault, faults, unlike
from adapt.differences import DIFFERENCES
from adapt.shared import Case, Said

from trimtab.config import check as check_config
from trimtab.errors import TrimtabError
from trimtab.spec import RunSpec

HERE = Path(__file__).parent
PACKED = ".json.gz"
BROKEN = (LookupError, TypeError, ValueError, RuntimeError, AssertionError, ImportError, AttributeError)


@dataclass(frozen=True)
class Outcome:
    """``faults`` that no difference explains; ``anchors`` of those that explained some."""

    case: Case
    faults: tuple[str, ...]
    anchors: tuple[str, ...] = ()


def cases(where: Path) -> Iterator[Case]:
    """All cases of a folder, or of one file."""
    for path in sorted(where.rglob("*.json")) + sorted(where.rglob(f"*{PACKED}")) if where.is_dir() else [where]:
        if path.name.endswith(PACKED):
            yield from (Case(data) for data in json.loads(gzip.decompress(path.read_bytes()))["cases"])
        elif "outputs" in (data := json.loads(path.read_text())):
            yield Case(data)


def replay(case: Case) -> Outcome:
    """What trimtab says of a case, held against what its system said."""
    refused = "error" in case.outputs
    try:
        said = _said(case)
    except TrimtabError as error:
        return Outcome(case, () if refused else (f"trimtab refuses: {str(error).splitlines()[0]}",))
    except BROKEN as error:  # one case that no adapter knows must not end the others
        return Outcome(case, (f"cannot be run: {type(error).__name__}: {error}",))
    found = [Fault(("error",), "trimtab computes what its system refuses")] if refused else faults(case, said)
    return _explained(case, said, found) if found else Outcome(case, ())


def _said(case: Case) -> list[Said]:
    """Where the system refused, trimtab's rules of configuration have their say, too."""
    system = importlib.import_module(f"adapt.{case.system}")
    method = system.method(case)
    if "error" in case.outputs and method is not None:
        check_config(RunSpec(algo=method.algo, mis=method.mis, loss=method.loss))
    return system.said(case)


def _explained(case: Case, said: Sequence[Said], found: Sequence[Fault]) -> Outcome:
    """First the differences' own right values stand in for the system's, then what may be loose is."""
    ours = [one for one in DIFFERENCES if one.applies(case)]
    right = {one.anchor: one.right(case) for one in ours}
    instead = {path: value for values in right.values() for path, value in values.items()}
    anchors = [anchor for anchor, values in right.items() if values]
    if instead:
        theirs = {path: value for one in ours for path, value in one.theirs(case).items()}
        found = [*faults(case, said, instead), *unlike(case, theirs)]
    for one in ours:
        loose = [fault for fault in found if fault.path in one.loose(case) and fault.size <= one.within]
        anchors += [one.anchor] if loose else []
        found = [fault for fault in found if fault not in loose]
    return Outcome(case, tuple(map(str, found)), () if found else tuple(anchors))


def packed(found: Iterable[Case]) -> dict[str, bytes]:
    """One compressed file a system; the same bytes for the same cases: no time stamp, keys in order."""
    systems: dict[str, list[Case]] = {}
    for case in found:
        systems.setdefault(case.system, []).append(case)
    texts = {
        system: json.dumps({"cases": [dict(case.data) for case in ours]}, separators=(",", ":"), sort_keys=True)
        for system, ours in systems.items()
    }
    return {f"{system}{PACKED}": gzip.compress(text.encode(), 9, mtime=0) for system, text in texts.items()}


def main(arguments: Sequence[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--pack":
        for name, content in packed(cases(Path(arguments[1]))).items():
            (HERE / name).write_bytes(content)
        return 0
    if len(arguments) != 1 or not Path(arguments[0]).exists():
        print(__doc__, file=sys.stderr)
        return 2
    passed = failed = differing = 0
    for case in cases(Path(arguments[0])):
        outcome = replay(case)
        for fault in outcome.faults:
            print(f"{case.name}: {fault}")
        for anchor in outcome.anchors:
            print(f"{case.name}: differs (docs/differences.md#{anchor})")
        passed, failed = passed + (not outcome.faults), failed + bool(outcome.faults)
        differing += bool(outcome.anchors)
    print(f"{passed} passed, {failed} failed, {differing} of the passed differ as documented")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
