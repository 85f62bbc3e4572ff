"""Draws the pictures of the report, each from a plot spec that holds exactly the plotted numbers.

Specs are JSON mappings built by pure functions (`figures.training_spec`, those in `experts`, in `lifecycle` and in
`tune_figures`); `figure`, `activations`, `devices`, `lives` and `knowledge_graph` draw them. This is the only module
that imports matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cluster.wording import size

_COLOURS = {
    "train": "#2f6bd8", "eval": "#d2600a", "gradient norm": "#8b46c1", "epoch": "#15845a", "step": "#15845a",
    "fp32": "#2f6bd8", "bf16": "#d2600a", "fp16": "#8b46c1", "tf32": "#15845a",
}  # fmt: skip
_INK, _SOFT, _GRID = "#18212c", "#566170", "#e3e7ec"
_FROM_ZERO = ("seconds", "rows/s", "MiB")


def figure(spec: Mapping[str, Any]) -> Figure:
    """Draws a spec on a new canvas, without touching matplotlib's global state."""
    columns = spec.get("columns", len(spec["panels"]))
    lines = -(-len(spec["panels"]) // columns)
    drawn = Figure(figsize=(15, 4.6 * lines), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(spec["title"], x=0.008, ha="left", fontsize=14, fontweight="bold", color=_INK, parse_math=False)
    for axes, panel in zip(drawn.subplots(lines, columns, squeeze=False).flat, spec["panels"], strict=True):
        note = f" ({panel['note']})" if panel.get("note") else ""
        axes.set_title(f"{panel['title']}{note}", loc="left", fontsize=13, color=_INK, pad=10)
        axes.set_xlabel(panel["x_label"], fontsize=11.5, color=_SOFT)
        axes.set_ylabel(panel["y_label"], fontsize=11.5, color=_SOFT)
        axes.tick_params(colors=_SOFT, labelsize=11, length=0)
        axes.grid(True, color=_GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#c3cad3")
        for number, line in enumerate(panel["series"]):
            _draw(axes, line, kind=panel["kind"], spare=_HOSTS[number % len(_HOSTS)])
        ticks = [pair for line in panel["series"] for pair in zip(line["x"], line.get("ticks", ()), strict=False)]
        if ticks:
            axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=11 if len(ticks) < 16 else 8)
        _mark(axes, panel)
        if sum(bool(line["label"]) for line in panel["series"]) > 1:
            axes.legend(frameon=False, fontsize=11, labelcolor=_INK)
        if not panel["series"]:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=_SOFT, fontsize=12)
        elif panel["y_label"] in _FROM_ZERO:
            axes.set_ylim(0, max(1.12 * axes.dataLim.y1, axes.get_ylim()[1]))
    return drawn


def png(drawn: Figure) -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Any, line: Mapping[str, Any], *, kind: str, spare: str) -> None:
    hue, other = line.get("hue", line["label"]), spare if line.get("faint") or kind == "dot" else _INK
    colour = _HOSTS[hue % len(_HOSTS)] if isinstance(hue, int) else _COLOURS.get(hue, other)
    if kind == "bar":
        axes.bar(line["x"], line["y"], color=colour, width=0.7, label=line["label"])
        return
    few = len(line["x"]) <= 40
    kind = line.get("kind", kind)
    style = {"linestyle": "none" if kind == "dot" else "-", "alpha": 0.45 if line.get("faint") else 1.0}
    mark = {"marker": "o" if few or kind == "dot" else "", "markersize": 6.5 if kind == "dot" else 4.5}
    axes.plot(line["x"], line["y"], color=colour, linewidth=1.8, label=line["label"] or "_", **mark, **style)
    for x, low, high in line.get("intervals", ()):
        axes.plot([x, x], [low, high], color=colour, linewidth=1.2, marker="_", markersize=9, label="_", alpha=0.7)


