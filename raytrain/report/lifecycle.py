"""Experts that come and go, as data of pictures: their lives, sleep cycles, drift, and the graph of each epoch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.report.charts import line, panel
from raytrain.report.records import Row, RunRecords, listed, mapping, number

EVENTS = {"expert_born": "born", "expert_merged": "merged", "expert_pruned": "pruned"}
EDGE_TYPES = ("similarity", "composition", "specialization", "dependency", "specialization_split")


@dataclass(frozen=True)
class Life:
    """One expert: from its birth (0 = it was there at the start) to its end (None = it lives), and how it ended."""

    layer: int
    expert: int
    born: int
    ended: int | None = None
    end: str | None = None
    heir: int | None = None


def events_of(records: RunRecords, *kinds: str) -> list[Row]:
    """Events of these kinds that have a step, in order; those of steps that the run went back behind are dropped, as
    the attempt, rewind or rollback that repeats the steps writes them again."""
    kept: list[Row] = []
    for row in records.events:
        start = number(row.get("from_step")) if row.get("kind") == "attempt" else None
        if row.get("kind") == "decision" and row.get("what") in ("rewind", "rollback"):
            start = number(row.get("value"))
        if start is not None:
            kept = [one for one in kept if one["step"] <= start]
        elif row.get("kind") in kinds and number(row.get("step")) is not None:
            kept.append(row)
    return kept


def lives_of(records: RunRecords) -> list[Life]:
    """Every expert of a run with a lifecycle, by layer and id; empty for other runs."""
    first = next((row for row in records.loads if row.get("ids")), None)
    if first is None:
        return []
    events = events_of(records, *EVENTS)
    lives: dict[tuple[int, int], Life] = {}
    removed = {(int(row["layer"]), int(row["ids"][-1])) for row in events if row["kind"] != "expert_born"}
    born = {(int(row["layer"]), int(row["ids"][-1])) for row in events if row["kind"] == "expert_born"}
    at_first = {(layer, int(one)) for layer, ids in enumerate(first["ids"]) for one in ids if one is not None}
    for layer, expert in sorted((at_first | removed) - born):
        lives[layer, expert] = Life(layer, expert, 0)
    for row in events:
        step, layer, expert = int(row["step"]), int(row["layer"]), int(row["ids"][-1])
        if row["kind"] == "expert_born":
            lives[layer, expert] = Life(layer, expert, step)
            continue
        heir = int(row["ids"][0]) if row["kind"] == "expert_merged" else None
        before = lives.get((layer, expert), Life(layer, expert, 0))
        lives[layer, expert] = Life(layer, expert, before.born, step, EVENTS[row["kind"]], heir)
    return [lives[key] for key in sorted(lives)]


def living_at(lives: Sequence[Life], step: int) -> list[tuple[int, int]]:
    """(layer, id) of the experts that live after `step`."""
    return [(one.layer, one.expert) for one in lives if one.born <= step and (one.ended is None or one.ended > step)]


def lives_spec(records: RunRecords) -> dict[str, Any] | None:
    """The data of expert_lifecycle.png: every expert's life, and the experts of each layer over the steps."""
    lives = lives_of(records)
    if not lives:
        return None
    logged = [number(row.get("step")) or 0 for row in [*records.train, *records.loads]]
    last = int(max([*logged, *(one.born for one in lives), *(one.ended or 0 for one in lives)]))
    panels = []
    for layer in sorted({one.layer for one in lives}):
        own = [one for one in lives if one.layer == layer]
        steps = sorted({0, last, *(one.born for one in own), *(one.ended for one in own if one.ended is not None)})
        counts = [sum(key[0] == layer for key in living_at(lives, step)) for step in steps]
        panels.append({"layer": layer, "lives": [vars(one) for one in own], "steps": steps, "counts": counts})
    counted = {name: len(events_of(records, kind)) for kind, name in EVENTS.items()}
    return {"title": records.name, "last": last, "events": counted, "panels": panels}


def cycles_of(records: RunRecords) -> list[Row]:
    return events_of(records, "sleep_cycle")


