"""The verb `bench`: the registry of benches, their options, running one, and the Markdown summary. Torch-free.

`raytrain bench` and `raytrain report FILE.json` call it; it finds the benches by their modules.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import click
from pydantic import Field

from cluster.config import Count, NonNegativeInt, Section
from cluster.devices.inventory import local_inventory
from raytrain.config.decode import decode, parse_override
from raytrain.config.messages import key_rows
from raytrain.errors import InputError
from raytrain.runs.records import plain

# ---------------------------------------------------------------- options
# Options of all benches, and the registry of benches.


BENCHES = (
    "claims", "loop", "checkpoint", "moves", "recovery", "experts", "lifecycle", "tune", "infer", "startup", "scaling",
    "peers", "lr", "continual", "all",
)  # fmt: skip
"""The modules of jobs/bench that are benches, in the order of `bench --list` and of bench `all`."""


class BenchOptions(Section):
    """Options of one bench; each bench derives its own class, the type of the `options` of its `run`.

    The first paragraph of its docstring is what `bench --list` says.

    Attributes:
        QUICK: values for `--quick`: sizes for a test, too small for meaningful figures.
        IN_ALL: whether bench `all` runs it.
        OUT: default path of its JSON document; None means a new file in runs/bench.
    """

    QUICK: ClassVar[dict[str, Any]] = {}
    IN_ALL: ClassVar[bool] = True
    OUT: ClassVar[str | None] = None

    seed: NonNegativeInt = Field(42, description="of weights, order and generated data")
    blocks: Count = Field(20, description="repetitions that are kept; each runs one block of every arm")
    threads: Count | Literal["auto"] = Field("auto", description="threads of one process, the same for every arm")

    @property
    def thread_count(self) -> int:
        """`threads`; the number of CPUs for "auto"."""
        return self.threads if isinstance(self.threads, int) else local_inventory().cpus


@dataclass(frozen=True)
class Bench:
    """A bench: its options, and `run(options, *, quick, say)`, which returns a `BenchMeasurement`."""

    name: str
    options: type[BenchOptions]
    run: Callable[..., Any]

    @property
    def measures(self) -> str:
        """What it measures, in one line."""
        return " ".join((self.options.__doc__ or "").partition("\n\n")[0].split())


@functools.cache
def find_benches() -> dict[str, Bench]:
    """All benches by name."""
    return {name: _load_bench(name) for name in BENCHES}


def _load_bench(name: str) -> Bench:
    module = importlib.import_module(f"jobs.bench.{name}")
    return Bench(name, get_type_hints(module.run)["options"], module.run)


# ---------------------------------------------------------------- summary
# The Markdown summary of measurements: `raytrain report FILE.json`.


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


# ---------------------------------------------------------------- command
# The verb `bench`: runs a bench with its keys, prints the result and writes a JSON document.


DEFAULT_FOLDER = Path("runs") / "bench"


def list_lines() -> list[str]:
    """A line for each bench: its name and what it measures."""
    benches = find_benches()
    width = max(len(name) for name in benches)
    return [f"{name:<{width}}  {bench.measures}" for name, bench in benches.items()]


def bench_names() -> list[tuple[str, str]]:
    """For `bench --help`: the name of each bench, and the first part of what it measures."""
    return [(name, re.split(r"[:;,] ", bench.measures)[0]) for name, bench in find_benches().items()]


def bench_section(name: str) -> tuple[str, list[tuple[str, str]]]:
    """For `bench NAME --help`: a title, and (`key = default`, meaning and accepted values) of each key.

    Raises:
        InputError: no such bench.
    """
    bench = find_bench(name)
    rows = [(f"{row.key} = {row.default}", f"{row.meaning} ({row.expected})") for row in key_rows(bench.options)]
    return f"Keys with their defaults, as key=value, of {name}: {bench.measures}", rows


def find_bench(name: str) -> Bench:
    """The bench of this name.

    Raises:
        InputError: there is none.
    """
    benches = find_benches()
    if name not in benches:
        raise InputError(
            "bench", got=name, expected=f"one of {', '.join(benches)}", remedy="`raytrain bench --list` describes them"
        )
    return benches[name]


def options_of(name: str, overrides: Sequence[str], *, quick: bool) -> BenchOptions:
    """The options of bench `name`: its defaults, overridden by the quick values, overridden by the command line.

    Raises:
        InputError: no such bench, or an unknown key or an invalid value.
    """
    kind = find_bench(name).options
    if "changes" in kind.model_fields:
        overrides = _with_changes(overrides, job="job" in kind.model_fields)
    given = dict(parse_override(text) for text in overrides)
    return decode(kind, {**(kind.QUICK if quick else {}), **given})


def _with_changes(arguments: Sequence[str], *, job: bool) -> list[str]:
    """Collect `section.key=value` arguments in the option `changes` and, with `job`, a JOB.yaml in the option `job`."""
    files = [text for text in arguments if "=" not in text] if job else []
    if len(files) > 1:
        raise InputError("arguments", got=" ".join(files), expected="at most one JOB.yaml; keys as key=value")
    changes = [text for text in arguments if "." in text.partition("=")[0] and text not in files]
    own = [text for text in arguments if text not in files and text not in changes]
    named = [f"job={json.dumps(files[0])}"] if files else []
    return [*named, *([f"changes={json.dumps(changes)}"] if changes else []), *own]


def bench_verb(name: str, overrides: Sequence[str], *, out: str | None, quick: bool, as_json: bool) -> int:
    """Measure, print, write the document; returns 1 if the arms do not compute the same results, else 0.

    A missed goal is a result, not a failure.
    """
    options = options_of(name, overrides, quick=quick)
    found = find_benches()[name].run(options, quick=quick, say=lambda text: click.echo(f"  {text}", err=True))
    document = json.dumps(plain(found.to_json()), indent=1)
    named = out or options.OUT
    path = Path(named) if named else DEFAULT_FOLDER / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document + "\n")
    except OSError as error:
        raise InputError("--out", got=f"{path} ({error})", expected="a file that can be written") from error
    if found.picture is not None:
        from raytrain.report.plots import figure, png

        picture = path.with_suffix(".png")
        picture.write_bytes(png(figure(found.picture)))
        click.echo(f"picture: {picture}", err=as_json)
    for line in found.lines():
        click.echo(line, err=as_json)
    click.echo(f"raw values: {path}", err=as_json)
    if as_json:
        sys.stdout.write(document + "\n")
    return 0 if found.passed else 1
