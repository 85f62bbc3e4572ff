"""How figures are written in the terminal, in messages and in reports: counts, bytes, durations, rates."""

from __future__ import annotations

import math


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 worker`, `2 workers`, `12,000 rows`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def seconds(value: float | None) -> str:
    """A readable duration: 3.2 ms, 12.4 s, 4 min 05 s, 2 h 07 min."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0.0995:
        return f"{value * 1000:.3g} ms" if value else "0 s"
    if value < 59.95:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def size(value: float | None) -> str:
    """Bytes in binary units, three digits."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5:
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def plain_number(value: float | None, *, digits: int = 4) -> str:
    """A number with `digits` significant digits and thousands separators."""
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        left = max(0, digits - len(str(int(abs(value)))))
        text = f"{value:,.{left}f}"
        return text.rstrip("0").rstrip(".") if left else text
    return f"{value:.{digits}g}"


def measured(value: float | None, *, digits: int = 4) -> str:
    """As `plain_number`, but a fraction keeps its trailing zeros, so that 1.45 beside 1.232 reads 1.450."""
    if value is None or float(value).is_integer() or not 1e-3 <= abs(value) < 1000:
        return plain_number(value, digits=digits)
    return f"{value:#.{digits}g}".removesuffix(".")


def loss_text(value: float | None) -> str:
    """A loss, with the four decimals that the terminal shows."""
    return f"{value:.4f}" if value is not None and 0.1 <= abs(value) < 1000 else measured(value)


def rate_text(value: float | None) -> str:
    """A rate per second, without a fraction from one hundred on, as in the terminal."""
    return f"{value:,.0f}" if value is not None and abs(value) >= 100 else measured(value)
