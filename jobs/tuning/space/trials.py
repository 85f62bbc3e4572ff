"""The trials of `tune.space`, on the driver: proposes the remaining ones, records results, picks the best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from jobs.tuning.searcher import DONE, has_died, keep_traceback, why
from jobs.tuning.space.points import Point
from jobs.tuning.table import SweepTable, counted, values_text, whole_cells, whole_text
from raytrain.runs.sweep import SweepFolder

TRIAL_RESOURCES = {"CPU": 0.001}
"""The resources of the trial itself; its run reserves its own."""


class WholeTrials:
    """`searcher.Trials` of a list of points."""

    def __init__(
        self, points: Sequence[Point], *, sweep: SweepFolder, table: SweepTable, metric: str, private: bool
    ) -> None:
        """`private`: no other program uses the Ray cluster."""
        self._sweep, self._table, self.metric, self._private = sweep, table, metric, private
        self._running: set[int] = set()
        self._has_stale_reservations = False
        self._points = {one.number: one for one in points}
        self._keys = tuple(points[0].values)
        self.rows: dict[int, dict[str, Any]] = {}
        self._dead = {row["trial"] for row in sweep.again()}
        for row in sweep.standing():
            self.rows[row["trial"]] = row
            table.end(row["trial"], whole_cells(row, self._keys), whole_text(row))
        self._left = [one for one in points if one.number not in self.rows]
        self._began: dict[int, float] = {}
        self.stopping = False

    def propose(self) -> dict[str, Any] | str | None:
        """The next point's number and overrides."""
        if not self._left or self.stopping:
            return DONE
        if self._has_stale_reservations and self._running:
            return None  # reservations of a dead trial are distinguishable only after the running trials end
        if self._has_stale_reservations:
            remove_reservations()
            self._has_stale_reservations = False
        point = self._left.pop(0)
        cells = whole_cells({"values": point.values}, self._keys)[: len(self._keys)]
        self._table.propose(point.number, cells, left=f"{len(self.rows)} of {len(self._points)} done")
        return {"number": point.number, "overrides": list(point.overrides)}

    def started(self, config: dict[str, Any]) -> None:
        """Called when the trial's process has started."""
        point = self._points[config["number"]]
        self._began[point.number] = time.time()
        self._running.add(point.number)
        self._table.start(point.number)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record the result of a trial, except one that was asked to stop: a resumed search continues it."""
        point = self._points[config["number"]]
        self._running.discard(point.number)
        if self._private and has_died(error):
            self._has_stale_reservations = True
        if self.stopping or result.get("status") == "interrupted":
            return
        outcome, reason, deaths = "ok", "", 0
        if has_died(error):
            deaths = 1 + (point.number in self._dead)
            outcome, reason = "died", why(error) + (", and once before" if deaths > 1 else "")
        elif error is not None:
            outcome, reason = "error", why(error)
        elif not result.get("final"):
            outcome, reason = "stopped", f"behind the others at step {result.get('step')}"
        elif not math.isfinite(result.get(self.metric, math.nan)):
            outcome, reason = "nonfinite", f"its {self.metric} is not finite"
        now = time.time()
        row = {
            "trial": point.number,
            "values": point.values,
            "outcome": outcome,
            "reason": reason,
            **({"deaths": deaths} if deaths else {}),
            "eval_loss": result.get("eval_loss", math.nan),
            "samples_per_s": result.get("samples_per_s"),
            "steps": result.get("steps", result.get("step")),
            "peak_bytes": result.get("peak_bytes"),
            "run": result.get("run") or self._sweep.run_of(f"trial-{point.number:04d}"),
            "time": now,
            "wall_s": now - self._began.get(point.number, now),
        }
        keep_traceback(self._sweep, point.number, error)
        self._sweep.record(row)
        self.rows[point.number] = row
        self._table.end(point.number, whole_cells(row, self._keys), whole_text(row))

    def best(self) -> tuple[dict[str, Any], str] | None:
        """(row of the best trial, why); None if no trial completed."""
        return best_of(list(self.rows.values()), metric=self.metric)


def remove_reservations() -> None:
    """Remove the reservations of trainers that died; nothing but Ray Tune may run on the cluster."""
    for key, group in placement_group_table().items():
        own = all(bundle == TRIAL_RESOURCES for bundle in group["bundles"].values())
        if group["state"] != "REMOVED" and not own:
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(key))))


def best_of(rows: Sequence[Mapping[str, Any]], *, metric: str) -> tuple[dict[str, Any], str] | None:
    """(the row with the lowest eval loss, or the most samples/s; why), of the trials that completed."""
    whole = sorted((dict(row) for row in rows if row["outcome"] == "ok"), key=lambda row: row[metric])
    if metric == "samples_per_s":
        whole.reverse()
    if not whole:
        return None
    first = whole[0]
    words = "lowest eval loss" if metric == "eval_loss" else "most samples/s"
    reason = f"{words} of {counted(len(rows), 'trial')}: {first[metric]:.6g}"
    if len(whole) > 1:
        second = whole[1]
        reason += f"; next {second[metric]:.6g} with {values_text(second['values'])}"
    return first, reason
