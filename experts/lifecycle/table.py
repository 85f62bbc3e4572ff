"""The table of experts: for each layer its living experts, with ids that are never used twice.

Every process that holds experts or routers has an equal copy, and applies the same changes to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raytrain.config.decode import JsonRecord
from raytrain.errors import RunError

HASH_BITS = 40
"""Of a table's hash: those of 4,096 members sum up exactly in float64."""


class TableMismatch(RunError):
    """The members of a run do not have the same table of experts."""


ChangeKind = Literal["birth", "merge", "prune", "rate"]


@dataclass(frozen=True)
class Change(JsonRecord):
    """One change of one layer.

    Attributes:
        ids: birth: (parent, newcomer). merge: (survivor, the expert that goes). prune, rate: (expert,).
        slot: birth: where the newcomer's weights are; see `ExpertRow.slot`.
        share: merge: of the survivor's weights in the merged ones.
        factor: rate: the new factor of the learning rate.
        opens: birth: False keeps the newcomer from all rows, as a router with minus infinity for it does.
    """

    kind: ChangeKind
    layer: int
    ids: tuple[int, ...]
    reason: str
    slot: int | None = None
    share: float = 1.0
    factor: float = 1.0
    opens: bool = True


@dataclass(frozen=True)
class ExpertRow:
    """One living expert.

    Attributes:
        id: permanent: no other expert of its layer has or had it.
        slot: its position in the stacked weights and in the router, from its birth to its end.
        born, used: steps: of its birth, and the last one in which it had its share of rows (its birth counts as use).
        parent: the expert that it was copied from; None for those of the start.
        uses: rows so far, those of experts that it has absorbed included.
        rate: factor of the learning rate.
    """

    id: int
    slot: int
    born: int = 0
    parent: int | None = None
    uses: int = 0
    used: int = 0
    rate: float = 1.0


@dataclass(frozen=True)
class ExpertTable(JsonRecord):
    """The living experts of each layer in the order of their ids.

    Attributes:
        slots: room for experts in each layer.
        next_ids: of each layer, for its next newcomer.
        born: step of the last birth in each layer; None before the first.
        seed: of the noise of newcomers.
    """

    layers: tuple[tuple[ExpertRow, ...], ...]
    slots: int
    next_ids: tuple[int, ...]
    born: tuple[int | None, ...]
    seed: int = 0

    @classmethod
    def start(cls, living: int, *, layers: int, slots: int, seed: int = 0) -> ExpertTable:
        """The table of a new model: expert e in slot e.

        Example:
            >>> from experts.lifecycle.table import ExpertTable
            >>> [row.id for row in ExpertTable.start(2, layers=1, slots=4).layers[0]]
            [0, 1]
        """
        rows = tuple(ExpertRow(expert, expert) for expert in range(living))
        return cls((rows,) * layers, slots, (living,) * layers, (None,) * layers, seed)

    def row(self, layer: int, expert: int) -> ExpertRow:
        """The row of an expert. Raises KeyError where no such expert is alive."""
        for row in self.layers[layer]:
            if row.id == expert:
                return row
        raise KeyError(f"layer {layer} has no living expert {expert}, only {self.ids(layer)}")

    def slot(self, layer: int, expert: int) -> int:
        return self.row(layer, expert).slot

    def ids(self, layer: int) -> list[int]:
        """The ids of a layer's living experts, ascending."""
        return [row.id for row in self.layers[layer]]

    def ids_by_slot(self, layer: int) -> list[int | None]:
        """The id of the expert in each slot; None for an empty one."""
        found: list[int | None] = [None] * self.slots
        for row in self.layers[layer]:
            found[row.slot] = row.id
        return found

    def free_slots(self, layer: int) -> list[int]:
        """The empty slots of a layer, ascending."""
        return [slot for slot, expert in enumerate(self.ids_by_slot(layer)) if expert is None]

    def count_uses(self, rows: Sequence[Sequence[int]], *, step: int, least_share: float) -> ExpertTable:
        """Add the rows of each layer's slots in an interval that ended with `step`; from `least_share` of its layer's
        rows on, an expert counts as used."""
        layers = []
        for table, counts in zip(self.layers, rows, strict=True):
            least = max(1.0, least_share * sum(counts))
            layers.append(
                tuple(
                    replace(row, uses=row.uses + counts[row.slot], used=step if counts[row.slot] >= least else row.used)
                    for row in table
                )
            )
        return replace(self, layers=tuple(layers))

    def after(self, changes: Iterable[Change], *, step: int) -> ExpertTable:
        """The table after these changes at the end of `step`. Raises ValueError for a change that does not fit: an
        unknown or doubled id, or an occupied slot."""
        table = self
        for change in changes:
            layer, rows = change.layer, list(table.layers[change.layer])
            known = {row.id: place for place, row in enumerate(rows)}
            present = change.ids[:1] if change.kind == "birth" else change.ids
            if any(one not in known for one in present) or len(set(change.ids)) < len(change.ids):
                raise ValueError(f"{change} of experts that are not all alive: layer {layer} has {list(known)}")
            next_ids, born = list(table.next_ids), list(table.born)
            first = known[change.ids[0]]
            if change.kind == "birth":
                parent, newcomer = change.ids
                if change.slot not in table.free_slots(layer) or newcomer != table.next_ids[layer]:
                    free, wanted = table.free_slots(layer), table.next_ids[layer]
                    raise ValueError(f"{change}: expected expert {wanted} in one of the empty slots {free}")
                rows.append(ExpertRow(newcomer, change.slot, born=step, parent=parent, used=step))
                next_ids[layer], born[layer] = newcomer + 1, step
            elif change.kind == "merge":
                gone = rows[known[change.ids[1]]]
                rows[first] = replace(
                    rows[first], uses=rows[first].uses + gone.uses, used=max(rows[first].used, gone.used)
                )
                rows.remove(gone)
            elif change.kind == "prune":
                del rows[first]
            else:
                rows[first] = replace(rows[first], rate=change.factor)
            layers = (*table.layers[:layer], tuple(rows), *table.layers[layer + 1 :])
            table = replace(table, layers=layers, next_ids=tuple(next_ids), born=tuple(born))
        return table

    def hash(self) -> int:
        """`HASH_BITS` bits that are equal where the living experts, their slots and their rates are."""
        own = [[(row.id, row.slot, row.born, row.parent, row.rate) for row in rows] for rows in self.layers]
        text = json.dumps([own, self.slots, self.next_ids, self.born, self.seed])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=HASH_BITS // 8).digest(), "little")