def _mark(axes: Any, panel: Mapping[str, Any]) -> None:
    """Optional parts of a panel: a base-2 x axis, annotated points, and a limit line."""
    axes.margins(y=0.15 if panel.get("marks") else 0.05)
    if "shown" in panel:  # of a curve over powers of ten, whose end would leave nothing of the rest to see
        axes.set(xscale="log", ylim=panel["shown"])
    if panel.get("doubling"):
        values = sorted({x for line in panel["series"] for x in line["x"] if x is not None})
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
    for mark in panel.get("marks", ()):
        axes.plot(mark["x"], mark["y"], marker="o", markersize=14, color=_INK, fillstyle="none", markeredgewidth=1.6)
        axes.annotate(mark["text"], (mark["x"], mark["y"]), xytext=(0, 13), textcoords="offset points", ha="center",
                      fontsize=10.5, color=_INK)  # fmt: skip
    if panel.get("limit"):
        axes.axhline(panel["limit"]["y"], color=_DEAD, linestyle="--", linewidth=1.4)
        axes.text(0.01, panel["limit"]["y"], panel["limit"]["text"], transform=axes.get_yaxis_transform(), va="bottom",
                  fontsize=10, color=_DEAD)  # fmt: skip


# ---------------------------------------------------------------- experts

_ROWS, _DEAD = "#2f6bd8", "#d2600a"
_SHARES = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#cfe0fa", "#2f6bd8", "#0d2a5e"]).with_extremes(
    bad="#f7cdb6", under="#e3e7ec"
)
_HOSTS = ("#2f6bd8", "#e08a3c", "#15845a", "#8b46c1", "#c23b5e", "#2a9aa8", "#8a6d3b", "#6b7785", "#a3b32a", "#e39ac0")
_NAMED = 24
"""Most hosts for which numbers are written beside the bars."""


def activations(spec: Mapping[str, Any]) -> Figure:
    """One row of panels per layer: its experts over time, their totals, and the last use of each."""
    panels, edges = spec["panels"], spec["edges"]
    note = "orange: no rows in that interval; orange bars and dots: none in the last quarter of the run; x: never used"
    shares = [share for panel in panels for line in panel["over_time"] for share in line]
    if None in shares:
        note += "; grey: no expert in this place"
    drawn = _titled(f"{spec['title']}: rows of each expert, 1 = even share\n{note}", 12.5, 1.6 * len(panels) + 1.6)
    grid = drawn.subplots(len(panels), 3, squeeze=False, width_ratios=(5, 1.9, 1.6))
    values = sorted(share for share in shares if share is not None)
    scale = Normalize(0.0, max(2.0, values[int(0.99 * (len(values) - 1))] if values else 2.0))
    for (heat, totals, recency), panel in zip(grid, panels, strict=True):
        number = len(panel["totals"])
        # below the scale where there was no expert, not a number where it had no rows: both have colours of their own
        mesh = [[-1.0 if share is None else share or math.nan for share in line] for line in panel["over_time"]]
        gone = [line[-1] is None for line in panel["over_time"]]
        colours = [
            _ROWS if spec["late_from"] < (step or 0) else _SOFT if gone[expert] else _DEAD
            for expert, step in enumerate(panel["last_used"])
        ]
        used = [(step, expert) for expert, step in enumerate(panel["last_used"]) if step is not None]
        never = [expert for expert, step in enumerate(panel["last_used"]) if step is None and not gone[expert]]
        heat.pcolormesh(edges, [n - 0.5 for n in range(number + 1)], mesh, cmap=_SHARES, norm=scale)
        heat.set_ylabel(f"layer {panel['layer']}", fontsize=10.5, color=_INK)
        totals.barh(range(number), panel["totals"], color=colours, height=0.78)
        if used:
            recency.scatter(*zip(*used, strict=True), c=[colours[expert] for _, expert in used], s=16)
        recency.scatter([edges[0]] * len(never), never, c=_DEAD, marker="x", s=16)
        aside = 0.05 * max(1, edges[-1] - edges[0])
        recency.set_xlim(edges[0] - aside, edges[-1] + aside)
        for axes in (heat, totals, recency):
            _plain(axes, rows=number)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=min(number, 4), integer=True, steps=[1, 2, 4, 8, 10]))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5 if axes is heat else 2, integer=True))
    for axes, name in zip(grid[-1], ("step", "total rows", "last used at step"), strict=True):
        axes.set_xlabel(name, fontsize=10, color=_SOFT)
    drawn.colorbar(ScalarMappable(scale, _SHARES), ax=list(grid[:, 0]), location="top", shrink=0.3, aspect=30)
    return drawn


