"""Choosing a precision from what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain.autotune.batch_search import choose_precision
from raytrain.autotune.measurement import Candidate, Measurement, beyond_noise, faster_beyond_noise, has_winner
from raytrain.errors import RunError

NAN = float("nan")


def trial(name: str, *seconds: float, loss: float = 2.0, norm: float = 1.0, error: str | None = None) -> Measurement:
    """One round or more."""
    found = Measurement(Candidate(name, 8), "ok", seconds, loss=loss, grad_norm=norm)
    if error is not None:
        return replace(found, outcome="error", pass_s=(), reason=error)
    return found if loss == loss and norm == norm else replace(found, outcome="nonfinite", reason="loss nan")


@pytest.mark.parametrize(
    ("trials", "chosen", "words"),
    [
        pytest.param([trial("bf16", 0.5)], "bf16", "2.00 [2.00, 2.00] times as fast as fp32", id="faster and equal"),
        pytest.param([trial("bf16", 0.98)], "fp32", "1.02 [1.02, 1.02] times as fast", id="within the noise"),
        pytest.param([trial("bf16", 3.0)], "fp32", "0.33 [0.33, 0.33] times as fast", id="slower"),
        pytest.param([trial("bf16", 0.5, loss=2.05)], "fp32", "refused: the loss is 2.05", id="another loss"),
        pytest.param([trial("bf16", 0.5, loss=2.03)], "bf16", "agree", id="nearly the loss"),
        pytest.param([trial("bf16", 0.5, norm=1.3)], "fp32", "gradient norm is 1.3 times", id="another norm"),
        pytest.param([trial("fp16", 0.5, norm=NAN)], "fp32", "refused: loss nan", id="no norm"),
        pytest.param([trial("fp16", 0.5, loss=NAN)], "fp32", "refused: loss nan", id="no loss"),
        pytest.param([trial("fp16", 0.1, error="no kernel")], "fp32", "refused: no kernel", id="not runnable"),
        pytest.param([trial("bf16", 0.6), trial("fp16", 0.4)], "fp16", "2.50 [", id="the fastest of two"),
        pytest.param([trial("fp16", 0.4), trial("bf16", 0.6)], "fp16", "1.67 [", id="in any order"),
        pytest.param([trial("bf16", 0.6), trial("fp16", 0.4, loss=9.0)], "bf16", "refused", id="the best that passes"),
        pytest.param([], "fp32", "nothing but fp32", id="nothing to compare"),
    ],
)
def test_the_choice_and_its_reason(trials: list[Measurement], chosen: str, words: str) -> None:
    made = choose_precision([*trials, trial("fp32", 1.0)])
    assert made.value == chosen and words in made.reason


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        ((0.9, 0.9, 0.9, 1.1), "bf16"),
        ((0.8, 0.9, 1.01, 1.1), "fp32"),
        ((0.9, 0.9, 1.1), "fp32"),
        ((0.9, 0.9, 0.9), "bf16"),
    ],
)
def test_a_faster_median_counts_where_most_rounds_agree(rounds: tuple[float, ...], chosen: str) -> None:
    base = trial("fp32", *[1.0] * len(rounds))
    made = choose_precision([base, trial("bf16", *rounds)])
    assert made.value == chosen
    assert ("too noisy to tell" in made.reason) is (chosen == "fp32"), made.reason


def test_if_the_reference_cannot_run_the_fastest_runnable_precision_is_chosen() -> None:
    base = trial("fp32", float("inf"), loss=0.0, norm=0.0, error="no room")
    slow, fast, broken = trial("fp16", 0.9), trial("bf16", 0.5), trial("tf32", 0.1, loss=NAN)
    made = choose_precision([base, slow, fast, broken])
    assert made.value == "bf16" and "fp32 refused: no room" in made.reason
    with pytest.raises(RunError, match="fp32: 8 rows: no room; bf16: 8 rows: no kernel"):
        choose_precision([base, trial("bf16", float("inf"), error="no kernel")])


def test_a_gradient_of_zero_has_no_ratio() -> None:
    assert choose_precision([trial("fp32", 1.0, norm=0.0), trial("bf16", 0.5, norm=0.0)]).value == "bf16"


@pytest.mark.parametrize(
    ("seconds", "won"),
    [
        ([[1.0, 1.1], [0.5, 0.6]], True),
        ([[0.5, 0.6], [1.0, 1.1]], True),  # the reference
        ([[1.0, 1.1], [0.5, 0.98]], False),  # by less than is worth while in one round
        ([[1.0, 1.1], [0.5, 1.2]], False),
        ([[1.0, 1.1], [0.5, 0.6], [0.55, 0.6]], False),  # two are faster, and near each other
        ([[1.0, 1.1], [0.5, 0.6], []], True),  # the third could not be run
        ([[1.0, 1.1]], True),
    ],
)
def test_rounds_that_do_not_overlap_have_a_winner(seconds: list[list[float]], won: bool) -> None:
    assert has_winner(seconds) is won


STEADY_ROUNDS = ((1.0, 1.01, 1.02), (1.10, 1.11, 1.12))


@pytest.mark.parametrize(
    ("own", "reference", "told"),
    [
        (*STEADY_ROUNDS, True),
        ((1.0, 2.0, 0.5), (1.1, 2.2, 0.6), False),  # it won each of three rounds: chance in one case of eight
        ((1.0, 2.0, 0.5), (2.5, 5.0, 9.0), True),  # in each round faster than the reference ever was
        ((1.0, 2.0, 0.5, 1.0, 1.0), (1.1, 2.2, 0.6, 1.2, 1.3), True),  # it won five of five
        ((1.0, 2.0, 0.5, 1.3, 1.0), (1.1, 2.2, 0.6, 1.2, 1.3), False),
    ],
)
def test_where_times_vary_a_better_median_alone_does_not_tell(
    own: tuple[float, ...], reference: tuple[float, ...], told: bool
) -> None:
    assert beyond_noise(own, reference) is told
    trials = [trial("fp32", *reference), trial("bf16", *own)]
    found = choose_precision(trials)
    assert (found.value == "bf16") is told
    assert ("too noisy to tell" in found.reason) is not told


@pytest.mark.parametrize(
    ("others", "own", "faster", "words"),
    [
        ([1.0] * 5, [0.8] * 5, True, "1.25 times as fast as others, faster in 5 of 5 rounds"),
        ([1.0] * 5, [0.98] * 5, False, "1.02 times"),
        ([1.0] * 5, [0.7, 0.7, 0.7, 0.7, 1.1], False, "4 of 5"),  # its times vary
        ([1.0] * 5, [0.9, 0.9, 0.9, 1.1, 1.1], False, "3 of 5"),
        ([1.0] * 8, [0.9] * 7 + [1.1], True, "7 of 8"),
        ([1.0] * 5, [0.5, 0.5, 0.5, 0.5, 0.97], True, "5 of 5"),  # they vary, but chance does not win five of five
        ([1.0, 1.0], [1.2, 2.0], False, "0 of 2"),
    ],
)
def test_a_way_must_be_faster_in_more_rounds_than_noise_gives(
    others: list[float], own: list[float], faster: bool, words: str
) -> None:
    """Overlapped all-reduces, and compiled passes."""
    told, text = faster_beyond_noise(own, others, than="others")
    assert told is faster and words in text
