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
    ratios = [a / b for a, b in zip(seconds["after"], seconds["during"], strict=True)]
    rounds, won, middle = len(ratios), sum(ratio > 1 for ratio in ratios), median(ratios)
    reason = f"all-reduces started inside the last backward measured {middle:.2f} times as fast as after it"
    chosen = middle >= 1 + WORTHWHILE_GAIN and chance_of_rounds(won, rounds) <= CHANCE
    return Resolved(chosen, f"{reason}, faster in {won} of {rounds} rounds")


def choose_compiled(
    eager_s: float, compiled_s: float, passes: float, compilation: Mapping[str, Any], *, failed: str
) -> Resolved:
    """Compiled code if it is faster by more than noise; what its compilation took is spent either way.

    Args:
        eager_s, compiled_s: seconds of the same passes, of which the run has so many left.
        compilation: record of the compiler.
        failed: why the compiled passes cannot be used, if they cannot.
    """
    parts = "; ".join([f"{compilation['achieved']} compiled", *compilation["reasons"][:1]])
    if failed:
        return Resolved("off", f"compiled passes cannot be used: {failed} ({parts})")
    ratio, saved = eager_s / compiled_s, seconds_text(passes * (eager_s - compiled_s))
    reason = f"compiled passes measured {ratio:.2f} times as fast as eager ones ({parts})"
    if ratio < 1 + WORTHWHILE_GAIN:
        return Resolved("off", reason)
    return Resolved("default", f"{reason}, {saved} less for {seconds_text(compilation['seconds'])} of compilation")
