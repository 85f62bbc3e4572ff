"""Bench `all`: runs all benches and writes one table of the claims and their results on this machine.

Each bench is a separate command, so that none inherits the memory, threads or warm caches of another. Their documents
are kept in a folder; a bench whose document exists is skipped, so that a long measurement can be made in parts.
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
from jobs.bench.harness.measuring import BenchMeasurement, Check
from jobs.bench.harness.options import BENCHES, BenchOptions, count_line, markdown, table
from raytrain.errors import InputError
from raytrain.runs.records import plain

LOG_TAIL = 2000
#: Benches that it leaves out: one needs a job, one takes hours, one is itself.
APART = ("lr", "continual", "all")


class AllOptions(BenchOptions):
    """Options of `raytrain bench all [NAME.key=value ...] [key=value ...]`."""

    OUT: ClassVar[str | None] = "benchmarks.json"

    only: list[Text] = Field([], description="run these benches only; empty: all but lr and continual")
    skip: list[Text] = Field([], description="skip these benches")
    changes: list[Text] = Field([], description="NAME.key=value for one bench, also as arguments")
    dir: Text = Field("runs/bench/all", description="folder of their documents; existing documents are kept")


def run(options: AllOptions, found: BenchMeasurement) -> None:
    """Run the benches and collect their claims; see `AllOptions`.

    Raises:
        InputError: `only`, `skip` or `changes` name an unknown bench.
    """
    found.block = "one bench"
    folder = Path(options.dir)
    names = chosen(options)
    keys = keys_by_bench(options.changes, names)
    documents: dict[str, dict[str, Any]] = {}
    for name in names:
        path = folder / f"{name}.json"
        if path.exists():
            found.say(f"{name}: read from {path}")
        else:
            found.say(f"{name}: {BENCHES[name]}")
            why = _run_bench(name, keys.get(name, []), path, quick=found.quick)
            if why:
                found.gate(Check(name, False, why))
                continue
        documents[name] = json.loads(path.read_text())
        gate = documents[name]["gate"]
        failed = [check["name"] for check in gate["checks"] if not check["passed"]]
        found.gate(Check(name, gate["passed"], "; ".join(failed) if failed else "its arms compute the same results"))
    rows = table(documents)
    found.values |= {"table": rows, "benches": documents}
    found.advice = [*markdown(rows), count_line(rows), machine_line(documents)]


def chosen(options: AllOptions) -> list[str]:
    """The benches to run, in the order of `bench --list`."""
    known = [name for name in BENCHES if name not in APART]
    for name in [*options.only, *options.skip]:
        if name not in known:
            raise InputError("only" if name in options.only else "skip", got=name, expected=f"of {', '.join(known)}")
    return [name for name in known if (name in options.only or not options.only) and name not in options.skip]


def keys_by_bench(changes: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """`NAME.key=value` -> the `key=value` of each bench."""
    known, found = list(names), {}
    for change in changes:
        name, _, rest = change.partition(".")
        if name not in known:
            raise InputError(change, got=f"{name} before the dot", expected=f"one of {', '.join(known)}")
        found.setdefault(name, []).append(rest)
    return found


def _run_bench(name: str, keys: list[str], path: Path, *, quick: bool) -> str:
    """Runs one bench, which writes its document to `path`; returns the error, or ""."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jobs", "bench", name, *keys, "--out", str(path), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    path.with_suffix(".log").write_text(done.stdout)
    return "" if path.exists() else f"exit {done.returncode}: {done.stdout[-LOG_TAIL:].strip()}"


def machine_line(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Dates, machine and command of the documents, which may be older than this run."""
    if not documents:
        return "nothing was measured"
    environments = [document["environment"] for document in documents.values()]
    dates = sorted(one["date"][:10] for one in environments)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    first: dict[str, Any] = plain(environments[0])
    return f"{when}, {first.get('cpu_model') or first.get('cpu')}, by: raytrain bench all"
