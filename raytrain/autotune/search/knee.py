"""The knee of one precision: its smallest size that is near the best, which size to measure next.

Pure, without torch.
"""

from __future__ import annotations

from raytrain.autotune.search.space import nearest_at_most
from raytrain.autotune.search.speed_curve import SpeedCurve

#: A smaller size is taken where it gives up no more than this of the best throughput.
NEAR = 0.03
#: A size that cannot beat the best measured by more than this is not worth measuring.
WORTH_A_LOOK = 0.04
#: A size that is so many times the chosen one is dear to measure again, and no better than the bounds tell.
AS_LARGE = 2
#: Standard errors by which a smaller size must be nearer to the best.
CAUTION = 1.0


def _to_reach(curve: SpeedCurve) -> float:
    """What is called the best: measured, or a little more where the bounds promise it."""
    return max(curve.best, min(curve.reach, (1 + WORTH_A_LOOK) * curve.best))


def chosen_size(curve: SpeedCurve) -> int | None:
    """The smallest measured size within `NEAR` of the best; None where nothing measured fits, or it is of no use.

    Where noise blurs the comparison a smaller size has to be nearer by a standard error.
    """
    if curve.nonfinite or not curve.measured:
        return None
    top, reach = max(curve.measured, key=curve.score), _to_reach(curve)
    near = [
        size
        for size in curve.measured
        if curve.score(size) >= (1 - NEAR) * reach * (1 + CAUTION * doubt_of(curve, size, curve, top))
    ]
    return min(near, default=top)


def next_size(curve: SpeedCurve) -> int | None:
    """The unmeasured size that could change the choice; None where none could."""
    if not curve.measured:
        return None
    known, best = curve.measured, curve.best
    bounds = {size: curve.bound(size) for size in curve.fitting() if size not in curve.seconds}
    faster = [size for size, bound in bounds.items() if bound > (1 + WORTH_A_LOOK) * best]
    larger = [size for size in faster if size > known[-1]]
    if larger:
        top = max(bounds[size] for size in larger)
        knee = min(size for size in bounds if size > known[-1] and bounds[size] >= (1 - NEAR) * top)
        limit = max(curve.growth * known[-1], larger[0])
        return nearest_at_most([size for size in bounds if known[-1] < size <= knee], limit)
    if faster:
        return max(faster, key=lambda size: bounds[size])
    chosen = chosen_size(curve)
    assert chosen is not None, "a curve with measured sizes has a choice, or was dropped before"
    smaller = [size for size, bound in bounds.items() if size < chosen and bound >= (1 - NEAR) * _to_reach(curve)]
    return smaller[len(smaller) // 2] if smaller else None


def doubt_of(first: SpeedCurve, size: int, second: SpeedCurve, other: int) -> float:
    """Relative standard error of the ratio of two measured scores."""
    return (first.error(size) ** 2 + second.error(other) ** 2) ** 0.5


def runner_up(curve: SpeedCurve, size: int) -> int | None:
    """The measured size that the choice is nearest to losing against; None where there is no other of its order."""
    others = [other for other in curve.measured if other != size and other <= AS_LARGE * size]
    return max(others, key=curve.score, default=None)


def size_reason(curve: SpeedCurve, size: int) -> str:
    """Why this size, in words: its throughput, the best one, and what memory allows."""
    best = max(curve.measured, key=curve.score)
    unit = "rows/s" if curve.space.noise_rows is None else "rows/s weighed by what a row is worth"
    told = f"{curve.score(size):.4g} {unit}"
    if size != best:
        told += f", within {NEAR:.0%} of the best, {curve.score(best):.4g} at {best}"
    ceiling = max(curve.fitting())
    if ceiling < curve.space.sizes[-1] and curve.space.budget_bytes is not None:
        told += f"; memory allows up to {ceiling}"
    return told
