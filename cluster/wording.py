"""How numbers of things are written in messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 worker`, `2 workers`, `12,000 rows`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
