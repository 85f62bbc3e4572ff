"""The verb `bench`: the list of benches, their options, running one, and the Markdown summary.

`raytrain bench` and `raytrain report FILE.json` call it. Listing imports no bench, and so neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_type_hints

import click
from pydantic import Field

from cluster.config import Count, NonNegativeInt, Section
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.measuring import BenchMeasurement, Goal, Interval
from raytrain.config.decode import decode, parse_override
from raytrain.config.messages import key_rows
from raytrain.errors import InputError
from raytrain.runs.records import plain

# ---------------------------------------------------------------- options

BENCHES = {
    "claims": "Common claims about attention masks, memory, precision, torch.compile, kept rows, clones, loader "
    "processes and pinned memory.",
    "loop": "A steady training step against that of a plain PyTorch loop, and of plain DDP.",
    "checkpoint": "Pause of training for an asynchronous checkpoint, against a synchronous one.",
    "moves": "Moving experts against round-robin, with a shifting load on expert hosts of unequal speed.",
    "recovery": "Interruption of a run when an expert host dies, against that of a dead worker.",
    "experts": "A layer with experts on hosts or partitioned across workers, against one process.",
    "lifecycle": "The time that the lifecycle of experts takes: idle, and in a change.",
    "tune": "The search for batch size and precision, against an exhaustive grid.",
    "infer": "Batch inference: generation in batches, against transformers; a model over two stages.",
    "startup": "First step of raytrain train, and raytrain check, against a bare TorchTrainer and a script.",
    "scaling": "One worker against two on equal work: training steps, and answers of a model.",
    "peers": "A training step against Lightning's and Accelerate's, if they are installed.",
    "lr": "Learning-rate range test of JOB.yaml: the loss over a rising learning rate, and a suggested rate.",
    "continual": "Tasks one after another (permuted, split, rotating images): accuracy, forgetting, forward transfer "
    "and retention of experts that come and go with replay, against plain fine-tuning, EWC, plain replay and a fixed "
    "mixture.",
    "all": "All benchmarks, and one table of claims with the figures of this machine.",
}
"""What each bench measures, by the name of its module in jobs/bench, in the order of `bench --list` and `bench all`."""


def key(default: Any, description: str, *, quick: Any = None, **bounds: Any) -> Any:
    """An option of a bench; `quick` is its value for `--quick`: a size for a test, too small for meaningful figures."""
    extra = None if quick is None else {"quick": quick}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


class BenchOptions(Section):
    """Options of one bench; each bench derives its own class, the type of the `options` of its `run`."""

    seed: NonNegativeInt = key(42, "of weights, order and generated data")
    blocks: Count = key(20, "repetitions that are kept; each runs one block of every arm", quick=3)
    threads: Count | Literal["auto"] = key("auto", "threads of one process, the same for every arm")

    @property
    def thread_count(self) -> int:
        return self.threads if isinstance(self.threads, int) else local_inventory().cpus


class GptOptions(BenchOptions):
    layers: Count = key(4, "of the GPT", quick=1)
    heads: Count = key(4, "of the GPT", quick=2)
    width: Count = key(128, "of the GPT", quick=16)

    @property
    def sizes(self) -> dict[str, int]:
        return self.model_dump(include={"layers", "heads", "width", "context"})


class TextOptions(GptOptions):
    """Options of a bench that trains a GPT on a text."""

    context: Count = key(64, "tokens of a row", quick=16)
    batch: Count = key(12, "rows of a step, over all workers", quick=4)


def load_bench(name: str) -> tuple[type[BenchOptions], Callable[..., None]]:
    """Import the bench of this name: its options, and its `run(options, found)`, which fills a `BenchMeasurement`."""
    if name not in BENCHES:
        raise InputError(
            "bench", got=name, expected=f"one of {', '.join(BENCHES)}", remedy="`raytrain bench --list` describes them"
        )
    run = importlib.import_module(f"jobs.bench.{name}").run
    return get_type_hints(run)["options"], run


# ---------------------------------------------------------------- summary, for `raytrain report FILE.json`

VERDICTS = ("reproduced", "not reproduced", "not measurable here")
CELLS = ("bench", "claim", "figure", "verdict")
EXPECTED = "a JSON document of `raytrain bench`"


def write_summary(path: Path) -> Path:
    """Write FILE.md beside a bench's FILE.json and return its path."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(str(path), got=str(error), expected=EXPECTED) from error
    needed = {"bench", "environment", "gate", "ratios", "claims", "values"}
    missing = sorted(needed - set(document)) if isinstance(document, dict) else sorted(needed)
    if missing:
        raise InputError(str(path), got=f"JSON without {', '.join(missing)}", expected=EXPECTED)
    page = path.with_suffix(".md")
    page.write_text("\n".join(summary_lines(document)) + "\n", encoding="utf-8")
    return page


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """The summary as Markdown: machine and command, claims and ratios with their verdicts, failed gates."""
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
        f"# Measured: {name}", "", *_machine(document), "", count_line(rows), "", *markdown(rows),
        *(["", "## Not compared", "", *failed] if failed else []),
    ]  # fmt: skip


