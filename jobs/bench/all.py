"""Bench `all`: every bench, one after the other, and one table of what was claimed and what this machine says.

Each runs as a command of its own, so that none inherits another's memory, threads or warm caches. Its document is kept
in a folder; one that is there already is taken as it is, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say
from jobs.bench.harness.options import BenchOptions, find_benches
from jobs.bench.harness.summary import count_line, markdown, table
from raytrain.errors import InputError
from raytrain.runs.records import plain

LOG_TAIL = 2000


class AllOptions(BenchOptions):
    """Every bench, and one table: `raytrain bench all [NAME.key=value ...] [key=value ...]`."""

    MEASURES: ClassVar[str] = "all benchmarks, and one table of claims with the figures of this machine"
    IN_ALL: ClassVar[bool] = False
    OUT: ClassVar[str | None] = "benchmarks.json"

    only: list[Text] = Field([], description="these benches alone; none: all but lr")
    skip: list[Text] = Field([], description="not these")
    changes: list[Text] = Field([], description="NAME.key=value for single benches, also as arguments")
    dir: Text = Field("runs/bench/all", description="folder of their documents; one that is there is not measured anew")


def run(options: AllOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Run the benches and gather their claims; see `AllOptions`.

    Raises:
        InputError: `only` or `changes` name something that is no bench of this kind.
    """
    found = BenchMeasurement("all", quick, options.model_dump(), "a bench of its own")
    folder = Path(options.dir)
    names = chosen(options)
    keys = keys_by_bench(options.changes, names)
    documents: dict[str, dict[str, Any]] = {}
    for name in names:
        path = folder / f"{name}.json"
        if path.exists():
            say(f"{name}: taken from {path}")
        else:
            say(f"{name}: {find_benches()[name].measures}")
            why = _measured(name, keys.get(name, []), path, quick=quick)
            if why:
                found.gate(Check(name, False, why))
                continue
        documents[name] = json.loads(path.read_text())
        gate = documents[name]["gate"]
        failed = [check["name"] for check in gate["checks"] if not check["passed"]]
        found.gate(Check(name, gate["passed"], "; ".join(failed) if failed else "its arms compute the same thing"))
    rows = table(documents)
    found.values |= {"table": rows, "benches": documents}
    found.advice = [*markdown(rows), count_line(rows), machine_line(documents)]
    return found


def chosen(options: AllOptions) -> list[str]:
    """The benches to run, in the order of the list."""
    known = [name for name, bench in find_benches().items() if bench.options.IN_ALL]
    for name in [*options.only, *options.skip]:
        if name not in known:
            raise InputError("only" if name in options.only else "skip", seen=name, expected=f"of {', '.join(known)}")
    return [name for name in known if (name in options.only or not options.only) and name not in options.skip]


def keys_by_bench(changes: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """`NAME.key=value` -> the `key=value` of each bench."""
    known, found = list(names), {}
    for change in changes:
        name, _, rest = change.partition(".")
        if name not in known:
            raise InputError(change, seen=f"{name} before the dot", expected=f"one of {', '.join(known)}")
        found.setdefault(name, []).append(rest)
    return found


def _measured(name: str, keys: list[str], path: Path, *, quick: bool) -> str:
    """Runs one bench, which writes its document to `path`; why it could not, or ""."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jobs", "bench", name, *keys, "--out", str(path), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    path.with_suffix(".log").write_text(done.stdout)
    return "" if path.exists() else f"exit {done.returncode}: {done.stdout[-LOG_TAIL:].strip()}"


def machine_line(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """When, on what and by which command: of the first document, whose parts may be older than this command."""
    if not documents:
        return "nothing was measured"
    told = [document["environment"] for document in documents.values()]
    dates = sorted(one["date"][:10] for one in told)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    first: dict[str, Any] = plain(told[0])
    return f"{when}, {first.get('cpu_model') or first.get('cpu')}, by: raytrain bench all"
