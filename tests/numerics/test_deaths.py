"""A host dies at any point of a step, or a worker calls in another order: every member gets a typed error,
and the run resumes from the latest checkpoint with the losses of an uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deaths import BACKWARD, BEFORE, BETWEEN, CHANGE, COMMIT, MOVE, SAVE, Lead, Story, Told

DEATHS = ((BEFORE, 6, 0), (BETWEEN, 10, 1), (BACKWARD, 14, 0), (COMMIT, 19, 1), (SAVE, 24, 0))
MISTAKES = (("order", 6, 1), ("version", 11, 0), ("generation", 15, 1))
STEPS = 26


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Lead(Story(str(tmp_path_factory.mktemp("unbroken") / "run"), steps=STEPS)).run()


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Lead(Story(str(tmp_path_factory.mktemp("deaths") / "run"), steps=STEPS, deaths=DEATHS)).run()


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Lead(Story(str(tmp_path_factory.mktemp("mistakes") / "run"), steps=STEPS, mistakes=MISTAKES)).run()


def check_same(made: Told, unbroken: Told) -> None:
    """Losses, norms, evaluations and weights, to the last bit, on every worker."""
    for rank, reference in unbroken.records.items():
        for column in ("step", "loss", "aux_loss", "grad_norm", "eval", "counts"):
            assert made.records[rank][column] == reference[column], f"rank {rank}: {column}"
    weights: dict[str, Any] = unbroken.records[0]["weights"]
    assert len(weights) > 10 and made.records[0]["weights"].keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(made.records[0]["weights"][name], value, err_msg=name)


def test_a_host_killed_at_any_point_of_a_step_does_not_change_the_losses(deaths: Told, unbroken: Told) -> None:
    assert tuple(deaths.happened) == DEATHS
    assert unbroken.records[0]["step"] == list(range(1, STEPS + 1)) and not unbroken.ends
    check_same(deaths, unbroken)


@pytest.mark.parametrize("number", range(len(DEATHS)), ids=[death[0] for death in DEATHS])
def test_every_survivor_of_a_death_ends_with_a_typed_error_that_names_the_dead(deaths: Told, number: int) -> None:
    dead = f"host {DEATHS[number][2]}"
    ends = {name: (error, message) for name, g, error, message, _ in deaths.ends if g == number + 1}
    assert ends.keys() == {"worker 0", "worker 1", "host 0", "host 1"} - {dead}
    for name, (error, message) in ends.items():
        assert error in ("Aborted", "StateLost") and f"{dead} died" in message, (name, error, message)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[mistake[0] for mistake in MISTAKES])
def test_a_header_mismatch_ends_with_a_typed_error_on_every_process(mistakes: Told, number: int) -> None:
    told = {"order": "op 3 and 9", "version": "version", "generation": "generation"}[MISTAKES[number][0]]
    ends = {name: (error, message) for name, g, error, message, _ in mistakes.ends if g == number + 1}
    assert ends.keys() == {"worker 0", "worker 1", "host 0", "host 1"}
    assert "HeaderMismatch" in {error for error, _ in ends.values()}
    for name, (error, message) in ends.items():
        assert error in ("HeaderMismatch", "Aborted", "StateLost"), (name, error)
        assert "different operations" in message and told in message, (name, message)


def test_a_run_continues_after_a_header_mismatch(mistakes: Told, unbroken: Told) -> None:
    assert tuple(mistakes.happened) == MISTAKES
    check_same(mistakes, unbroken)


def test_two_hosts_killed_at_once_are_both_named_and_the_series_is_as_it_was(tmp_path: Path, unbroken: Told) -> None:
    both = ((BETWEEN, 10, 0), (BETWEEN, 10, 1))
    made = Lead(Story(str(tmp_path / "run"), steps=STEPS, deaths=both)).run()
    assert sorted(made.happened) == sorted(both)
    check_same(made, unbroken)
    names = {"expert host 0", "expert host 1"}
    rewind = [fields for kind, fields in made.events if kind == "rewind"][-1]
    assert {row["who"] for row in rewind["died"]} == names and all(f"{who} died" in rewind["reason"] for who in names)
    deaths = [fields for kind, fields in made.events if kind == "death"]
    assert len(deaths) == 2 and {row["who"] for row in deaths} == names, "each reported once"
    for row in deaths:
        assert row["from_step"] in (4, 8), "the newest checkpoint that both had finished writing"
        assert row["step"] == row["from_step"] + 1 and row["seconds"] > 0
        assert f"{row['who']} on here (pid {row['pid']}) died at" in row["reason"]


def test_a_death_during_a_move_keeps_the_old_placement(tmp_path: Path, unbroken: Told) -> None:
    """The generation after it begins with the placement before the move, goes back, and moves again."""
    story = Story(str(tmp_path / "run"), steps=STEPS, moves=(6, 14), deaths=((MOVE, 15, 1),))
    made = Lead(story).run()
    assert made.happened == [(MOVE, 15, 1)]
    check_same(made, unbroken)
    versions = made.records[0]["in force"]
    assert versions[0] == (13, 1), "the checkpoint before it, on the placement that a generation begins with"
    assert dict(versions)[14] == 1 and dict(versions)[15] == 2, "the second move, in the generation that lived"


def test_a_host_that_dies_while_experts_come_or_go_costs_a_rewind_and_nothing_else(tmp_path: Path) -> None:
    unbroken = Lead(Story(str(tmp_path / "one" / "run"), steps=14, grows=True)).run()
    changes = unbroken.records[0]["changes"]
    assert {"expert_born", "expert_pruned"} <= {row["kind"] for row in changes}
    deaths = ((CHANGE, 3, 1), (CHANGE, 7, 0), (CHANGE, max(row["step"] for row in changes), 1))
    story = Story(str(tmp_path / "other" / "run"), steps=14, grows=True, deaths=deaths)
    made = Lead(story).run()
    assert tuple(made.happened) == deaths
    check_same(made, unbroken)
    again = made.records[0]["changes"]
    assert [row for row in changes if row not in again] == []
    ends = [(error, message) for _, _, error, message, _ in made.ends]
    assert all(error in ("Aborted", "StateLost") for error, _ in ends), ends