def table(documents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each claim and each ratio: {bench, claim, figure, verdict}; without a goal the verdict is which arm is
    faster."""
    rows: list[tuple[str, str, str, str]] = []
    for name, document in documents.items():
        rows += [(name, claim["effect"], claim["evidence"], claim["verdict"]) for claim in document["claims"]]
        for ratio in document["ratios"]:
            figure = f"{Interval(ratio['median'], ratio['low'], ratio['high']):.3f} over {len(ratio['values'])} blocks"
            claim, verdict = ratio["name"], ratio["verdict"]
            if ratio["goal"] is not None:
                claim = f"{claim}: {Goal(**ratio['goal'])}"
                verdict = VERDICTS[2] if document["quick"] else VERDICTS[0] if ratio["met"] else VERDICTS[1]
            rows.append((name, claim, figure, verdict))
        if not document["gate"]["passed"]:
            rows.append((name, BENCHES.get(name, name), "its arms do not compute the same thing", VERDICTS[2]))
    return [dict(zip(CELLS, (" ".join(value.split()) for value in row), strict=True)) for row in rows]


def markdown(rows: Iterable[Mapping[str, str]]) -> list[str]:
    head = ["| bench | claim | our figure, with its 95 % interval | verdict |", "|---|---|---|---|"]
    return [*head, *("| " + " | ".join(row[cell].replace("|", "/") for cell in CELLS) + " |" for row in rows)]


def count_line(rows: list[dict[str, str]]) -> str:
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    return f"{sum(counts.values())} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


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


# ---------------------------------------------------------------- command

DEFAULT_FOLDER = Path("runs") / "bench"


def list_lines() -> list[str]:
    width = max(map(len, BENCHES))
    return [f"{name:<{width}}  {measures}" for name, measures in BENCHES.items()]


def bench_names() -> list[tuple[str, str]]:
    """For `bench --help`: the name of each bench, and the first part of what it measures."""
    return [(name, re.split(r"[:;,] ", measures)[0]) for name, measures in BENCHES.items()]


def bench_section(name: str) -> tuple[str, list[tuple[str, str]]]:
    """For `bench NAME --help`: a title, and (`key = default`, meaning and accepted values) of each key."""
    keys = key_rows(load_bench(name)[0])
    rows = [(f"{row.key} = {row.default}", f"{row.meaning} ({row.expected})") for row in keys]
    return f"Keys with their defaults, as key=value, of {name}: {BENCHES[name]}", rows


def options_of(name: str, overrides: Sequence[str], *, quick: bool) -> BenchOptions:
    """The options of bench `name`: its defaults, overridden by the quick values, overridden by the command line."""
    kind, _ = load_bench(name)
    if "changes" in kind.model_fields:
        overrides = _with_changes(overrides, job="job" in kind.model_fields)
    given = dict(parse_override(text) for text in overrides)
    sizes = {name: field.json_schema_extra for name, field in kind.model_fields.items() if quick}
    return decode(kind, {**{name: size["quick"] for name, size in sizes.items() if isinstance(size, dict)}, **given})


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
    found = BenchMeasurement(name, quick, options.model_dump(), say=lambda text: click.echo(f"  {text}", err=True))
    load_bench(name)[1](options, found)
    document = json.dumps(plain(found.to_json()), indent=1)
    path = Path(out) if out else DEFAULT_FOLDER / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
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