def devices(spec: Mapping[str, Any]) -> Figure:
    names, hosts = spec["names"], len(spec["names"])
    total, busy = sum(spec["rows"]) or 1, sum(spec["busy_s"])
    shares = [100 * rows / total for rows in spec["rows"]] or [0.0] * hosts
    texts = [f"{own} + {more}" if more else f"{own}" for own, more in zip(spec["homes"], spec["replicas"], strict=True)]
    percents = [f"{share:.3g} %" for share in shares]
    if busy:
        spent = [f"{100 * own / busy:.3g} % of busy time" for own in spec["busy_s"]]
        percents = [f"{one}; {own}" for one, own in zip(percents, spent, strict=True)]
    drawn = _titled(
        f"{spec['title']}: expert placement {spec['version']}", 12.5, 1.6 + min(7.0, max(1.3, 0.33 * hosts))
    )
    columns = (
        ("experts" + (" + replicas" if any(spec["replicas"]) else ""), spec["homes"], texts),
        ("memory of experts", spec["bytes"], [size(used) for used in spec["bytes"]]),
        ("share of the rows, last quarter", shares, percents),
    )
    colours = [_HOSTS[host % len(_HOSTS)] for host in range(hosts)]
    for axes, (title, values, labels) in zip(drawn.subplots(1, 3, squeeze=False)[0], columns, strict=True):
        axes.barh(range(hosts), values, color=colours, height=0.72)
        ends = list(values)
        if values is spec["homes"]:
            axes.barh(range(hosts), spec["replicas"], left=values, color="white", edgecolor=colours, hatch="////")
            ends = [own + more for own, more in zip(values, spec["replicas"], strict=True)]
        if hosts <= _NAMED:
            axes.set_xticks([])  # the values are beside the bars
            for host, (end, text) in enumerate(zip(ends, labels, strict=True)):
                axes.text(end + 0.02 * (max(ends) or 1), host, text, va="center", fontsize=9.5, color=_SOFT)
        axes.set_xlim(0, (max(ends) or 1) * (2.2 if values is shares else 1.4))
        axes.set_yticks(range(0, hosts, -(-hosts // _NAMED)), names[:: -(-hosts // _NAMED)])
        axes.set_title(title, loc="left", fontsize=11, color=_INK)
        if values is spec["bytes"]:
            axes.xaxis.set_major_formatter(lambda used, _: size(used))
        _plain(axes, rows=hosts)
    return drawn


def _titled(title: str, wide: float, high: float) -> Figure:
    drawn = Figure(figsize=(wide, high), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(title, x=0.008, ha="left", fontsize=12, color=_INK, parse_math=False)
    return drawn


def _plain(axes: Any, *, rows: int) -> None:
    """Axes without a frame, whose rows are counted from the top."""
    axes.set_ylim(rows - 0.5, -0.5)
    axes.tick_params(colors=_SOFT, labelsize=9, length=0)
    axes.spines[:].set_visible(False)


# ---------------------------------------------------------------- experts that come and go

_ENDS = {"merged": ("D", "#8b46c1"), "pruned": ("X", "#d2600a")}
_EDGES = {
    "similarity": "#2f6bd8", "composition": "#15845a", "specialization": "#e08a3c", "dependency": "#6b7785",
    "specialization_split": "#c23b5e",
}  # fmt: skip


def lives(spec: Mapping[str, Any]) -> Figure:
    """For each layer the life of each expert as a bar, and their number."""
    panels, events = spec["panels"], spec["events"]
    tall = [max(2.0, 0.7 + 0.2 * len(panel["lives"])) for panel in panels]
    told = ", ".join(f"{number} {name}" for name, number in events.items())
    drawn = _titled(
        f"{spec['title']}: experts over time ({told})\ngreen dot: born; diamond: merged into the expert that the line "
        "leads to; x: pruned",
        12.5, 1.2 + sum(tall),
    )  # fmt: skip
    grid = drawn.subplots(len(panels), 2, squeeze=False, width_ratios=(3, 1), height_ratios=tall)
    for (bars, counts), panel in zip(grid, panels, strict=True):
        places = {life["expert"]: place for place, life in enumerate(panel["lives"])}
        for life in panel["lives"]:
            place, end = places[life["expert"]], spec["last"] if life["ended"] is None else life["ended"]
            bars.plot([life["born"], end], [place, place], color=_ROWS, linewidth=5, solid_capstyle="butt", alpha=0.55)
            if life["born"]:
                bars.plot(life["born"], place, "o", color="#15845a", markersize=7)
            if life["end"] is not None:
                marker, colour = _ENDS[life["end"]]
                bars.plot(end, place, marker, color=colour, markersize=7)
                if life["heir"] in places:
                    bars.plot([end, end], [place, places[life["heir"]]], color=colour, linewidth=1.0, linestyle=":")
        _plain(bars, rows=len(places))
        bars.set_yticks(range(len(places)), [str(expert) for expert in places])
        bars.set_ylabel(f"layer {panel['layer']}: expert", fontsize=10.5, color=_INK)
        counts.step(panel["steps"], panel["counts"], where="post", color=_ROWS, linewidth=1.8)
        counts.set_ylim(0, max(panel["counts"]) + 1)
        counts.tick_params(colors=_SOFT, labelsize=9, length=0)
        counts.spines[["top", "right", "left"]].set_visible(False)
        counts.yaxis.set_major_locator(MaxNLocator(integer=True))
        counts.grid(True, axis="y", color=_GRID)
        for axes in (bars, counts):
            axes.set_xlim(0, max(1, 1.02 * spec["last"]))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for axes, name in zip(grid[-1], ("step", "experts over the steps"), strict=True):
        axes.set_xlabel(name, fontsize=10, color=_SOFT)
    return drawn


def knowledge_graph(spec: Mapping[str, Any]) -> Figure:
    """The experts of each layer on a circle, with the edges between them in the colour of their type."""
    layers = sorted({node["layer"] for node in spec["nodes"]})
    columns = min(4, len(layers))
    lines = -(-len(layers) // columns)
    of = "no sleep cycle yet: no edges" if spec["of_step"] is None else f"edges of the cycle at step {spec['of_step']}"
    drawn = _titled(f"{spec['title']}\n{of}", 4.2 * columns + 2.2, 4.4 * lines + 0.8)
    grid = drawn.subplots(lines, columns, squeeze=False).flat
    for axes in grid:
        axes.set_axis_off()
        axes.set_aspect("equal")
    most = max((node["uses"] for node in spec["nodes"]), default=0.0) or 1.0
    for axes, layer in zip(drawn.axes, layers, strict=False):
        own = [node for node in spec["nodes"] if node["layer"] == layer]
        places = {
            node["expert"]: (math.cos(2 * math.pi * n / len(own)), math.sin(2 * math.pi * n / len(own)))
            for n, node in enumerate(own)
        }
        between: dict[tuple[int, int], int] = {}  # edges between the same two experts run beside each other
        for edge in (edge for edge in spec["edges"] if edge["one"][0] == layer):
            one, other = sorted((edge["one"][1], edge["other"][1]))
            number = between[one, other] = between.get((one, other), -1) + 1
            (x1, y1), (x2, y2) = places[one], places[other]
            long = math.hypot(x2 - x1, y2 - y1) or 1.0
            aside = 0.055 * (-(number // 2) - 1 if number % 2 else number // 2)
            dx, dy = -(y2 - y1) / long * aside, (x2 - x1) / long * aside
            axes.plot([x1 + dx, x2 + dx], [y1 + dy, y2 + dy], color=_EDGES.get(edge["type"], _SOFT),
                      linewidth=0.6 + 3.2 * edge["weight"], alpha=0.8, zorder=0)  # fmt: skip
        for node in own:
            x, y = places[node["expert"]]
            axes.plot(x, y, "o", markersize=16 + 18 * math.sqrt(node["uses"] / most), color="#cfe0fa",
                      markeredgecolor=_ROWS, markeredgewidth=1.6)  # fmt: skip
            axes.text(x, y, str(node["expert"]), ha="center", va="center", fontsize=11, color=_INK)
        axes.set_title(f"layer {layer}", fontsize=11, color=_INK)
        axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
    shown = {edge["type"] for edge in spec["edges"]}
    handles = [
        Line2D([], [], color=colour, linewidth=2.4, label=kind) for kind, colour in _EDGES.items() if kind in shown
    ]
    if handles:
        drawn.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=10, labelcolor=_INK)
    return drawn
