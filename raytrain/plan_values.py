"""The values a plan is made of: what is decided with its reason, and what is known beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Resolved:
    """A decision that nothing downstream takes again.

    `value` is what JSON can hold (a number, a string, a boolean or None); `reason` is one short sentence.
    """

    value: Any
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "reason": self.reason}


@dataclass(frozen=True)
class Deferred:
    """A decision only a measurement, or the opened data or model, can take; the workers take it once.

    `how` says what decides, `bounds` are the candidates or the limits of the answer, `reason` says more.
    """

    how: str
    bounds: tuple[Any, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"how": self.how, "bounds": list(self.bounds), "reason": self.reason}


Choice = Resolved | Deferred


def choice_from_json(row: Mapping[str, Any]) -> Choice:
    """The inverse of `to_json` of both kinds."""
    if "how" in row:
        return Deferred(how=row["how"], bounds=tuple(row["bounds"]), reason=row["reason"])
    return Resolved(value=row["value"], reason=row["reason"])


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without building it on a device.

    Bytes count the master weights as they are kept (fp32: 4 a parameter); `activation_bytes_per_sample` and
    `flops_per_sample` (forward and backward of one row) are None where nobody knows.
    """

    parameters: int
    trainable_bytes: int
    activation_bytes_per_sample: int | None
    flops_per_sample: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DataFacts:
    """What is known of a source without reading it whole: rows, bytes, and tokens a row where it has them."""

    train_rows: int
    eval_rows: int
    row_bytes: int
    tokens_per_row: int | None
    total_bytes: int
    vocab_size: int | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def size_text(count: float) -> str:
    """Bytes in binary units with three digits: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if abs(count) >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
