"""The reservoir: a uniform sample of the rows that it was offered, bounded in bytes, in host memory.

Rows are kept as the model received them, not as a layer saw them: a cycle recomputes what each layer gets with the
weights of that moment, so that nothing that is replayed is stale.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raytrain.errors import InputError

UNCERTAINTY, STEP = "uncertainty", "step"
OWN_BYTES = 12
"""Of the two, for each row."""


class Reservoir:
    """Keeps a uniform sample of a stream of rows (Vitter's algorithm R); each row of the stream is as likely to be in
    it as any other.

    Args:
        limit: most bytes of the kept rows; the memory is allocated with the first row.
        seed: of the choices. They depend on it and on the number of rows so far alone, so that a reservoir that was
            saved and loaded goes on as the first would have.

    Attributes:
        seen, evicted: rows of the stream so far; rows that were kept once and had to go.

    Example:
        >>> import torch
        >>> from experts.lifecycle.replay import Reservoir
        >>> kept = Reservoir(limit=200, seed=0)
        >>> for step in range(1, 101):  # 28 bytes a row: 2 x 4 of x, 8 of the label, and 12 of its own
        ...     kept.add({"x": torch.full((3, 2), float(step)), "labels": torch.zeros(3, dtype=torch.int64)},
        ...              uncertainty=torch.ones(3), step=step)
        >>> len(kept), kept.seen, kept.bytes <= 200
        (7, 300, True)
    """

    def __init__(self, limit: int, seed: int) -> None:
        self.limit, self.seed = limit, seed
        self.seen = self.evicted = self._kept = self.capacity = 0
        self._columns: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return self._kept

    @property
    def bytes(self) -> int:
        return self._kept * row_bytes(self._columns) if self._columns else 0

    @property
    def columns(self) -> list[str]:
        return [name for name in self._columns if name not in (UNCERTAINTY, STEP)]

    def add(self, rows: Mapping[str, Tensor], *, uncertainty: Tensor, step: int) -> None:
        """Offer B rows, tensors (B, ...) by name, with their uncertainty (B,) from 0 to 1; the time does not depend on
        how many are kept.

        Raises:
            InputError: rows of another shape than the first, or a row that takes more than `limit`.
        """
        given = {name: value.detach().to("cpu") for name, value in rows.items()}
        given[UNCERTAINTY] = uncertainty.detach().to("cpu", torch.float32)
        given[STEP] = torch.full((len(uncertainty),), step, dtype=torch.int64)
        if not self._columns:
            self._allocate(given)
        kept = {name: (tuple(column.shape[1:]), column.dtype) for name, column in self._columns.items()}
        new = {name: (tuple(value.shape[1:]), value.dtype) for name, value in given.items()}
        if kept != new:
            name = min(name for name in kept.keys() | new.keys() if kept.get(name) != new.get(name))
            raise InputError(
                "experts.lifecycle.replay.bytes",
                got=f"rows whose {name} is now {new.get(name)} and was {kept.get(name)}", expected="rows of one shape",
                remedy="pad them to one length in data.source, or leave the key out: nothing is replayed then",
            )  # fmt: skip
        places = self._places(len(uncertainty))
        chosen = [(row, place) for row, place in enumerate(places) if place >= 0]
        if not chosen:
            return
        # of two rows of this batch for one place the later one stays, as if they had come one by one
        last = {place: row for row, place in chosen}
        at, taken = torch.tensor(list(last)), torch.tensor(list(last.values()))
        for name, column in self._columns.items():
            column[at] = given[name][taken]

    def draw(self, rows: int, *, seed: int, priority: bool) -> Tensor:
        """Positions of kept rows, distinct, (at most `rows`,).

        Args:
            priority: rows of high uncertainty are more likely, in proportion to it; otherwise all are alike.
        """
        draw = np.random.default_rng([self.seed, seed])
        weights = np.ones(self._kept)
        if priority and self._kept:
            weights = np.maximum(self._columns[UNCERTAINTY][: self._kept].double().numpy(), 1e-3)
        # sampling without replacement by weight: the largest u ** (1 / w) (Efraimidis and Spirakis)
        keys = np.log(draw.random(self._kept)) / weights
        return torch.from_numpy(np.argsort(-keys, kind="stable")[:rows].copy())

    def rows(self, positions: Tensor) -> dict[str, Tensor]:
        return {name: self._columns[name][positions] for name in self.columns}

    def uncertainty(self, positions: Tensor | None = None) -> Tensor:
        """Of these rows, or of all."""
        kept = self._columns[UNCERTAINTY][: self._kept] if self._columns else torch.zeros(0)
        return kept.clone() if positions is None else kept[positions]

    def steps(self) -> Tensor:
        """The step that each kept row is of, (N,) int64."""
        return self._columns[STEP][: self._kept].clone() if self._columns else torch.zeros(0, dtype=torch.int64)

    def update(self, positions: Tensor, uncertainty: Tensor) -> None:
        """Replace the uncertainty of these rows by one that was measured later."""
        self._columns[UNCERTAINTY][positions] = uncertainty.detach().to("cpu", torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        numbers = torch.tensor([self.seen, self.evicted, self._kept], dtype=torch.int64)
        return {"numbers": numbers, **{f"rows.{name}": c[: self._kept].clone() for name, c in self._columns.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`. With a smaller `limit` than the saved one, the first rows that fit stay: which
        rows stand first is a matter of chance."""
        self.seen, self.evicted, kept = (int(number) for number in state["numbers"])
        self._columns, self._kept = {}, 0
        given = {name.removeprefix("rows."): value for name, value in state.items() if name.startswith("rows.")}
        if not given:
            return
        self._allocate(given)
        self._kept = min(kept, self.capacity)
        self.evicted += kept - self._kept
        for name, column in self._columns.items():
            column[: self._kept] = given[name][: self._kept]

    def _allocate(self, given: Mapping[str, Tensor]) -> None:
        self.capacity = kept_at_most(self.limit, row_bytes(given))
        shapes = {name: (self.capacity, *value.shape[1:]) for name, value in given.items()}
        self._columns = {name: torch.empty(shape, dtype=given[name].dtype) for name, shape in shapes.items()}

    def _places(self, number: int) -> list[int]:
        """The place of each new row, -1 for one that is not kept. The n-th row of the stream is kept with probability
        capacity / n, in the place of a random one."""
        ordinals = np.arange(self.seen, self.seen + number, dtype=np.uint64)
        drawn = _mixed(ordinals, self.seed) % (ordinals + np.uint64(1))
        places = []
        for ordinal, at in zip(ordinals.tolist(), drawn.tolist(), strict=True):
            if ordinal < self.capacity and self._kept < self.capacity:
                places.append(self._kept)
                self._kept += 1
            elif at < self.capacity and at < self._kept:
                places.append(at)
                self.evicted += 1
            else:
                places.append(-1)
        self.seen += number
        return places


def kept_at_most(limit: int, row_bytes: int) -> int:
    """Rows of this size that fit into `limit` bytes. Raises InputError: not even one."""
    if row_bytes > limit:
        raise InputError(
            "experts.lifecycle.replay.bytes", got=str(limit), expected=f"at least {row_bytes}, the bytes of one row"
        )
    return limit // row_bytes


def row_bytes(columns: Mapping[str, Tensor]) -> int:
    return sum(column.element_size() * int(np.prod(column.shape[1:])) for column in columns.values())


def _mixed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Numbers that look random, one for each (number, seed): the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(seed & 0xFFFFFFFF) * np.uint64(0xD1342543DE82EF95)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))
