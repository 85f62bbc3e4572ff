"""Expert figures of a run: rows over time, totals, last use and placement. Pure.

Reads the rows of experts.jsonl and the `placement` events; a row whose shape differs from the last one is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.config.messages import abbreviated
from raytrain.report.records import Row, RunRecords, listed, mapping, number

Name = tuple[int, int]
"""(layer, expert)."""

BINS = 120
"""Most columns of a heat map; log intervals are added up to fit."""

LAYERS_DRAWN = 32
"""Most layers drawn; of a model with more, the first and the last ones."""

LATE = 0.25
"""The last fraction of the log intervals, by which an expert is judged."""


@dataclass(frozen=True)
class ExpertLoads:
    """The rows of each expert in each log interval of a run."""

    begin: int  # the step before the first interval
    ends: list[int]  # last step of each interval
    layers: list[list[list[int]]]  # [interval][layer][expert] rows
    last_used: list[list[int | None]]  # [layer][expert] step of its last row, None = never
    vacant: list[list[frozenset[int]]]  # [interval][layer] places for experts that come and go in which none was

    @property
    def totals(self) -> list[list[int]]:
        """[layer][expert] rows over the full run."""
        return added(self.layers)

    def late(self) -> list[list[int]]:
        """[layer][expert] rows of the last intervals."""
        return added(self.layers[-max(1, round(LATE * len(self.layers))) :])

    def dead(self) -> list[Name]:
        """Experts without a row in the last intervals, in layers that had rows."""
        return [
            (layer, expert)
            for layer, rows in enumerate(self.late())
            for expert, count in enumerate(rows)
            if count == 0 and sum(rows) and expert not in self.vacant[-1][layer]
        ]

    def imbalance(self) -> list[float]:
        """Busiest expert over the mean, for each layer in the last intervals; 1 where nothing was routed."""
        pairs = zip(self.late(), self.vacant[-1], strict=True)
        return [max(rows) * (len(rows) - len(vacant)) / sum(rows) if sum(rows) else 1.0 for rows, vacant in pairs]


def added(windows: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*windows, strict=True)]


def loads_of(records: RunRecords) -> ExpertLoads | None:
    """The expert loads of a run; None if it recorded none."""
    rows = [row for row in records.loads if _shape(row) and number(row.get("step")) is not None]
    if not rows:
        return None
    rows = [row for row in rows if _shape(row) == _shape(rows[-1])]
    first, last = rows[0], rows[-1]
    used: list[list[int | None]] = [[None] * size for size in _shape(last)]
    for row in rows:
        idle = listed(row.get("idle"))
        for layer, counts in enumerate(row["layers"]):
            steps = listed(idle[layer]) if layer < len(idle) else []
            for expert, count in enumerate(counts):
                back = steps[expert] if expert < len(steps) else (0 if count else None)
                if back is not None:
                    used[layer][expert] = int(row["step"]) - int(back)
    return ExpertLoads(
        begin=max(0, int(first["step"]) - int(number(first.get("steps")) or 0)),
        ends=[int(row["step"]) for row in rows],
        layers=[[[int(count) for count in layer] for layer in row["layers"]] for row in rows],
        last_used=used,
        vacant=[
            [frozenset(place for place, one in enumerate(ids) if one is None) for ids in listed(row.get("ids"))]
            or [frozenset()] * len(row["layers"])
            for row in rows
        ],
    )


def _shape(row: Row) -> list[int]:
    layers = listed(row.get("layers"))
    good = all(isinstance(layer, list) and all(isinstance(n, int | float) for n in layer) for layer in layers)
    return [len(layer) for layer in layers] if good else []


def device_spec(records: RunRecords) -> dict[str, Any] | None:
    """The data of expert_device_distribution.png, from the last `placement` event; None if every worker, or a single
    process, holds all experts. `rows` and `busy_s` of each host are those of the last intervals, [] where unknown."""
    found = [row for row in records.of_kind("placement") if (number(row.get("num_hosts")) or 0) > 1]
    if not found:
        return None
    row, hosts = found[-1], int(found[-1]["num_hosts"])
    copies = [listed(mapping(layer).get("copies")) for layer in listed(row.get("layers"))]
    inside = all(isinstance(at, int) and 0 <= at < hosts for layer in copies for own in layer for at in listed(own))
    if not copies or not inside:
        return None
    homes = Counter(own[0] for layer in copies for own in layer if own)
    replicas = Counter(host for layer in copies for own in layer for host in own[1:])
    taken = [int(number(size) or 0) for size in listed(row.get("bytes"))]
    late = [mapping(one.get("hosts")) for one in records.loads[-max(1, round(LATE * len(records.loads))) :]]
    by_host = [[sum(column) for column in zip(*listed(one.get("rows")), strict=False)] for one in late]
    place = "worker" if records.planned("hosts") == "colocated" else "host"
    devices = [str(name) for name in listed(row.get("devices"))] + [""] * hosts
    return {
        "title": records.name,
        "version": int(number(row.get("version")) or 0),
        "names": [f"{place} {host}" + (f" ({devices[host]})" if devices[host] else "") for host in range(hosts)],
        "homes": [homes[host] for host in range(hosts)],
        "replicas": [replicas[host] for host in range(hosts)],
        "bytes": (taken + [0] * hosts)[:hosts],
        "rows": [int(total) for total in _summed(by_host, hosts)],
        "busy_s": _summed([listed(one.get("busy_s")) for one in late], hosts),
        "copies": copies,
    }


def _summed(rows: Sequence[Sequence[float]], hosts: int) -> list[float]:
    fitting = [row for row in rows if len(row) == hosts]
    return [sum(column) for column in zip(*fitting, strict=True)]


def activation_spec(records: RunRecords) -> dict[str, Any] | None:
    """The data of expert_activations.png: for each layer the rows of each expert over time (as multiples of an even
    share; None where its place held no expert), in total, and the step of its last use."""
    loads = loads_of(records)
    if loads is None:
        return None
    width = -(-len(loads.ends) // BINS)
    starts = range(0, len(loads.ends), width)
    bins = [added(loads.layers[start : start + width]) for start in starts]  # [bin][layer][expert] rows
    vacant = [
        [frozenset.intersection(*intervals) for intervals in zip(*loads.vacant[start : start + width], strict=True)]
        for start in starts
    ]
    number_of = len(loads.last_used)
    drawn = list(range(number_of))
    if number_of > LAYERS_DRAWN:
        drawn = [*range(LAYERS_DRAWN // 2), *range(number_of - LAYERS_DRAWN // 2, number_of)]
    panels = []
    for layer in drawn:
        size = len(loads.last_used[layer])
        # rows of an even share between the experts that were there
        even = [
            sum(rows[layer]) / max(1, size - len(none[layer])) or 1.0 for rows, none in zip(bins, vacant, strict=True)
        ]
        over_time = [
            [None if expert in none[layer] else rows[layer][expert] / share
             for rows, none, share in zip(bins, vacant, even, strict=True)]
            for expert in range(size)
        ]  # fmt: skip
        if size:
            panels.append({"layer": layer, "over_time": over_time, "totals": loads.totals[layer],
                           "last_used": loads.last_used[layer]})  # fmt: skip
    late = max(1, round(LATE * len(loads.ends)))
    return {
        "title": records.name,
        "layers": number_of,
        "edges": [loads.begin, *(loads.ends[min(start + width, len(loads.ends)) - 1] for start in starts)],
        # an expert whose last use is not after this step counts as dead
        "late_from": loads.ends[-late - 1] if late < len(loads.ends) else loads.begin,
        "panels": panels,
    }


def names_of(experts: Sequence[Name], *, most: int = 6) -> str:
    """Experts as text: layer 1 expert 3, layer 2 expert 0 and 5 more."""
    return abbreviated([f"layer {layer} expert {expert}" for layer, expert in experts], most)
