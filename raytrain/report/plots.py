"""Draws the pictures of the report, each from a plot spec that holds exactly the plotted numbers.

Specs are JSON mappings built by pure functions (`figures.training_spec`, those in `experts` and in `tune_figures`);
`figure`, `activations` and `devices` draw them. This is the only module that imports matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raytrain.report.figures import size

_COLOURS = {
    "train": "#2f6bd8", "eval": "#d2600a", "gradient norm": "#8b46c1", "epoch": "#15845a", "step": "#15845a",
    "fp32": "#2f6bd8", "bf16": "#d2600a", "fp16": "#8b46c1", "tf32": "#15845a",
}  # fmt: skip
_INK, _SOFT, _GRID = "#18212c", "#566170", "#e3e7ec"
_FROM_ZERO = ("seconds", "rows/s", "MiB")


def figure(spec: Mapping[str, Any]) -> Figure:
    """Draws a spec on a new canvas, without touching matplotlib's global state."""
    drawn = Figure(figsize=(15, 4.6), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(spec["title"], x=0.008, ha="left", fontsize=14, fontweight="bold", color=_INK, parse_math=False)
    for axes, panel in zip(drawn.subplots(1, len(spec["panels"]), squeeze=False)[0], spec["panels"], strict=True):
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
        _mark(axes, panel)
        if sum(bool(line["label"]) for line in panel["series"]) > 1:
            axes.legend(frameon=False, fontsize=11, labelcolor=_INK)
        if not panel["series"]:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=_SOFT, fontsize=12)
        elif panel["y_label"] in _FROM_ZERO:
            axes.set_ylim(0, max(1.12 * axes.dataLim.y1, axes.get_ylim()[1]))
    return drawn


def png(drawn: Figure) -> bytes:
    """The figure as a PNG file."""
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

_ROWS, _DEAD, _REPLICA = "#2f6bd8", "#d2600a", "#18212c"
_SHARES = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#cfe0fa", "#2f6bd8", "#0d2a5e"]).with_extremes(
    bad="#f7cdb6"
)
_HOSTS = ("#2f6bd8", "#e08a3c", "#15845a", "#8b46c1", "#c23b5e", "#2a9aa8", "#8a6d3b", "#6b7785", "#a3b32a", "#e39ac0")
_NAMED = 24
"""Most hosts for which names and numbers are shown."""
_LABELLED = 8
"""Most experts of a layer for which counts are written next to the bars."""


