"""Bench `all`: runs all benches and writes one table of the claims and their results on this machine.

Each bench is a separate command, so that none inherits the memory, threads or warm caches of another. Their documents
are kept in a folder; a bench whose document exists is skipped, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.config import Text
from jobs.bench.harness.measuring import BenchMeasurement, Check
from jobs.bench.harness.options import BENCHES, BenchOptions, count_line, key, markdown, table
from jobs.bench.harness.processes import LOG_TAIL
from raytrain.errors import InputError

#: Benches that it leaves out: one needs a job, one takes hours, one is itself.
APART = ("lr", "continual", "all")


class AllOptions(BenchOptions):
    """Options of `raytrain bench all [NAME.key=value ...] [key=value ...]`."""

    only: list[Text] = key([name for name in BENCHES if name not in APART], "the benches to run")
    changes: list[Text] = key([], "NAME.key=value for one bench, also as arguments")
    dir: Text = key("runs/bench/all", "folder of their documents; existing documents are kept")


def run(options: AllOptions, found: BenchMeasurement) -> None:
    for name in options.only:
        if name not in BENCHES or name in APART:
            known = ", ".join(name for name in BENCHES if name not in APART)
            raise InputError("only", got=name, expected=f"of {known}")
    found.block = "one bench"
    keys = keys_by_bench(options.changes, options.only)
    documents: dict[str, dict[str, Any]] = {}
    for name in options.only:
        path = Path(options.dir) / f"{name}.json"
        if path.exists():
            found.say(f"{name}: read from {path}")
        else:
            found.say(f"{name}: {BENCHES[name]}")
            path.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "jobs", "bench", name, *keys.get(name, []), "--out", str(path)]
            command += ["--quick"] if found.quick else []
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            path.with_suffix(".log").write_text(done.stdout)
            if not path.exists():
                found.gate(Check(name, False, f"exit {done.returncode}: {done.stdout[-LOG_TAIL:].strip()}"))
                continue
        documents[name] = json.loads(path.read_text())
        gate = documents[name]["gate"]
        failed = [check["name"] for check in gate["checks"] if not check["passed"]]
        found.gate(Check(name, gate["passed"], "; ".join(failed) if failed else "its arms compute the same results"))
    rows = table(documents)
    found.values |= {"table": rows, "benches": documents}
    found.advice = [*markdown(rows), count_line(rows)]


def keys_by_bench(changes: Iterable[str], names: list[str]) -> dict[str, list[str]]:
    """`NAME.key=value` -> the `key=value` of each bench."""
    found: dict[str, list[str]] = {}
    for change in changes:
        name, _, rest = change.partition(".")
        if name not in names:
            raise InputError(change, got=f"{name} before the dot", expected=f"one of {', '.join(names)}")
        found.setdefault(name, []).append(rest)
    return found
