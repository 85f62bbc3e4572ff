"""ARCHITECTURE.md, 10: out of memory on one rank is an event; the update is the unbroken one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import shortages
from gang import run_gang

pytestmark = pytest.mark.daily

STEPS, ERRORS = 70, 20
PLANTED = shortages.places(7, errors=ERRORS, steps=STEPS, micro_batches=2, world_size=2)
MODELS = ["gpt", "moe_gpt", "mlp"]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two workers made of each model, without shortages and with them."""
    return run_gang(shortages.runs, MODELS, PLANTED, STEPS, world_size=2)


def alike(made: dict[str, Any], clean: dict[str, Any], where: str, atol: float = 1e-12) -> None:
    for name in ("losses", "norms", "evals"):
        np.testing.assert_allclose(made[name], clean[name], rtol=0, atol=atol, err_msg=f"{where} {name}")
    for name, value in clean["weights"].items():
        np.testing.assert_allclose(made["weights"][name], value, rtol=0, atol=atol, err_msg=f"{where} {name}")


@pytest.mark.parametrize("name", MODELS)
def test_twenty_errors_leave_no_trace_in_the_weights(two: list[dict[str, Any]], name: str) -> None:
    for rank, made in enumerate(two):
        alike(made[name]["planted"], made[name]["clean"], f"rank {rank}")
        assert len(made[name]["clean"]["losses"]) == STEPS and made[name]["clean"]["events"] == []
    digests = [made[name]["planted"]["digest"] for made in two]
    assert digests[0] == digests[1], "the ranks differ"


@pytest.mark.parametrize("name", MODELS)
def test_each_error_is_an_event_and_sizes_grow_back(two: list[dict[str, Any]], name: str) -> None:
    met = sorted(place for made in two for place in made[name]["planted"]["met"])
    assert met == sorted(PLANTED) and len(met) == ERRORS
    events = [event for event in two[0][name]["planted"]["events"] if event["kind"] == "out_of_memory"]
    assert [(event["step"], event["who"]) for event in events] == [(step, [f"rank {rank}"]) for step, _, rank, _ in met]
    size = 4
    for event in two[0][name]["planted"]["events"]:
        if event["kind"] == "decision":
            assert (event["what"], event["before"], event["value"]) == ("micro_batch_size", size, size * 2)
            size *= 2
            continue
        assert (event["micro_batch_size_before"], event["micro_batch_size"]) == (size, size // 2)
        assert event["equal"] == "within rounding" and "planted at" in event["shortages"][0]["error"]
        size //= 2
    assert size == two[0][name]["planted"]["size"]
    assert any(event["kind"] == "decision" for event in two[0][name]["planted"]["events"]), "it never grew back"


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    return run_gang(shortages.others, world_size=2)


def test_two_ranks_at_once_are_one_event(others: list[dict[str, Any]]) -> None:
    for made in others:
        alike(made["both ranks"], made["clean"], "both ranks")
    (event,) = [event for event in others[0]["both ranks"]["events"] if event["kind"] == "out_of_memory"]
    assert event["step"] == 3 and event["who"] == ["rank 0", "rank 1"] and event["during"] == "step"


def test_an_evaluation_is_repeated_over_the_same_rows(others: list[dict[str, Any]]) -> None:
    for made in others:
        alike(made["evaluation"], made["clean"], "whole split")
        alike(made["limited, short"], made["limited"], "the first batches")
        assert made["limited"]["evals"] != made["clean"]["evals"]
    events = [event for event in others[0]["evaluation"]["events"] if event["kind"] == "out_of_memory"]
    assert [(event["step"], event["during"], event["who"]) for event in events] == [
        (4, "evaluation", ["rank 1"]),
        (8, "evaluation", ["rank 0", "rank 1"]),
    ]


def test_the_loss_scale_does_not_hear_of_it(others: list[dict[str, Any]]) -> None:
    clean, short = others[0]["fp16"], others[0]["fp16, short"]
    assert [event["step"] for event in short["events"] if event["kind"] == "out_of_memory"] == [5, 9]
    assert clean["scales"] == short["scales"] and None not in clean["scales"]
    alike(short, clean, "fp16", atol=2e-3)


def test_random_draws_are_reproducible(others: list[dict[str, Any]]) -> None:
    """A model with dropout: where the split is the same, everything is, to the last bit."""
    for made in others:
        short, by_hand = made["halves"]["planted"], made["halves"]["by hand"]
        assert short["digest"] == by_hand["digest"] and short["losses"] == by_hand["losses"]
        assert short["generators"] == by_hand["generators"]
    (event,) = others[0]["halves"]["planted"]["events"]
    assert event["step"] == 5 and event["equal"] == "in distribution only" and event["grow_after"] is None
