"""The frame of a report page: escaping, content security policy, and style sheet (light, dark, small screens)."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def esc(value: object) -> str:
    """Escape text for HTML, also inside attributes; control characters and lone surrogates are removed."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return html.escape("".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))


def page(title: str, body: str) -> str:
    """A complete HTML document. Its policy forbids scripts and all requests, so that it opens offline. `title`: plain
    text; `body`: HTML, already escaped."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(title)}</title><style>{STYLE}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def picture(alt: str, data: bytes) -> str:
    encoded = base64.b64encode(data).decode()
    return f'<img alt="{esc(alt)}" loading="lazy" style="max-width:100%" src="data:image/png;base64,{encoded}">'


def card(inner: str) -> str:
    return f'<div class="card">{inner}</div>'


def sections(parts: Sequence[tuple[str, str, str]]) -> tuple[str, str]:
    """(links, sections) of (id, title, HTML); those without content are left out."""
    shown = [(key, title, body) for key, title, body in parts if body]
    links = "".join(f'<a href="#{key}">{esc(title)}</a>' for key, title, _ in shown)
    body = "".join(f'<section id="{key}"><h2>{esc(title)}</h2>{body}</section>' for key, title, body in shown)
    return f"<nav>{links}</nav>", body


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Boxes of (name, value, note); those without a value are left out."""
    cells = "".join(
        f'<dl class="tile"><dt>{esc(name)}</dt><dd>{esc(value)}<small>{esc(note)}</small></dd></dl>'
        for name, value, note in figures
        if value and value != "-"
    )
    return f'<div class="tiles">{cells}</div>'


def header(brand: str, title: str, state: str, tone: str, lead: str, facts: Sequence[str] = ()) -> str:
    """The head of a page: a title with a coloured state, a sentence, and facts, of which "" is left out."""
    shown = "".join(f"<span>{esc(fact)}</span>" for fact in facts if fact)
    meta = f'<p class="meta">{shown}</p>' if facts else ""
    return (
        f'<header><p class="brand">raytrain {brand}</p><div class="head"><h1>{esc(title)}</h1>'
        f'<span class="pill {tone}">{esc(state)}</span></div><p class="lead">{esc(lead)}</p>{meta}</header>'
    )


def finding(severity: str, title: str, evidence: str, remedy: str = "", options: Sequence[str] = ()) -> str:
    items = "".join(f"<li>{esc(one)}</li>" for one in options)
    more = (f"<p class=remedy>{esc(remedy)}</p>" if remedy else "") + (f"<ol>{items}</ol>" if items else "")
    return (
        f'<article class="card finding {severity}"><span class="badge">{severity}</span>'
        f"<b>{esc(title)}</b><p>{esc(evidence)}</p>{more}</article>"
    )


