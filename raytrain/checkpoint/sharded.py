"""Tensors saved as rows by several workers: the rows of each worker, and reading all or some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.telemetry.work import WORK
from raytrain.errors import CheckpointError


class ShardPosition(NamedTuple):
    """A worker's rank and the number of workers."""

    rank: int
    world_size: int


def rows_of(total: int, place: ShardPosition) -> tuple[int, int]:
    """(first row, end) of a worker's part of `total` rows, as FSDP2 cuts them: equal parts, the last ones shorter or
    empty."""
    size = -(-total // place.world_size)
    return min(place.rank * size, total), min((place.rank + 1) * size, total)


def read_split(paths: Sequence[str], names: Iterable[str], place: ShardPosition | None) -> dict[str, Tensor]:
    """Copies of tensors whose rows are stored one after another in local safetensors files; with `place`, only the rows
    of that worker.

    Errors: CheckpointError for a file of another format or a missing tensor; OSError if a file cannot be read.
    """
    wanted = set(names)
    held: dict[str, list[tuple[str, int]]] = {name: [] for name in wanted}  # (file, rows there)
    try:
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in wanted.intersection(file.keys()):
                    held[name].append((path, int(file.get_slice(name).get_shape()[0])))
        missing = sorted(name for name, found in held.items() if not found)
        if missing:
            raise CheckpointError(f"the tensor {missing[0]} is missing")
        spans = {name: rows_of(_total(found), place) if place else (0, _total(found)) for name, found in held.items()}
        pieces: dict[str, list[Tensor]] = {name: [] for name in wanted}
        seen = dict.fromkeys(wanted, 0)
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in wanted.intersection(file.keys()):
                    WORK.add()
                    rows, (first, end) = file.get_slice(name), spans[name]
                    count, begin = int(rows.get_shape()[0]), seen[name]
                    seen[name] = begin + count
                    low, high = min(max(first - begin, 0), count), min(end - begin, count)
                    if low < high or not pieces[name]:  # some piece, so that an empty share has its shape
                        pieces[name].append(rows[low : max(low, high)].clone())
        return {name: torch.cat(found) for name, found in pieces.items()}
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"no readable safetensors file among {', '.join(paths)} ({error})") from error


def _total(held: Sequence[tuple[str, int]]) -> int:
    return sum(rows for _, rows in held)
