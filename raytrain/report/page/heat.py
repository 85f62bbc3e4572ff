"""The rows of each expert over time as a heat map in the style of the charts: inline SVG in the colours of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytrain.report.page.charts import short, ticks
from raytrain.report.page.style import esc
from raytrain.report.records import listed, mapping

FULL = 2.0
"""A share of this many times the even one has the full colour."""
TITLED = 1500
"""With more cells, these have no tooltips: the page would grow to megabytes."""
NAMED = 16
"""With more experts in a layer, only some rows are named."""


def expert_maps(spec: Mapping[str, Any] | None) -> str:
    """A heat map for each layer of `activation_spec`; "" without experts."""
    if spec is None:
        return ""
    edges = [float(edge) for edge in listed(spec.get("edges"))]
    panels = [mapping(panel) for panel in listed(spec.get("panels"))]
    if len(edges) < 2 or not panels:
        return ""
    cells = sum(len(row) for panel in panels for row in listed(panel.get("over_time")))
    late = float(spec.get("late_from") or 0)
    maps = "".join(_layer(panel, edges, late=late, titled=cells <= TITLED) for panel in panels)
    drawn = f" {len(panels)} of {spec['layers']} layers." if int(spec.get("layers") or 0) > len(panels) else ""
    note = (
        "The share of its layer's rows that each expert received, per interval of steps: the stronger the colour, the "
        f"more; half of it is an even share. Red: no rows, or none in the last quarter of the run.{drawn}"
    )
    scale = "".join(f'<i style="--share:{share / 8:g}"></i>' for share in range(9))
    legend = f'<p class="note">{esc(note)}</p><p class="heatscale">0 {scale} {FULL:g} x even</p>'
    return f'<div class="charts">{maps}</div>{legend}'


def _layer(panel: Mapping[str, Any], edges: Sequence[float], *, late: float, titled: bool) -> str:
    rows, totals, used = (listed(panel.get(name)) for name in ("over_time", "totals", "last_used"))
    left, right, height = edges[0], edges[-1], 1000 / max(1, len(rows))
    rects = []
    for expert, shares in enumerate(rows):
        for index, share in enumerate(shares):
            start, end = (1000 * (edges[index + step] - left) / (right - left) for step in (0, 1))
            colour = ' class="none"' if not share else f' style="--share:{min(1.0, share / FULL):.2f}"'
            title = f"expert {expert}, steps {short(edges[index])} to {short(edges[index + 1])}: {share:.2f} x even"
            place = f'x="{start:.1f}" y="{expert * height:.1f}" width="{end - start:.1f}" height="{height:.1f}"'
            rects.append(f"<rect {place}{colour}>{f'<title>{esc(title)}</title>' if titled else ''}</rect>")
    step = -(-len(rows) // NAMED)
    names = []
    for expert in range(0, len(rows), step):
        dead = used[expert] is None or float(used[expert]) <= late if expert < len(used) else False
        total = f' title="{int(totals[expert]):,} rows in all"' if expert < len(totals) else ""
        place = f"top:{(expert + 0.5) * height / 10:.2f}%"
        names.append(f'<span class="yt{" dead" if dead else ""}" style="{place}"{total}>{expert}</span>')
    places = (
        f'<span class="xt" style="left:{100 * (x - left) / (right - left):.2f}%">{short(x)}</span>'
        for x in ticks(left, right, 6)
    )
    number = panel.get("layer")
    about = f"rows of the {len(rows)} experts of layer {number} over the steps"
    return (
        f'<figure class="chart wide"><figcaption><span class="title">Layer {esc(number)}: rows of each expert</span>'
        f'</figcaption><div class="plot heat" style="height:{min(420, max(80, 22 * len(rows)))}px">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{esc(about)}">'
        f'{"".join(rects)}</svg>{"".join(names)}{"".join(places)}<span class="xl">step</span></div></figure>'
    )
