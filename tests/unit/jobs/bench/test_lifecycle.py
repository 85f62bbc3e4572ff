"""Bench `lifecycle`: which changes it asks for, and the time of the step that one happens in."""

from __future__ import annotations

from experts.lifecycle.table import ExpertTable
from jobs.bench.lifecycle import change_ratios, wanted


def test_the_larger_of_the_step_of_a_change_and_the_next_is_compared_with_the_steps_around_both() -> None:
    times = [9.0] * 2 + [1.0] * 10 + [3.0, 4.0] + [2.0] * 14
    assert change_ratios(times, [13, 13]) == [4.0 / 1.5], "step 13 and 14 against ten before and ten after; once"
    assert change_ratios(times, [5, 10]) == [], "the first steps are not like the others"
    assert change_ratios([1.0] * 15 + [3.0], [15, 16]) == [3.0, 3.0], "also where there is no next one"


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
