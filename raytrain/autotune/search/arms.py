"""Decisions between two timed ways to compute: micro-batches in flight, and overlap of all-reduces. Pure.

Measured by `raytrain.autotune.probe.arms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from raytrain.autotune.search.precision import WORTHWHILE_GAIN
from raytrain.plan.choice import Resolved

#: What chance alone may show is no gain: the probability of a result as good as this where nothing differs.
CHANCE = 0.05


def choose_inflight(seconds: Mapping[int, float], failed: Mapping[int, str] | None = None) -> Resolved:
    """Two micro-batches in flight where they are faster than one by more than noise.

    Args:
        seconds: by micro-batches in flight, of the same passes.
        failed: why so many could not be measured, most often for want of memory. Where that was one, the run itself
            says what follows, in its first step.
    """
    if failed:
        number, why = next(iter(failed.items()))
        return Resolved(1, f"{number} in flight failed while measured: {why}")
    ratio = seconds[1] / seconds[2]
    chosen = 2 if ratio >= 1 + WORTHWHILE_GAIN else 1
    return Resolved(chosen, f"2 micro-batches in flight measured {ratio:.2f} times as fast as 1")


def choose_overlap(seconds: Mapping[str, Sequence[float]]) -> Resolved:
    """Sums "during" the last backward where these are faster than "after" it by more than noise: enough at the median
    of the rounds, and faster in so many of them as chance alone gives in one case of twenty at most (a sign test).

    Args:
        seconds: by these two names, of the same passes with their sums; position i of both is of round i.
    """
    ratios = [a / b for a, b in zip(seconds["after"], seconds["during"], strict=True)]
    rounds, won, middle = len(ratios), sum(ratio > 1 for ratio in ratios), median(ratios)
    chance = sum(math.comb(rounds, number) for number in range(won, rounds + 1)) / 2**rounds
    reason = f"sums begun inside the last backward measured {middle:.2f} times as fast as after it"
    chosen = middle >= 1 + WORTHWHILE_GAIN and chance <= CHANCE
    return Resolved(chosen, f"{reason}, faster in {won} of {rounds} rounds")
