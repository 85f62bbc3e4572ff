"""Decisions between two timed ways to compute: micro-batches in flight, and overlap of all-reduces. Pure.

Measured by `raytrain.autotune.probe.arms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from raytrain.autotune.search.precision import CHANCE, WORTHWHILE_GAIN, chance_of_rounds
from raytrain.plan.choice import Resolved
from raytrain.plan.text import seconds_text


def choose_inflight(seconds: Mapping[int, float], failed: Mapping[int, str] | None = None) -> Resolved:
    """Two micro-batches in flight if they are faster than one by more than noise.

    Args:
        seconds: seconds of the same passes, by micro-batches in flight.
        failed: why a number of micro-batches in flight could not be measured, usually for lack of memory. If even one
            failed, the first step of the run reports the consequence.
    """
    if failed:
        number, why = next(iter(failed.items()))
        return Resolved(1, f"{number} in flight failed while measured: {why}")
    ratio = seconds[1] / seconds[2]
    chosen = 2 if ratio >= 1 + WORTHWHILE_GAIN else 1
    return Resolved(chosen, f"2 micro-batches in flight measured {ratio:.2f} times as fast as 1")


def choose_overlap(seconds: Mapping[str, Sequence[float]]) -> Resolved:
    """All-reduces "during" the last backward if these are faster than "after" it by more than noise.

    They must be faster by enough at the median of the rounds, and in so many rounds that chance explains it in at most
    one case of twenty (a sign test).

    Args:
        seconds: seconds of the same passes with their all-reduces, by these two names; position i of both is round i.
    """
    faster, text = _told_faster(seconds["during"], seconds["after"], than="after it")
    return Resolved(faster, f"all-reduces started inside the last backward measured {text}")


def _told_faster(seconds: Sequence[float], others: Sequence[float], *, than: str) -> tuple[bool, str]:
    """Whether the first of two ways is faster by more than noise, see `choose_overlap`, and how much in words."""
    ratios = [b / a for a, b in zip(seconds, others, strict=True)]
    rounds, won, middle = len(ratios), sum(ratio > 1 for ratio in ratios), median(ratios)
    text = f"{middle:.2f} times as fast as {than}, faster in {won} of {rounds} rounds"
    return middle >= 1 + WORTHWHILE_GAIN and chance_of_rounds(won, rounds) <= CHANCE, text


def choose_compiled(
    eager: Sequence[float], compiled: Sequence[float], passes: float, compilation: Mapping[str, Any], *, failed: str
) -> Resolved:
    """Compiled code if it is faster by more than noise; what its compilation took is spent either way.

    Args:
        eager, compiled: seconds of the same passes in each round, of which the run has so many left.
        compilation: record of the compiler.
        failed: why the compiled passes cannot be used, if they cannot.
    """
    parts = "; ".join([f"{compilation['achieved']} compiled", *compilation["reasons"][:1]])
    if failed:
        return Resolved("off", f"compiled passes cannot be used: {failed} ({parts})")
    faster, text = _told_faster(compiled, eager, than="eager ones")
    reason, saved = f"compiled passes measured {text} ({parts})", passes * (median(eager) - median(compiled))
    if not faster:
        return Resolved("off", reason)
    spent = seconds_text(compilation["seconds"])
    return Resolved("default", f"{reason}, {seconds_text(saved)} less for {spent} of compilation")
