"""`Finding`: one diagnosis of a run, with its evidence and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info", "good"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info", "good")


@dataclass(frozen=True)
class Finding:
    """One diagnosis: its title, the numbers that show it, and what to do about it ("" if nothing)."""

    severity: Severity
    title: str
    evidence: str
    remedy: str = ""


def advice(*options: tuple[str, bool]) -> str:
    """One sentence of the options that are not in force already.

    Args:
        options: (what to do, whether the run did it).
    """
    left = [text for text, in_force in options if not in_force]
    if not left:
        return ""
    text = left[0] if len(left) == 1 else f"{', '.join(left[:-1])} or {left[-1]}"
    return f"{text[0].upper()}{text[1:]}."
