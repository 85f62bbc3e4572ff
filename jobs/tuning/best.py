"""`best.yaml`: the user's job with the values that a search found, and the reasons as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from raytrain.config.decode import apply_overrides, dump_yaml
from raytrain.config.messages import render

WIDTH = 108


def best_mapping(
    mapping: Mapping[str, Any], values: Mapping[str, Any], *, found: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The job with the dotted `values` set; its section `tune` holds only what was measured (`found`)."""
    job, _ = apply_overrides(mapping, [f"{key}={render(value)}" for key, value in values.items()])
    job.pop("tune", None)
    return {**job, "tune": {"found": dict(found)}} if found else job


def best_text(job: Mapping[str, Any], reasons: Mapping[str, str], *, header: str) -> str:
    """The job as YAML, with `header` as a comment at the top and a comment above each dotted key of `reasons`.

    Relies on the layout of `dump_yaml`: sections are not indented, their keys by two spaces.
    """
    lines, section = _comment(header, ""), ""
    for line in dump_yaml(job).splitlines():
        if line[:1].isalpha():
            section = line.partition(":")[0]
        elif line[:2] == "  " and line[2:3].isalpha():
            key = f"{section}.{line[2:].partition(':')[0]}"
            lines += _comment(reasons[key], "  ") if key in reasons else []
        lines.append(line)
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    """`text` as comment lines."""
    mark = f"{indent}# "
    return [
        line
        for paragraph in text.splitlines()
        for line in textwrap.wrap(paragraph, WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)
    ]
