"""Bench `lifecycle`: which changes it asks for."""

from __future__ import annotations

from experts.lifecycle.table import ExpertTable
from jobs.bench.lifecycle import wanted


def test_every_kind_of_change_takes_its_turn_in_every_layer() -> None:
    table, kinds = ExpertTable.start(3, layers=2, slots=6, seed=1), []
    for turn in range(1, 17):
        changes = wanted(table, turn)
        kinds += [(change.kind, change.layer) for change in changes]
        table = table.after(changes, step=10 * turn)
    assert kinds[:8] == [
        ("merge", 0),
        ("birth", 0),
        ("prune", 0),
        *[(k, 1) for k in ("birth", "merge", "birth", "prune")],
        ("birth", 0),
    ]
    assert all(2 <= len(rows) <= 4 for rows in table.layers)
