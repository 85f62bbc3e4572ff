"""The timeline of the report says in words what happened."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster.wording import loss_text, measured, plain_number, rate_text, size
from raytrain.report.tables import timeline

RANKS = [{"node": f"10.0.0.{n}", "device": "cpu", "pid": n, "visible": None} for n in (1, 2)]


def words(**row: Any) -> str:
    """The one entry of a timeline, as text."""
    text = re.sub(r"<[^>]+>", " ", timeline([{"time": 5.0, **row}]))
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"kind": "driver_start", "pid": 7, "changed": ["loop.max_steps"], "ray_job": "raysubmit_1"},
         "driver start the command started (pid 7) as Ray job raysubmit_1 changed: loop.max_steps"),
        ({"kind": "attempt", "attempt": 2, "from_step": 1200, "workers": 2, "precision": "bf16", "device": "cpu",
          "reason": "rank 1 died", "ranks": RANKS, "matmul": {"autocast": "bfloat16"}, "platform": {"name": "cpu"}},
         "attempt attempt 2 begins at step 1,200: 2 workers on cpu in bf16, on 2 nodes rank 1 died"),
        ({"kind": "attempt", "attempt": 1, "from_step": 0, "workers": 1, "precision": "fp32", "device": "cuda:0",
          "reason": "no faults", "node": "a"}, "attempt attempt 1 begins at step 0: 1 worker on cuda:0 in fp32, on a"),
        ({"kind": "attempt_end", "attempt": 1, "step": 40, "outcome": "done", "reason": "40 steps"},
         "attempt end attempt 1 ended at step 40: done, 40 steps"),
        ({"kind": "checkpoint", "step": 40, "stall_s": 0.0073, "seconds": {"data": 1.0}},
         "checkpoint step 40; training waited 7.3 ms"),
        ({"kind": "compile", "step": 64, "achieved": "2 of 2 parts", "graphs": 1, "reasons": [],
          "parts": [{"name": "blocks.0", "kind": "MoEBlock"}]}, "compile step 64, achieved 2 of 2 parts, graphs 1"),
        ({"kind": "exported", "step": 400, "seconds": 1.72},
         "exported the weights of step 400 were written in 1.7 s"),
        ({"kind": "decision", "what": "micro_batch", "value": 8, "reason": "it fits"},
         "decision micro batch: 8 (it fits)"),
        ({"kind": "decision", "what": "shares", "value": {"parts": [1, 2]}, "reason": "measured"},
         "decision shares (measured)"),
        ({"kind": "death", "who": "expert host 0", "pid": 3, "step": 4, "reason": "expert host 0 died", "x": {"a": 1}},
         "death expert host 0 died pid 3, step 4"),
        ({"kind": "fault", "attempt": 2, "rank": 0, "step": None, "error": "WorkerDied", "message": "signal 9",
          "precision": "", "from_step": 1276, "out_of_memory": False, "pid": 7, "node": "10.0.0.1"},
         "fault WorkerDied: signal 9 rank 0 (pid 7 on 10.0.0.1) of attempt 2, from step 1,276"),
        ({"kind": "fault", "attempt": 1, "rank": 1, "step": 40, "error": "OutOfMemoryError", "message": "no memory",
          "precision": "bf16", "from_step": 0, "out_of_memory": True, "micro_batch": 8, "node": "3124" * 14},
         "fault OutOfMemoryError: no memory rank 1 of attempt 1, failed at step 40, in bf16, micro-batches of 8 rows, "
         "out of memory"),
        ({"kind": "decision", "what": "recovery", "value": "go_on", "precision": None, "reason": "rank 0 failed"},
         "decision restart: rank 0 failed"),
        ({"kind": "driver_end", "status": "done", "reason": "9 steps"}, "driver end the command ended: done, 9 steps"),
    ],
)  # fmt: skip
def test_each_kind_of_event_is_a_sentence_without_json(row: dict[str, Any], said: str) -> None:
    assert words(**row) == f"+0 s {said}"


@pytest.mark.parametrize(
    ("value", "text"),
    [(4188.3, "4,188"), (10150.4, "10,150"), (1234.5, "1,234"), (12.345, "12.35"), (2000.0, "2,000"),
     (-5432.1, "-5,432")],
)  # fmt: skip
def test_thousands_are_separated_from_one_thousand_on(value: float, text: str) -> None:
    assert plain_number(value) == text
    assert plain_number(123456.78, digits=6) == "123,457" and plain_number(4188.3456, digits=6) == "4,188.35"


@pytest.mark.parametrize(
    ("value", "texts"),
    [(1.45, ("1.450", "1.4500", "1.450")), (869.93, ("869.9", "869.9300", "870")), (2.0, ("2", "2.0000", "2")),
     (1.5e-5, ("1.5e-05", "1.5e-05", "1.5e-05")), (14779.4, ("14,779", "14,779", "14,779")), (None, ("-", "-", "-"))],
)  # fmt: skip
def test_a_measured_figure_keeps_its_digits(value: float | None, texts: tuple[str, str, str]) -> None:
    assert (measured(value), loss_text(value), rate_text(value)) == texts


def test_an_attempt_does_not_repeat_the_reason_of_the_decision_before_it() -> None:
    why = "rank 0 failed (WorkerDied: signal 9); restarted from the checkpoint of step 286"
    begun = {"kind": "attempt", "attempt": 2, "from_step": 276, "reason": "no faults"}
    decided = {"kind": "decision", "what": "recovery", "value": "go_on", "reason": why}
    page = timeline([begun, decided, {**begun, "attempt": 3, "from_step": 286, "reason": why}])
    assert "no faults" not in page and page.count(why) == 1


def test_a_size_just_below_the_next_unit_has_no_exponent() -> None:
    assert [size(n * 2**20) for n in (1010, 1023.9, 99.96, 1.5)] == ["1010 MiB", "1 GiB", "100 MiB", "1.5 MiB"]


def test_of_the_messages_about_one_preparation_the_last_is_shown() -> None:
    rows = [{"kind": "preparation", "time": float(n), "attempt": 1 + n // 3, "reason": f"part {n}"} for n in range(6)]
    page = timeline([*rows, {"kind": "dashboard", "time": 9.0, "reason": "over"}])
    assert timeline([]) == ""
    assert re.findall(r"part \d", page) == ["part 2", "part 5"] and "over" in page
