"""The verb `bench`: runs a bench with its keys, prints the result and writes a JSON document."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from jobs.bench.harness.options import Bench, BenchOptions, find_benches
from raytrain.config.decode import decode, parse_override
from raytrain.config.messages import key_rows
from raytrain.errors import InputError
from raytrain.runs.records import plain

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