def sleep_spec(records: RunRecords) -> dict[str, Any] | None:
    """The data of sleep_cycles.png: six panels about the cycles; None without any."""
    cycles = cycles_of(records)
    if not cycles:
        return None
    steps = [int(row["step"]) for row in cycles]
    between = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    kinds = [kind for kind in EDGE_TYPES if any(mapping(row.get("edges")).get(kind) for row in cycles)]
    bins = [row["uncertainty"] for row in cycles if len(listed(row.get("uncertainty"))) == 10]
    replayed = [sum(int(one[place]) for one in bins) for place in range(10)]
    rates = [[float(rate) for layer in listed(row.get("rates")) for rate in mapping(layer).values()] for row in cycles]
    panels = [
        _panel("Steps between cycles", "steps", _line("", steps, between)),
        _panel("Load of the experts at the last cycle", "share of the tokens", *_load(cycles[-1]), kind="bar",
               x_label="layer.expert"),
        _panel("Factor of the learning rate", "factor", 
               _line("mean", steps, [sum(one) / len(one) if one else None for one in rates]),
               _line("lowest", steps, [min(one, default=None) for one in rates])),
        _panel("Edges of the graph by type", "edges",
               *(_line(kind, steps, [mapping(row.get("edges")).get(kind, 0) for row in cycles]) for kind in kinds)),
        _panel("Replayed rows by uncertainty", "rows", 
               _line("", range(10), replayed, ticks=[f"{place / 10:.1f}" for place in range(10)]),
               kind="bar", x_label="uncertainty"),
        _panel("Replay loss", "loss", *(_line(name, steps, [number(row.get(key)) for row in cycles]) for name, key in (
            ("before", "loss_before"), ("after replay", "loss_replayed"), ("after the cycle", "loss_after")))),
    ]  # fmt: skip
    return {"title": f"{records.name}: {len(cycles)} sleep cycles", "panels": panels, "columns": 3}


def drift_spec(records: RunRecords) -> dict[str, Any] | None:
    """The data of concept_drift.png: how far each layer's inputs have moved between cycles, and how the loss on the
    replayed rows recovers in them; None with fewer than two cycles."""
    cycles = cycles_of(records)
    if len(cycles) < 2:
        return None
    steps = [int(row["step"]) for row in cycles]
    layers = range(max(len(listed(row.get("drift"))) for row in cycles))
    drift = [[number(dict(enumerate(listed(row.get("drift")))).get(layer)) for row in cycles] for layer in layers]
    lost, back = [], []
    for before, row in itertools.pairwise(cycles):
        ended, began, after = (number(value) for value in (before["loss_after"], row["loss_before"], row["loss_after"]))
        lost.append(None if ended is None or began is None else began - ended)
        back.append(None if began is None or after is None else began - after)
    panels = [
        _panel("Drift of the inputs since the cycle before", "distance of centres / spread",
               *(_line(f"layer {layer}", steps, values) for layer, values in enumerate(drift))),
        _panel("Replay loss between and in cycles", "difference of losses",
               _line("lost since the cycle before", steps[1:], lost), _line("recovered in the cycle", steps[1:], back)),
    ]  # fmt: skip
    return {"title": f"{records.name}: drift and recovery", "panels": panels, "columns": 2}


def graph_specs(records: RunRecords) -> dict[int, dict[str, Any]]:
    """Epoch -> the data of its knowledge_graph_epoch_N.png, N from 1: the experts that live at its end, and the edges
    of the last sleep cycle until then between them."""
    lives, cycles = lives_of(records), cycles_of(records)
    if not lives:
        return {}
    found, ends = {}, {row["epoch"]: row["step"] for row in records.train if "epoch" in row}
    for epoch, step in ends.items():
        living = living_at(lives, step)
        cycle = next((row for row in reversed(cycles) if int(row["step"]) <= step), None)
        graph = mapping(mapping(mapping(cycle).get("graph")).get("experts"))
        uses = {tuple(node["id"]): number(node.get("uses")) or 0.0 for node in listed(graph.get("nodes"))}
        edges = [
            {"one": list(edge["source"]), "other": list(edge["target"]), "type": edge["key"], "weight": edge["weight"]}
            for edge in listed(graph.get("edges"))
            if tuple(edge["source"]) in living and tuple(edge["target"]) in living
        ]
        nodes = [{"layer": layer, "expert": expert, "uses": uses.get((layer, expert), 0.0)} for layer, expert in living]
        found[epoch + 1] = {
            "title": f"{records.name}: experts after epoch {epoch + 1} (step {step})",
            "nodes": nodes, "edges": edges, "of_step": None if cycle is None else int(cycle["step"]),
        }  # fmt: skip
    return found


def _panel(title: str, y_label: str, *series: Mapping[str, Any], **more: Any) -> Row:
    return panel(title, y_label, [{"hue": place, **one} for place, one in enumerate(series)], **more)


def _line(label: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> dict[str, Any]:
    return line(label, [(a, b) for a, b in zip(x, y, strict=True) if b is not None], **more)


def _load(cycle: Row) -> list[dict[str, Any]]:
    """A bar for each expert of each layer, side by side, named layer.expert."""
    found, place = [], 0
    for layer, own in enumerate(listed(cycle.get("load"))):
        names = sorted(mapping(own), key=int)
        x = list(range(place, place + len(names)))
        shares = [float(mapping(own)[name]) for name in names]
        found.append(_line(f"layer {layer}", x, shares, ticks=[f"{layer}.{name}" for name in names], hue=layer))
        place += len(names) + 1
    return found
