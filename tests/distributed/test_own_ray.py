"""A program with a Ray of its own, before and after training: nothing of a run stays in its process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "guest" / "own_ray.py"
LIMIT_S = 400


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_program_starts_its_own_ray_before_and_after_it_trains(
    start_python: Callable[..., Any], guest_job: Any, place: Any
) -> None:
    """With its default settings, in which Ray sends what its processes print to the program."""
    place.write(guest_job(loop={"max_steps": 4, "eval_every": 2, "log_every": 1}))
    env = {**place.env, "HOME": str(place.folder), "PYTHONPATH": f"{place.folder}:{SCRIPT.parents[3]}"}
    done = start_python(str(SCRIPT), cwd=place.folder, env=env).finish(timeout=LIMIT_S)
    found = re.search(r"^ANSWER (.*)$", done.out, re.MULTILINE)
    assert found, done.text
    answer = json.loads(found[1])
    assert answer["status"] == ["done", "done"] and answer["equal"], "the same run, in both"
    assert answer["own"], "its own Ray goes on after the run"
    assert answer["changed"] == {"inside": [], "outside": []}
    assert "PATH" in answer["task"], "a task of its second Ray"
    inside = done.out.partition("-- inside")[2].partition("-- outside")[0]
    outside = done.out.partition("-- outside")[2].partition("-- end")[0]
    for part in (inside, outside):
        evaluations = re.findall(r"step (\d+): eval loss", part)
        assert evaluations == ["2", "4"], part
    assert "Traceback" not in done.text, done.text
