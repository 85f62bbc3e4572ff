"""How long a worker has not responded, and in which phases that is too long."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.driver.hangs import SETUP_TIMES, SilentRanks

TRAINING = {"phase": "training", "step": 3}


def test_silence_counts_from_the_newest_sign_that_this_process_has_seen() -> None:
    now = [0.0]
    silence = SilentRanks(limit_s=10.0, clock=lambda: now[0])
    signs = {0: (5e9, "on a (pid 1)"), 1: (5e9, "on a (pid 2)")}
    assert silence.overdue(signs, TRAINING) == {}, "whatever the wall clock says, as after the machine slept"
    now[0] = 9.0
    signs = {**signs, 0: (5e9 + 9, "on a (pid 1)")}
    assert silence.overdue(signs, TRAINING) == {}
    now[0] = 10.0
    assert silence.overdue(signs, TRAINING) == {1: 10.0}
    assert silence.overdue({**signs, 1: (5e9, "on a (pid 3)")}, TRAINING) == {}, "another process has taken its place"
    now[0] = 19.0
    assert silence.overdue({0: signs[0]}, TRAINING) == {0: 10.0}
    now[0] = 20.0
    assert silence.overdue(signs, TRAINING) == {0: 11.0}, "rank 1 had left"


@pytest.mark.parametrize(
    ("progress", "limit"),
    [
        (TRAINING, 10.0),
        ({**TRAINING, "activity": "evaluating"}, 10.0),
        ({**TRAINING, "activity": "saving a checkpoint"}, 10.0),
        ({"phase": "exporting"}, 10.0),
        ({"phase": "setting up the workers"}, 10.0 * SETUP_TIMES),
        ({}, 10.0 * SETUP_TIMES),
    ],
)
def test_an_evaluation_or_a_save_allows_no_longer_silence_and_the_set_up_does(
    progress: dict[str, Any], limit: float
) -> None:
    now = [0.0]
    silence = SilentRanks(limit_s=10.0, clock=lambda: now[0])
    signs = {1: (0.0, "on a (pid 2)")}
    assert silence.overdue(signs, progress) == {}
    now[0] = limit - 0.1
    assert silence.overdue(signs, progress) == {}
    now[0] = limit
    assert silence.overdue(signs, progress) == {1: limit}