def activations(spec: Mapping[str, Any]) -> Figure:
    """One row of panels per layer: its experts over time, their totals, and the last use of each."""
    panels = spec["panels"]
    most = max(len(panel["totals"]) for panel in panels)
    blocks = 1 if len(panels) <= 8 else 2 if len(panels) <= 16 else 3
    lines, each = -(-len(panels) // blocks), min(1.9, max(0.95, 0.2 * most))
    wide, high = (12.5, 9.2, 8.2)[blocks - 1] * blocks, each * lines + 2.0
    drawn = _titled(spec["title"], "rows of each expert, layer by layer", wide, high)
    outer = drawn.add_gridspec(
        1, blocks, left=0.62 / wide + 0.018, right=1 - 0.25 / wide, top=1 - 1.35 / high, bottom=0.62 / high,
        wspace=0.42 / (wide / blocks) * 1.6,
    )  # fmt: skip
    values = sorted(value for panel in panels for line in panel["over_time"] for value in line)
    scale = Normalize(0.0, max(2.0, values[int(0.99 * (len(values) - 1))] if values else 2.0))
    top = max(max(panel["totals"], default=0) for panel in panels) or 1
    for place, panel in enumerate(panels):
        block, line = divmod(place, lines)
        inner = outer[block].subgridspec(lines, 3, width_ratios=(5, 1.9, 1.6), wspace=0.11, hspace=0.16)
        axes = [drawn.add_subplot(inner[line, column]) for column in range(3)]
        _draw_layer(axes, panel, spec, scale=scale, top=top)
        last = line == lines - 1 or place == len(panels) - 1
        for one, name in zip(axes, ("step", "total rows", "last used at step"), strict=True):
            one.tick_params(labelbottom=last)
            one.set_xlabel(name if last else "", fontsize=10, color=_SOFT)
    bar = drawn.add_axes((1 - 3.6 / wide, 1 - 0.62 / high, 3.1 / wide, 0.13 / high))
    drawn.colorbar(ScalarMappable(scale, _SHARES), cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=9, colors=_SOFT, length=0)
    bar.set_title("share of the layer's rows, 1 = even", fontsize=9.5, color=_SOFT, loc="left", pad=4)
    note = "orange: no rows in that interval; orange bars and dots: none in the last quarter of the run; x: never used"
    drawn.text(0.25 / wide, 1 - 0.88 / high, note, fontsize=9.5, color=_SOFT)
    return drawn


def _titled(title: str, what: str, wide: float, high: float) -> Figure:
    drawn = Figure(figsize=(wide, high), dpi=110, facecolor="white")
    FigureCanvasAgg(drawn)
    style = {"ha": "left", "va": "top", "parse_math": False}
    drawn.text(0.25 / wide, 1 - 0.18 / high, title, fontsize=14, fontweight="bold", color=_INK, **style)
    drawn.text(0.25 / wide, 1 - 0.48 / high, what, fontsize=11, color=_SOFT, **style)
    return drawn


def _draw_layer(
    axes: Sequence[Any], panel: Mapping[str, Any], spec: Mapping[str, Any], *, scale: Normalize, top: int
) -> None:
    heat, totals, recency = axes
    number, edges = len(panel["totals"]), spec["edges"]
    mesh = [[value if value else float("nan") for value in line] for line in panel["over_time"]]
    heat.pcolormesh(edges, [n - 0.5 for n in range(number + 1)], mesh, cmap=_SHARES, norm=scale)
    heat.set_ylabel(f"layer {panel['layer']}", fontsize=10.5, color=_INK, labelpad=6)
    used = [spec["late_from"] < (step or 0) for step in panel["last_used"]]
    colours = [_ROWS if late else _DEAD for late in used]
    totals.barh(range(number), panel["totals"], color=colours, height=0.78 if number <= 24 else 1.0)
    totals.set_xlim(0, top * (1.34 if number <= _LABELLED else 1.04))
    if number <= _LABELLED:
        for expert, count in enumerate(panel["totals"]):
            totals.text(count + 0.03 * top, expert, _short(count), va="center", fontsize=9, color=_SOFT)
    seen = [(step, expert) for expert, step in enumerate(panel["last_used"]) if step is not None]
    dots = {"s": 26 if number <= 24 else 7, "clip_on": False, "zorder": 3}
    recency.scatter(*zip(*seen, strict=True), c=[colours[e] for _, e in seen], **dots) if seen else None
    never = [expert for expert, step in enumerate(panel["last_used"]) if step is None]
    recency.scatter([edges[0]] * len(never), never, c=_DEAD, marker="x", **{**dots, "s": 22 if number <= 24 else 9})
    room = 0.05 * max(1, edges[-1] - edges[0])
    recency.set_xlim(edges[0] - room, edges[-1] + room)
    for one in axes:
        one.set_ylim(number - 0.5, -0.5)
        one.tick_params(colors=_SOFT, labelsize=9, length=0)
        one.tick_params(labelleft=one is heat)
        one.yaxis.set_major_locator(MaxNLocator(nbins=min(number, 4), integer=True, steps=[1, 2, 4, 8, 10]))
        one.xaxis.set_major_locator(MaxNLocator(nbins=5 if one is heat else 2, integer=True))
        if one is recency:
            one.set_xticks([edges[0], edges[-1]])
        one.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        for side in ("top", "right", "left", "bottom"):
            one.spines[side].set_visible(one is heat)
            one.spines[side].set_color("#c3cad3")
        if one is not heat:
            one.grid(True, axis="x", color=_GRID, linewidth=0.9)
            one.set_axisbelow(True)


def _short(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:,.0f}"


def devices(spec: Mapping[str, Any]) -> Figure:
    """Experts, bytes and load of each host, and a map of the home host of every expert."""
    names, copies = spec["names"], spec["copies"]
    hosts, layers, most = len(names), len(copies), max(map(len, copies))
    bars = min(7.0, max(1.3, 0.33 * hosts))
    margin = 0.5 + 0.08 * max(map(len, names))
    cell = min(0.45, max(0.16, 6.0 / layers), max(0.16, 18.0 / most))
    wide, high = 10.9 + margin, bars + cell * layers + 2.75
    drawn = _titled(spec["title"], f"expert placement {spec['version']}", wide, high)
    left, right = margin / wide, 1 - 0.45 / wide
    upper = drawn.add_gridspec(
        1, 3, left=left, right=right, top=1 - 1.2 / high, bottom=1 - (1.2 + bars) / high, wspace=0.1
    )
    palette = _palette(hosts)
    panels = [drawn.add_subplot(upper[0, column]) for column in range(3)]
    _draw_hosts(panels, spec, palette)
    across = min(2 * cell * most, 9.4)
    grid = drawn.add_axes((left, 0.72 / high, across / wide, cell * layers / high))
    _draw_map(grid, copies, palette, across=across / most, down=cell)
    caption = "each cell is one expert, in the colour of its host"
    caption += "; a dot is a replica, in the colour of its host" if any(spec["replicas"]) else ""
    grid.set_title(caption, loc="left", fontsize=10, color=_SOFT, pad=7)
    return drawn


def _palette(hosts: int) -> list[Any]:
    if hosts <= len(_HOSTS):
        return list(_HOSTS[:hosts])
    spread: Colormap = colormaps["turbo"]
    return [spread(0.05 + 0.9 * host / (hosts - 1)) for host in range(hosts)]


def _draw_hosts(axes: Sequence[Any], spec: Mapping[str, Any], palette: Sequence[Any]) -> None:
    hosts, total, busy = len(spec["names"]), sum(spec["rows"]) or 1, sum(spec["busy_s"]) or 0.0
    shares = [100 * rows / total for rows in spec["rows"]] or [0.0] * hosts
    texts = [f"{own} + {more}" if more else f"{own}" for own, more in zip(spec["homes"], spec["replicas"], strict=True)]
    sizes = [size(used) for used in spec["bytes"]]
    percents = [f"{share:.3g} %" for share in shares]
    if busy:
        spent = [f"{100 * own / busy:.3g} % of busy time" for own in spec["busy_s"]]
        percents = [f"{one}; {own}" for one, own in zip(percents, spent, strict=True)]
    span = f", {size(min(spec['bytes']))} to {size(max(spec['bytes']))}" if hosts > _NAMED else ""
    titles = (
        "experts" + (" + replicas" if any(spec["replicas"]) else ""),
        f"memory of experts{span}",
        "share of the rows, last quarter",
    )
    columns = (spec["homes"], spec["bytes"], shares)
    for place, (one, values, labels) in enumerate(zip(axes, columns, (texts, sizes, percents), strict=True)):
        ends = list(values)
        one.barh(range(hosts), values, color=palette, height=0.72)
        if place == 0:
            one.barh(
                range(hosts), spec["replicas"], left=values, color="white", edgecolor=palette, hatch="////", height=0.68
            )
            ends = [own + more for own, more in zip(values, spec["replicas"], strict=True)]
        top = max(ends) or 1
        if hosts <= _NAMED:
            for host, (end, text) in enumerate(zip(ends, labels, strict=True)):
                one.text(end + 0.02 * top, host, text, va="center", fontsize=9.5, color=_SOFT)
        one.set_xlim(0, top * ((2.2 if busy and place == 2 else 1.4) if hosts <= _NAMED else 1.04))
        one.set_ylim(hosts - 0.5, -0.5)
        step = -(-hosts // _NAMED)
        one.set_yticks(range(0, hosts, step), spec["names"][::step])
        one.tick_params(labelleft=place == 0)
        one.set_title(titles[place], loc="left", fontsize=11, color=_INK, pad=6)
        one.tick_params(colors=_INK, labelsize=10, length=0, labelbottom=hosts > _NAMED and place != 1)
        for side in ("top", "right", "left", "bottom"):
            one.spines[side].set_visible(False)


def _draw_map(axes: Any, copies: Sequence[Any], palette: Sequence[Any], *, across: float, down: float) -> None:
    layers, most = len(copies), max(map(len, copies))
    homes = [[own[0] for own in layer] + [float("nan")] * (most - len(layer)) for layer in copies]
    scale = Normalize(-0.5, len(palette) - 0.5)
    edges = [n - 0.5 for n in range(most + 1)], [n - 0.5 for n in range(layers + 1)]
    axes.pcolormesh(*edges, homes, cmap=ListedColormap(list(palette)), norm=scale, edgecolors="white", linewidth=0.8)
    for layer, row in enumerate(copies):
        for expert, own in enumerate(row):
            if min(across, down) >= 0.3:
                dark = sum(to_rgb(palette[own[0]])) < 1.9
                at = expert - (0.18 if len(own) > 1 else 0.0)
                axes.text(at, layer, own[0], ha="center", va="center", fontsize=9, color="white" if dark else _INK)
            side, spread = (0.24, 0.2) if min(across, down) >= 0.3 else (0.0, 0.5)
            for number, host in enumerate(own[1:]):
                at = expert + side + spread * (number - 0.5 * (len(own) - 2))
                size_pt = (0.24 if side else 0.55) * 72 * min(across, down) / (1 if side else len(own) - 1)
                axes.scatter(at, layer, color=[palette[host]], s=size_pt**2, linewidths=0.9, edgecolors="white")
    axes.set_ylim(layers - 0.5, -0.5)
    axes.set_xlabel("expert", fontsize=10, color=_SOFT)
    axes.set_ylabel("layer", fontsize=10, color=_SOFT)
    axes.tick_params(colors=_SOFT, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(most, 16), integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=max(1, min(layers, int(layers * down / 0.22))), integer=True))
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
