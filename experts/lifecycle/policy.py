"""Decides which experts are born and pruned: a pure function of routing statistics, table and config.

Which ones merge is for the sleep cycle to say: it compares their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.config import LifecycleConfig
from experts.lifecycle.table import Change, ExpertTable

LEARNT = 0.95
"""A router has learnt once its uncertainty has fallen to this part of that of its first interval."""
CERTAIN = 0.8
"""A router whose first interval is below this has learnt before, in the run that its weights come from."""


@dataclass(frozen=True)
class LayerStatistics:
    """The routing of one layer in the steps since the last decision.

    Attributes:
        rows: of each slot.
        uncertainty: mean entropy of the router's choice over that of an even choice among the living experts, 0 to 1,
            so that it does not depend on their number. None where there were no rows.
        first, lowest: uncertainty of the first interval, and the lowest one of any interval so far.
    """

    rows: tuple[int, ...]
    uncertainty: float | None = None
    first: float = 1.0
    lowest: float = 1.0

    @property
    def learnt(self) -> bool:
        """Whether the router tells tokens apart: the doubt of an untrained one says nothing about the data."""
        return self.lowest <= LEARNT * self.first or self.first < CERTAIN


def decide(
    statistics: Sequence[LayerStatistics], table: ExpertTable, config: LifecycleConfig, *, step: int, least: int,
    threshold: float | None = None,
) -> list[Change]:  # fmt: skip
    """Decide on the changes of each layer: prunes, then at most one birth.

    Args:
        table: with the uses of that interval (`ExpertTable.count_uses`).
        step: the last one of the interval; the changes are done at the end of the next one.
        least: fewest living experts of a layer.
        threshold: instead of `birth.uncertainty`.
    """
    found: list[Change] = []
    for layer, own in enumerate(statistics):
        changes = prunes(table, config, layer=layer, step=step, least=least)
        found += [*changes, *_births(own, table.after(changes, step=step), config, layer, step, threshold)]
    return found


def merge(table: ExpertTable, layer: int, one: int, other: int, reason: str) -> Change:
    """The change that merges two experts: the one with more uses survives, weighted by uses."""
    first, second = sorted((table.row(layer, one), table.row(layer, other)), key=lambda row: (-row.uses, row.id))
    total = first.uses + second.uses
    return Change("merge", layer, (first.id, second.id), reason, share=first.uses / total if total else 0.5)


def prunes(table: ExpertTable, config: LifecycleConfig, *, layer: int, step: int, least: int) -> list[Change]:
    """The experts of a layer that go as they have long been dormant; `least` of them stay."""
    idle = config.prune.idle_steps
    if idle is None:
        return []
    rows = table.layers[layer]
    dormant = sorted((row for row in rows if step - row.used >= idle), key=lambda row: (row.used, row.uses, row.id))
    return [
        Change(
            "prune", layer, (row.id,),
            f"no more than {config.prune.least_share:g} of the rows since step {row.used}, {step - row.used} steps ago",
        )
        for row in dormant[: max(0, len(rows) - least)]
    ]  # fmt: skip


def _births(
    own: LayerStatistics, table: ExpertTable, config: LifecycleConfig, layer: int, step: int, threshold: float | None
) -> list[Change]:
    wanted = config.birth.uncertainty if threshold is None else threshold
    free, born = table.free_slots(layer), table.born[layer]
    parents = [row for row in table.layers[layer] if own.rows[row.slot]]
    if not free or not parents or own.uncertainty is None or own.uncertainty < wanted:
        return []
    if len(table.layers[layer]) >= (config.max_experts or 0) or (wanted > 0 and not own.learnt):
        return []
    if born is not None and step + 1 - born < config.birth.cooldown_steps:
        return []
    parent = min(parents, key=lambda row: (-own.rows[row.slot], row.id))
    reason = (
        f"the router's uncertainty is {own.uncertainty:.4f}, at least {wanted:g}; expert {parent.id} has most rows, "
        f"{own.rows[parent.slot]} of {sum(own.rows)}"
    )
    return [Change("birth", layer, (parent.id, table.next_ids[layer]), reason, slot=free[0])]
