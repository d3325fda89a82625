"""Run golden cases of eight systems through trimtab's public functions: ``python tests/goldens/replay.py DIR``.

DIR holds ``<system>/<case>.json``, or packed ``<system>.json.gz``. Each number of a case's outputs (weights, masks,
losses, gradients, every metric) is compared at a relative 1e-9 in float64 and 2e-5 in float32. One line for each
failure; the last line counts. In a case that an entry of docs/differences.md covers, trimtab must give the value that
the entry claims to be right. A number that is a difference of larger ones (a loss, a KL, a chi-squared, a difference of
log perplexities) may in addition be off by four roundings of a number of size 1; no other number may.

A case may hold a refusal (``error``). It passes if trimtab refuses, too: by a check of ``trimtab.peers`` or of its
configuration, never by an adapter that has no translation, which always fails. Exception classes and sentences are each
system's own and can't be equal; but trimtab's must name an option that the case's message names or, where that names
none, one of its config. The refusal is printed with its reason.

What was not compared is counted before the last line: what trimtab says and the case has not, and what the case leaves
null. (A number of the case of which trimtab says nothing is a failure.)

``python tests/goldens/replay.py --pack DIR`` writes DIR's cases beside this file, one compressed file a system.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from adapt.compare import Fault, faults, left_out, unlike
from adapt.differences import DIFFERENCES
from adapt.refusal import same_option
from adapt.shared import Case, Said, Untranslated

from trimtab.config import check as check_config
from trimtab.errors import TrimtabError
from trimtab.spec import RunSpec

HERE = Path(__file__).parent
PACKED = ".json.gz"
BROKEN = (LookupError, TypeError, ValueError, RuntimeError, AssertionError, ImportError, AttributeError)


@dataclass(frozen=True)
class Outcome:
    """``faults`` that no difference explains; ``anchors`` of those that explained some; ``refusal``: trimtab's, shared.

    ``left_out``: names of what was not compared.
    """

    case: Case
    faults: tuple[str, ...]
    anchors: tuple[str, ...] = ()
    refusal: str = ""
    left_out: tuple[str, ...] = ()


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
    except Untranslated as error:
        return Outcome(case, (f"no translation: {error}",))
    except TrimtabError as error:
        return _refusal(case, str(error).splitlines()[0])
    except BROKEN as error:  # one case that no adapter knows must not end the others
        return Outcome(case, (f"cannot be run: {type(error).__name__}: {error}",))
    found = [Fault(("error",), "trimtab computes what its system refuses")] if refused else faults(case, said)
    outcome = _explained(case, said, found) if found else Outcome(case, ())
    return replace(outcome, left_out=left_out(case, said))


def _refusal(case: Case, reason: str) -> Outcome:
    if "error" not in case.outputs:
        return Outcome(case, (f"trimtab refuses: {reason}",))
    if not same_option(case, reason):
        return Outcome(case, (f"error: trimtab refuses another option than its system: {reason}",))
    return Outcome(case, (), refusal=reason)


def _said(case: Case) -> list[Said]:
    """Where the system refused, trimtab's rules of configuration have their say, too."""
    system = importlib.import_module(f"adapt.{case.system}")
    said: list[Said] = system.said(case)
    method = system.method(case) if "error" in case.outputs else None
    if method is not None:
        check_config(RunSpec(algo=method.algo, mis=method.mis, loss=method.loss))
    return said


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
        loose = [fault for fault in found if fault.path in one.loose(case) and fault.size <= one.within(case)]
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
    left: dict[str, int] = {}
    for case in cases(Path(arguments[0])):
        outcome = replay(case)
        for fault in outcome.faults:
            print(f"{case.name}: {fault}")
        for anchor in outcome.anchors:
            print(f"{case.name}: differs (docs/differences.md#{anchor})")
        if outcome.refusal:
            print(f"{case.name}: refused by both: {outcome.refusal}")
        for name in outcome.left_out:
            left[name] = left.get(name, 0) + 1
        passed, failed = passed + (not outcome.faults), failed + bool(outcome.faults)
        differing += bool(outcome.anchors)
    if left:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(left.items()))
        print(f"not compared: {names}")
    print(f"{passed} passed, {failed} failed, {differing} of the passed differ as documented")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
