"""One decision of a plan: a value with its reason, or deferred to a measurement; and quantities as text.

Every rule of the plan returns `Resolved` or `Deferred`; the plan's table, warnings and errors print them with these
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.wording import size as size_text
from raytrain.config.decode import JsonRecord


@dataclass(frozen=True)
class Resolved(JsonRecord):
    """A final decision: plain JSON (a number, a string, a boolean or None), and its reason in one short sentence."""

    value: Any
    reason: str

    @property
    def candidates(self) -> tuple[Any, ...]:
        return (self.value,)

    def value_or(self, _default: Any) -> Any:
        return self.value


@dataclass(frozen=True)
class Deferred(JsonRecord):
    """A decision that needs a measurement, or the opened data or model; the workers make it once, at the start.

    `how` says what decides, `bounds` are the candidates or the limits of the answer, `reason` adds detail.
    """

    how: str
    bounds: tuple[Any, ...] = ()
    reason: str = ""

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The values still possible, or the limits of them."""
        return self.bounds

    def value_or(self, default: Any) -> Any:
        """`default`, as long as no measurement has decided."""
        return default


Choice = Resolved | Deferred


IN_BYTES = ("memory", "host_memory", "checkpoint_bytes")


def value_text(name: str, choice: Choice) -> str:
    """A value as text for a table, or the candidates of a deferred one."""
    if isinstance(choice, Resolved):
        value = choice.value
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return f"{value:g}"
        if isinstance(value, dict):
            return host_kinds_text(value)
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
    """The reason of a choice; for a deferred one also what will decide it."""
    if isinstance(choice, Resolved):
        return choice.reason
    return f"{choice.how}; {choice.reason}" if choice.reason else choice.how


def seconds_text(spent: float, *, digits: int = 2) -> str:
    """A duration with two digits, or as many as given: 0.12 s, 34 ms, 4,321 s."""
    rounded = float(f"{spent:.{digits}g}")  # 0.0999 s is 0.1 s, and not 1e+02 ms
    return f"{digits_text(spent, digits)} s" if rounded >= 0.1 else f"{digits_text(1e3 * spent, digits)} ms"


def digits_text(value: float, digits: int) -> str:
    """A number with so many digits, without an exponent: all digits of the integer part, and at most six decimals."""
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{float(text):.6f}".rstrip("0").rstrip(".")


def host_kinds_text(hosts: Mapping[str, int]) -> str:
    """Hosts by accelerator type as text, such as `2 H100, 1 A100`."""
    return ", ".join(f"{number} {kind}" for kind, number in hosts.items())
