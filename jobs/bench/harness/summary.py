"""The Markdown summary of measurements: `raytrain report FILE.json`. All its figures come from that file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs.bench.harness.options import find_benches
from raytrain.errors import InputError

VERDICTS = ("reproduced", "not reproduced", "not measurable here")
EXPECTED = "a JSON document of `raytrain bench`"


def write_summary(path: Path) -> Path:
    """Writes FILE.md beside a bench's FILE.json and returns its path.

    Raises:
        InputError: no such file, or not a document of a bench.
    """
    document = _read(path)
    page = path.with_suffix(".md")
    page.write_text("\n".join(summary_lines(document)) + "\n", encoding="utf-8")
    return page


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """The summary as Markdown: machine and command, claims with verdicts, all ratios, failed gates."""
    name = document["bench"]
    documents = document["values"]["benches"] if name == "all" else {name: document}
    rows = table(documents)
    failed = [
        f"- {bench}, {check['name']}: {check['detail']}"
        for bench, one in {**documents, name: document}.items()
        for check in one["gate"]["checks"]
        if not check["passed"]
    ]
    return [
        f"# Measured: {name}", "", *_machine(document), "", count_line(rows), "", *markdown(rows), "",
        "## Every ratio", "", *_ratios(documents), *(["", "## Not compared", "", *failed] if failed else []),
    ]  # fmt: skip


def table(documents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each claim and for each ratio with a goal: {bench, claim, figure, verdict}."""
    rows: list[dict[str, str]] = []
    for name, document in documents.items():
        for claim in document["claims"]:
            rows.append({"bench": name, "claim": claim["effect"], "figure": claim["evidence"],
                         "verdict": claim["verdict"]})  # fmt: skip
        for ratio in document["ratios"]:
            if ratio["goal"] is not None:
                verdict = VERDICTS[2] if document["quick"] else VERDICTS[0] if ratio["met"] else VERDICTS[1]
                rows.append({"bench": name, "claim": f"{ratio['name']}: {_goal(ratio['goal'])}",
                             "figure": _figure(ratio), "verdict": verdict})  # fmt: skip
        if not document["gate"]["passed"]:
            rows.append({"bench": name, "claim": find_benches()[name].measures, "verdict": VERDICTS[2],
                         "figure": "its arms do not compute the same thing"})  # fmt: skip
    return [{key: " ".join(value.split()) for key, value in row.items()} for row in rows]


def _goal(goal: Mapping[str, Any]) -> str:
    least, most = goal["at_least"], goal["at_most"]
    return f"at least {least}" if least is not None else f"at most {most}"


def _figure(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] over {len(ratio['values'])} blocks"


def markdown(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The table as Markdown."""
    cells = ("bench", "claim", "figure", "verdict")
    head = ["| bench | claim | our figure, with its 95 % interval | verdict |", "|---|---|---|---|"]
    return [*head, *("| " + " | ".join(row[cell].replace("|", "/") for cell in cells) + " |" for row in rows)]


def count_line(rows: list[dict[str, str]]) -> str:
    """The number of claims by verdict."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    return f"{len(rows)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _machine(document: Mapping[str, Any]) -> list[str]:
    seen = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in (seen.get("versions") or {}).items() if version)
    gpus = ", ".join(map(str, seen.get("gpus") or [])) or "no GPU"
    quick = ["Small sizes (`--quick`): they show that the benches run; the figures are not meaningful."]
    return [
        f"{seen['date']} on {seen.get('cpu_model')}, {seen.get('cores')} cores, {gpus}; {versions}.",
        f"Load average {seen['load_before']:g} before, {seen['load_after']:g} after; {seen['seconds']:.0f} s in all.",
        f"Command: `{seen['command']}`",
        *(quick if document["quick"] else []),
    ]


def _ratios(documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| bench | ratio | median, 95 % interval | blocks | says |", "|---|---|---|---|---|"]
    for bench, document in documents.items():
        for ratio in document["ratios"]:
            says = ratio["verdict"] if "difference" in ratio["verdict"] else f"{ratio['to']} is {ratio['verdict']}"
            figure = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            lines.append(f"| {bench} | {ratio['name']} | {figure} | {len(ratio['values'])} | {says} |")
    return lines


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(str(path), got="no such file", expected=EXPECTED) from error
    except (OSError, ValueError) as error:
        raise InputError(str(path), got=str(error), expected=EXPECTED) from error
    needed = {"bench", "environment", "gate", "ratios", "claims", "values"}
    missing = sorted(needed - set(document)) if isinstance(document, dict) else sorted(needed)
    if missing:
        raise InputError(str(path), got=f"JSON without {', '.join(missing)}", expected=EXPECTED)
    return document