STYLE = (
    """
:root{
  --bg:#f5f6f8; --card:#fff; --ink:#18212c; --soft:#566170; --line:#e1e5ea; --grid:#e9ecf0;
  --accent:#2459cf; --c1:#2f6bd8; --c2:#d2600a; --c3:#15845a; --c4:#8b46c1; --c5:#c02b5e; --c6:#0e7f93;
  --c7:#8a6a00; --c8:#5b6675; --c9:#a9745b; --c10:#9aa4b0; --c11:#7a3b3b; --c12:#4b4f9c;
  --good:#157347; --goodbg:#e4f5ec; --bad:#b3261e; --badbg:#fde9e7; --warn:#8a5300; --warnbg:#fdf1dc;
  --info:#2459cf; --infobg:#e8effc;
  --chip:#eef1f5; --tip:#18212c; --tipink:#fff}
@media screen and (prefers-color-scheme:dark){
  :root{
    --bg:#0e1318; --card:#161d25; --ink:#e7ecf2; --soft:#a0acba; --line:#29323d; --grid:#232c36;
    --accent:#7fb0ff; --c1:#74a9ff; --c2:#ffa24f; --c3:#4fcf97; --c4:#c69cf4; --c5:#ff86ab; --c6:#4fd0e3;
    --c7:#e0bd4a; --c8:#a3afbd; --c9:#d3a58e; --c10:#66727f; --c11:#e39a9a; --c12:#9aa0ef;
    --good:#58d399; --goodbg:#12301f; --bad:#ff8a80; --badbg:#3b1816; --warn:#f5be62; --warnbg:#35270d;
    --info:#8db8ff; --infobg:#15264a;
    --chip:#222b35; --tip:#e7ecf2; --tipink:#10161d}
}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{
  margin:0; background:var(--bg); color:var(--ink); line-height:1.5; font-size:15px;
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 56px}
h1{font-size:27px;line-height:1.2;margin:2px 0 0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px;letter-spacing:-.01em}
h3{font-size:14px;margin:20px 0 6px;color:var(--soft);font-weight:600}
p{margin:0}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font-size:.92em}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
.brand{font-size:12px;font-weight:650;letter-spacing:.09em;text-transform:uppercase;color:var(--soft)}
.head{display:flex;gap:14px;align-items:center;flex-wrap:wrap}
.pill{font-size:13px;font-weight:650;padding:3px 11px;border-radius:99px;white-space:nowrap}
.good{--tone:var(--good);--tonebg:var(--goodbg)}
.error{--tone:var(--bad);--tonebg:var(--badbg)}
.warning{--tone:var(--warn);--tonebg:var(--warnbg)}
.info{--tone:var(--info);--tonebg:var(--infobg)}
.pill,.badge{color:var(--tone,var(--soft));background:var(--tonebg,var(--chip))}
.lead{font-size:17px;margin-top:10px;max-width:72ch;overflow-wrap:anywhere}
.meta{color:var(--soft);font-size:13.5px;margin-top:6px;display:flex;flex-wrap:wrap;gap:2px 18px}
nav{
  display:flex; flex-wrap:wrap; gap:4px 18px; margin-top:14px; padding-top:12px;
  border-top:1px solid var(--line); font-size:14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin-top:20px}
.card,.tile,.chart{background:var(--card);border:1px solid var(--line);border-radius:10px;min-width:0}
.tile{padding:12px 14px;margin:0}
.tile dt{font-size:13px;color:var(--soft)}
.tile dd{
  margin:2px 0 0; font-size:23px; font-weight:620; letter-spacing:-.015em;
  font-variant-numeric:tabular-nums; line-height:1.25}
.tile small{display:block;font-size:12.5px;font-weight:400;color:var(--soft);letter-spacing:0}
.card{padding:16px 18px}
.narrow{max-width:620px}
.scroll{overflow-x:auto}
.findings{display:grid;gap:10px}
.tiles-gap{margin-top:20px}
.finding{
  display:grid; grid-template-columns:auto 1fr; gap:2px 12px; padding:12px 16px;
  border-left:4px solid var(--tone)}
.finding .badge{align-self:start;margin-top:1px;min-width:66px;text-align:center}
.finding b{font-weight:620}
.finding p{grid-column:2;color:var(--soft);font-size:14px;overflow-wrap:anywhere}
.finding p.remedy{color:var(--ink)}
.finding ol{grid-column:2;margin:2px 0 0;padding-left:20px;font-size:14px;overflow-wrap:anywhere}
.badge{
  display:inline-block; font-size:12px; font-weight:600; padding:1px 8px; border-radius:5px;
  white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
.wide,.chart:last-child:nth-child(even){grid-column:1/-1}
.devices>.chart:last-child:nth-child(even){grid-column:auto}
.devices>.chart:last-child:nth-child(odd){grid-column:1/-1}
.chart{margin:0;padding:14px 18px 12px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 16px;align-items:baseline;justify-content:space-between}
.title{font-weight:620}
.note{font-size:13px;color:var(--soft)}
.card+.note,.charts+.note{margin-top:8px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--soft)}
.key{
  display:inline-block; width:14px; height:3px; border-radius:2px; background:currentColor;
  margin-right:6px; vertical-align:middle}
.key.dots{height:7px;width:7px;border-radius:50%}
.plot{position:relative;height:200px;margin:12px 4px 36px 46px}
.wide .plot{height:290px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
svg path{
  fill:none; stroke:currentColor; vector-effect:non-scaling-stroke; stroke-linejoin:round;
  stroke-linecap:round}
.line{stroke-width:2}
.faint{stroke-width:1;opacity:.33}
.devices .faint{stroke-width:1.5;opacity:.5}
.dot{stroke-width:7}
.dashed{stroke-dasharray:7 7}
svg .grid{color:var(--grid);stroke-width:1}
svg .axis{color:var(--soft);stroke-width:1;opacity:.6}
svg .restart{stroke-dasharray:3 4;stroke-width:1.5}
svg .checkpoint{stroke-width:2}
"""
    + "".join(f".c{number}{{color:var(--c{number})}}\n" for number in range(1, 13))
    + """\
.restart{color:var(--bad)}
.checkpoint{color:var(--soft)}
.key.dashed,.key.restart{
  width:18px; height:2px; border-radius:0;
  background:repeating-linear-gradient(90deg,currentColor 0 4px,transparent 4px 7px)}
.key.checkpoint{width:2px;height:9px}
.yt,.xt{
  position:absolute; font-size:12px; color:var(--soft); font-variant-numeric:tabular-nums; line-height:1;
  white-space:nowrap}
.yt{right:100%;margin-right:8px;transform:translateY(-50%)}
.xt{top:100%;margin-top:8px;transform:translateX(-50%)}
.xl{position:absolute;right:0;top:100%;margin-top:23px;font-size:12px;line-height:1;color:var(--soft)}
.hit{position:absolute;top:0;bottom:0}
.hit>i,.tip{position:absolute;display:none;pointer-events:none}
.hit>i{top:0;bottom:0;border-left:1px solid var(--soft)}
.hit:hover>i,.hit:hover .tip{display:block}
.tip{
  top:4px; z-index:2; background:var(--tip); color:var(--tipink); font-size:12.5px; line-height:1.5;
  padding:6px 10px; border-radius:6px; white-space:nowrap; font-variant-numeric:tabular-nums}
.l .tip{left:calc(100% + 6px)}
.r .tip{right:calc(100% + 6px)}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;text-align:left;color:var(--soft);font-size:13px}
th,td{padding:7px 12px 7px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.v{font-weight:600;font-variant-numeric:tabular-nums}
td.k,th.k,th.v{white-space:nowrap;overflow-wrap:normal}
td.v,th.v{min-width:104px}
.soft{color:var(--soft)}
td.soft{font-size:13.5px}
.bar{
  display:flex; height:26px; border-radius:6px; overflow:hidden; margin-bottom:12px; gap:1px;
  background:var(--card)}
.bar i{background:currentColor;min-width:0}
.swatch{
  display:inline-block; width:10px; height:10px; border-radius:3px; background:currentColor;
  margin-right:8px}
.events{list-style:none;margin:0;padding:0}
.events li{
  display:grid; grid-template-columns:104px 1fr; gap:4px 14px; padding:7px 0;
  border-bottom:1px solid var(--line); font-size:14px}
.events li:last-child{border:0}
.events time{
  color:var(--soft); text-align:right; font-variant-numeric:tabular-nums; font-size:13px; padding-top:1px;
  white-space:nowrap}
.events p{overflow-wrap:anywhere}
.events .soft{font-size:13px}
pre{
  margin:0; white-space:pre-wrap; overflow-wrap:anywhere; font-size:13.5px; line-height:1.55;
  max-height:640px; overflow:auto}
pre .prompt{color:var(--soft)}
details{margin-top:12px}
summary{cursor:pointer;font-weight:600;font-size:14px;color:var(--accent)}
details>div,details>pre{margin-top:10px}
.pairs{display:grid;grid-template-columns:max-content 1fr;gap:6px 22px;margin:0;font-size:14px}
.pairs dt{color:var(--soft)}
.pairs dd{margin:0;overflow-wrap:anywhere}
footer{margin-top:44px;color:var(--soft);font-size:13px}
footer p+p{margin-top:4px}
@media screen and (max-width:760px){
  main{padding:20px 14px 40px}
  .charts,.pairs,.events li{grid-template-columns:minmax(0,1fr)}
  .events time{text-align:left}
}
@media print{
  *{-webkit-print-color-adjust:exact;print-color-adjust:exact}
  .tile,.chart,.finding,.events li,tr{break-inside:avoid}
  nav{display:none}
}
"""
)
