"""The keys of a job with their meanings, for `raytrain VERB --help`."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.job.spec import JobSpec
from raytrain.config.messages import key_rows


def key_entries(sections: Sequence[str]) -> list[tuple[str, str]]:
    """(`section.key = default`, meaning and accepted values) for each key of the named sections, in schema order."""
    rows = [row for row in key_rows(JobSpec) if row.key.split(".")[0] in sections]
    return [(f"{row.key} = {row.default}", f"{row.meaning} ({row.expected})".lstrip()) for row in rows]
