"""`Finding`: one diagnosis of a run, with its evidence and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info", "good"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info", "good")


@dataclass(frozen=True)
class Finding:
    """One diagnosis: its title, the numbers that show it, and what to do about it ("" if nothing).

    Attributes:
        options: what to do, one a line, the best first; `remedy` introduces them.
    """

    severity: Severity
    title: str
    evidence: str
    remedy: str = ""
    options: tuple[str, ...] = ()
