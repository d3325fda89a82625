"""Weights in memory that two processes share: the trainer writes, the engine's process maps what was written."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trimtab.errors import EngineError

_ALIGN = 64  # bytes


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: ``dtype`` by torch's name, ``offset`` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SharedWeights:
    """A copy of the trainer's weights in an anonymous file in memory, which ends with this process, however it ends."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._places: tuple[_Place, ...] = ()
        self._tensors: list[Tensor] = []

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights; nobody may be reading the ones before."""
        given = [(name, tensor.detach()) for name, tensor in weights]
        places = _places(given)
        if self._file is None or places != self._places:
            self.close()
            self._allocate(places)
        for own, (_, tensor) in zip(self._tensors, given, strict=True):
            own.copy_(tensor)

    @property
    def written(self) -> bool:
        return self._file is not None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self._places)

    def address(self) -> tuple[str, str]:
        """What ``mapped`` needs in the other process, as two texts: a path, and where each tensor lies."""
        if self._file is None:
            raise EngineError("no weights have been written yet")
        return f"/proc/{os.getpid()}/fd/{self._file}", json.dumps([asdict(place) for place in self._places])

    def close(self) -> None:
        """Free the memory once nobody maps it any more."""
        self._tensors, self._places = [], ()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _allocate(self, places: tuple[_Place, ...]) -> None:
        self._file = os.memfd_create("trimtab-weights")
        os.ftruncate(self._file, max(1, _size(places)))
        self._places = places
        self._tensors = _tensors(mmap.mmap(self._file, 0), places)


def mapped(path: str, layout: str) -> list[tuple[str, Tensor]]:
    """(name, tensor) of what another process wrote, without a copy; private to this process if written to."""
    places = tuple(_Place(**{**place, "shape": tuple(place["shape"])}) for place in json.loads(layout))
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [(place.name, tensor) for place, tensor in zip(places, _tensors(memory, places), strict=True)]


def _places(given: Sequence[tuple[str, Tensor]]) -> tuple[_Place, ...]:
    offset, places = 0, []
    for name, tensor in given:
        places.append(_Place(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return tuple(places)


def _size(places: Sequence[_Place]) -> int:
    return max((p.offset + math.prod(p.shape) * _dtype(p).itemsize for p in places), default=0)


def _tensors(memory: mmap.mmap, places: Sequence[_Place]) -> list[Tensor]:
    return [
        torch.frombuffer(memory, dtype=_dtype(p), count=math.prod(p.shape), offset=p.offset).reshape(p.shape)
        if math.prod(p.shape)
        else torch.empty(p.shape, dtype=_dtype(p))
        for p in places
    ]


def _dtype(place: _Place) -> torch.dtype:
    found = getattr(torch, place.dtype)
    assert isinstance(found, torch.dtype)
    return found
