"""A plan's choices as text for its table."""

from __future__ import annotations

from raytrain.plan.choice import Choice, Resolved, size_text
from raytrain.plan.rules.hosts import kinds_text

IN_BYTES = ("memory", "host_memory", "checkpoint_bytes")


def shown(name: str, choice: Choice) -> str:
    """A value as text for a table, or what it may become."""
    if isinstance(choice, Resolved):
        value = choice.value
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{value:g}"
        if isinstance(value, dict):
            return kinds_text(value)
        if isinstance(value, int):
            return size_text(value) if name in IN_BYTES else f"{value:,}"
        return str(value)
    if not choice.bounds:
        return "later"
    if all(isinstance(bound, str) for bound in choice.bounds):
        return " or ".join(choice.bounds)
    low, high = choice.bounds
    return f"{low:,} to {high:,}" if high is not None else f"{low:,} or more"


def reason_of(choice: Choice) -> str:
    """Why, and for what is left open what will decide."""
    if isinstance(choice, Resolved):
        return choice.reason
    return f"{choice.how}; {choice.reason}" if choice.reason else choice.how
