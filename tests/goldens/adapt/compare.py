"""Hold what trimtab says against a case's outputs, number by number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from adapt.shared import Case, Said, flat
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
ROUNDINGS = 4
"""So many roundings of a number of size 1 are allowed to numbers that cancel, where a relative error means nothing."""

CANCELS = re.compile(r"loss|kl|chi2|log_ppl_diff|log_ppl_abs_diff")
"""Names of differences of larger numbers: a loss, a KL, a chi-squared, a difference of log perplexities."""

Path = tuple[str, ...]
NO_NUMBERS = ("error", "message_contains")


@dataclass(frozen=True)
class Fault:
    """One entry that differs; ``size``: its largest relative error (of a sum: relative to its terms), inf if it is not
    of one shape, or missing."""

    path: Path
    text: str
    size: float = float("inf")

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.text}"


def entries(outputs: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All entries of a case's outputs."""
    for key, value in outputs.items():
        if isinstance(value, dict):
            yield from entries(value, (*path, key))
        elif (*path, key)[0] not in NO_NUMBERS:
            yield (*path, key), value


def faults(case: Case, said: Sequence[Said], instead: Mapping[Path, Any] | None = None) -> list[Fault]:
    """What differs. ``instead``: values that stand in for the case's own; with an error in the case, all there are."""
    wanted = {} if "error" in case.outputs else dict(entries(case.outputs))
    wanted |= instead or {}
    found, covered = [], set[Path]()
    for one in said:
        for path in _under(one, wanted):
            covered.add(path)
            fault = _one(one, path, wanted[path], case.dtype)
            found += [] if fault is None else [fault]
    missing = [path for path, value in wanted.items() if path not in covered and value is not None]
    return [*found, *(Fault(path, "trimtab has nothing to say of it") for path in missing)]


def left_out(case: Case, said: Sequence[Said]) -> tuple[str, ...]:
    """Names, with the system, of what is not compared: trimtab's that the case has not, the case's that are null."""
    held = {} if "error" in case.outputs else dict(entries(case.outputs))
    if not held:
        return ()
    surplus = {one.path for one in said if not _under(one, held)}
    means = {path for one in said for path in _under(one, held) if path != one.path or one.absent is not None}
    null = {path for path, value in held.items() if value is None and path not in means}
    return tuple(sorted(f"{case.system} {'.'.join(path)}" for path in surplus | null))


def unlike(case: Case, theirs: Mapping[Path, Any]) -> list[Fault]:
    """Where a case does not hold what its system is said to compute."""
    held = dict(entries(case.outputs))
    found = [
        _numbers(path, flat(value, torch.float64), flat(held[path], torch.float64), case.dtype, 0.0)
        for path, value in theirs.items()
        if held.get(path) is not None
    ]
    return [Fault(fault.path, f"not what docs/differences.md describes: {fault.text}") for fault in found if fault]


def _under(one: Said, wanted: Mapping[Path, Any]) -> list[Path]:
    """The entry that is meant; or all entries below it, of which it says whether they are as they should be."""
    if one.path in wanted:
        return [one.path]
    return [path for path in wanted if path[: len(one.path)] == one.path]


def _one(one: Said, path: Path, wanted: Any, dtype: torch.dtype) -> Fault | None:
    said = (
        one.value.double().flatten()
        if isinstance(one.value, Tensor)
        else torch.tensor([one.value], dtype=torch.float64)
    )
    if path != one.path:
        return None if bool(said) else Fault(path, "trimtab's preset of that name is another method")
    if wanted is None:
        if one.absent is None:
            return None
        golden = torch.full_like(said, one.absent)
    else:
        golden = flat(wanted, torch.float64)
        golden = golden if one.row_N is None else golden[one.row_N]
    if said.shape != golden.shape:
        return Fault(path, f"{len(said)} numbers, the case has {len(golden)}")
    if one.where is not None:
        said, golden = said[one.where], golden[one.where]
    fault = _numbers(path, said, golden, dtype, one.scale)
    return None if fault is None else Fault(path, f"trimtab {fault.text}", fault.size)


def _numbers(path: Path, said: Tensor, golden: Tensor, dtype: torch.dtype, scale: float) -> Fault | None:
    same = (said == golden) | (said.isnan() & golden.isnan())
    error, size = torch.where(same, 0.0, (said - golden).abs()), golden.abs()
    if dtype is torch.float32:
        size = size.clamp(min=scale)  # the terms of a sum are rounded, then they cancel
    numbers = torch.finfo(dtype)
    allowed = TOLERANCE[dtype] * size + ROUNDINGS * numbers.tiny * numbers.eps  # subnormal numbers have few digits
    if CANCELS.search(path[-1]):
        allowed = allowed + ROUNDINGS * numbers.eps
    bad = ~same & ~(golden.isfinite() & said.isfinite() & (error <= allowed))
    if not bad.any():
        return None
    smallest = max(scale, torch.finfo(torch.float64).tiny)
    relative = torch.where(bad, error / golden.abs().clamp(min=smallest), 0.0).nan_to_num(nan=torch.inf)
    at = int(relative.argmax())
    return Fault(
        path,
        f"{float(said[at])!r}, case {float(golden[at])!r} (relative {float(relative[at]):.2g}; "
        f"{int(bad.sum())} of {len(said)} numbers)",
        float(relative[at]),
    )
