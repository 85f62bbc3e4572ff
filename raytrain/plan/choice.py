"""The decisions of a plan: resolved values with their reasons, and those deferred to a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resolved:
    """A final decision.

    `value` is plain JSON (a number, a string, a boolean or None); `reason` is one short sentence.
    """

    value: Any
    reason: str

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The values still possible: this one."""
        return (self.value,)

    def value_or(self, _default: Any) -> Any:
        """The value; see `Deferred.value_or`."""
        return self.value

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "reason": self.reason}


@dataclass(frozen=True)
class Deferred:
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

    def to_json(self) -> dict[str, Any]:
        return {"how": self.how, "bounds": list(self.bounds), "reason": self.reason}


Choice = Resolved | Deferred


def choice_from_json(row: Mapping[str, Any]) -> Choice:
    """The inverse of `to_json` of both kinds."""
    if "how" in row:
        return Deferred(how=row["how"], bounds=tuple(row["bounds"]), reason=row["reason"])
    return Resolved(value=row["value"], reason=row["reason"])
