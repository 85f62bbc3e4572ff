"""Chooses the precision from measurements: whether it is faster beyond noise, and computes the same. Pure.

`raytrain.autotune.step_probe` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from raytrain.autotune.measurement import Measurement, are_steady
from raytrain.plan.choice import Resolved

#: A lower precision must be faster by at least this fraction, or it is not worth its rounding errors.
WORTHWHILE_GAIN = 0.03
#: And in this share of the rounds: on a busy machine the medians of a few rounds differ by more than that by chance.
WON_ROUNDS = 0.75
#: The numeric band of one batch: relative difference of the loss, and band of the gradient-norm ratio, against fp32.
LOSS_TOLERANCE = 0.02
NORM_BAND = (0.8, 1.25)
#: Significance level for times that vary: the highest accepted probability that as many rounds are won by chance.
CHANCE = 0.05


def told_apart(seconds: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether the times of two ways to compute are enough to say that the first is faster; the one rule of `train` and
    `tune` for precisions, compiled passes and overlapped all-reduces.

    It must win `WON_ROUNDS` of the rounds. Where times vary, since the machine does other work, that says little: it
    must also have been faster in each round than the reference ever was, or in so many rounds that chance explains it
    in at most one case of twenty (a sign test).

    Args:
        seconds, reference: the same work in alternating rounds; position i of both is round i. Without rounds the
            answer is yes.
    """
    rounds = min(len(seconds), len(reference))
    won = sum(own < other for own, other in zip(seconds, reference, strict=False))
    if won < WON_ROUNDS * rounds:
        return False
    if not rounds or (are_steady(seconds) and are_steady(reference)):
        return True
    return max(seconds) * (1 + WORTHWHILE_GAIN) < min(reference) or chance_of_rounds(won, rounds) <= CHANCE


def chance_of_rounds(won: int, rounds: int) -> float:
    """The probability that two equal ways to compute win at least so many of the rounds against each other."""
    return sum(math.comb(rounds, number) for number in range(won, rounds + 1)) / 2**rounds


def faster_beyond_noise(seconds: Sequence[float], others: Sequence[float], *, than: str) -> tuple[bool, str]:
    """Whether the first of two ways is faster at the median of the rounds by what is worth while, and told apart; and
    how much, in words."""
    ratios = [b / a for a, b in zip(seconds, others, strict=True)]
    rounds, won, middle = len(ratios), sum(ratio > 1 for ratio in ratios), median(ratios)
    text = f"{middle:.2f} times as fast as {than}, faster in {won} of {rounds} rounds"
    return middle >= 1 + WORTHWHILE_GAIN and told_apart(seconds, others), text


def has_winner(seconds: list[list[float]]) -> bool:
    """Whether more rounds would not change the choice: in every round one arm was faster than each other arm ever was,
    by more than the gain that is worth while.

    Args:
        seconds: for each arm those of every round; an arm that could not be run has none.
    """
    timed = sorted((arm for arm in seconds if arm), key=max)
    return all(max(timed[0]) * (1 + WORTHWHILE_GAIN) < min(arm) for arm in timed[1:])


def choose_precision(measured: Sequence[Measurement], *, reference: str = "fp32") -> Resolved:
    """The fastest precision that is inside the band and beats the reference by more than noise; if the reference cannot
    run, the fastest that can.

    Args:
        measured: one for each candidate, in alternating rounds, the reference among them.
        reference: the precision to keep unless another one is better.
    """
    base = next(one for one in measured if one.candidate.precision == reference)
    if not base.pass_s:
        able = [one for one in measured if one.outcome == "ok"]
        fastest = min(able, key=lambda one: median(one.pass_s), default=base)
        others = "" if able else ", and no other precision either"
        return Resolved(fastest.candidate.precision, f"{reference} cannot be run ({base.reason}){others}")
    best, notes = base, []
    for one in measured:
        name = one.candidate.precision
        if one is base:
            continue
        refusal = one.reason if not one.pass_s else outside_band(
            one.loss, one.grad_norm, reference_loss=base.loss, reference_norm=base.grad_norm
        )  # fmt: skip
        if refusal:
            notes.append(f"{name} refused: {refusal}")
            continue
        ratio = median(base.pass_s) / median(one.pass_s)
        note = f"{name} measured {ratio:.2f} times as fast as {reference}"
        if ratio < 1 + WORTHWHILE_GAIN:
            notes.append(note)
        elif told_apart(one.pass_s, base.pass_s):
            best = min(best, one, key=lambda other: median(other.pass_s))
            notes.append(f"{note}, loss and gradient norm agree")
        else:
            notes.append(f"{note}, but the times of {len(one.pass_s)} rounds vary too much to tell")
    return Resolved(best.candidate.precision, "; ".join(notes) or f"nothing but {reference} to compare")


def outside_band(
    loss: float, norm: float, difference: float = 0.0, *, reference_loss: float, reference_norm: float,
    reference: str = "fp32",
) -> str:  # fmt: skip
    """Why a pass is outside the reference's numeric band, "" where it is inside.

    Args:
        difference: norm of the gradient's difference from the reference's, relative to the reference's norm, if known:
            the loss of one pass shows less than the steps that follow, so that the gradient itself has to be in the
            band as well.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "the loss or gradient is not finite"
    if abs(loss - reference_loss) > LOSS_TOLERANCE * abs(reference_loss):
        return f"the loss is {loss:.6g} where {reference} has {reference_loss:.6g}"
    if reference_norm > 0 and not NORM_BAND[0] <= norm / reference_norm <= NORM_BAND[1]:
        return f"the gradient norm is {norm / reference_norm:.3g} times {reference}'s"
    if reference_norm > 0 and difference > 1 - NORM_BAND[0]:
        return f"the gradient differs from {reference}'s by {difference:.0%}"
    return ""
