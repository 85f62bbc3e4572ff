"""Formats the keys of a job as lines of text for `raytrain VERB --help`."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.job.spec import JobSpec
from raytrain.config.messages import key_rows


def key_lines(sections: Sequence[str]) -> list[str]:
    """One line, `section.key = default  (accepted values)`, for each key of the named sections, in schema order."""
    rows = [row for row in key_rows(JobSpec) if row.key.split(".")[0] in sections]
    return [f"{row.key} = {row.default}  ({row.expected})" for row in rows]
