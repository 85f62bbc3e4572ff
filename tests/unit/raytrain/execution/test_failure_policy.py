"""The failure rules: the decision for each sequence of faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raytrain.config.sections import RetryConfig
from raytrain.errors import lost_in
from raytrain.execution.recovery import RecoveryDecision, decide, origins
from raytrain.runs.faults import Fault, lost_cluster

TRACE = """Traceback (most recent call last):
  File "loop.py", line 3, in run
    step()
  File "model.py", line {line}, in forward
{error}: {m}"""


def fault(**fields: Any) -> Fault:
    """A ValueError in step 5 under float32, unless `fields` override it."""
    base: dict[str, Any] = {
        "attempt": 1, "rank": 0, "step": 5, "error": "ValueError", "message": "at 0x7f01", "precision": "fp32",
        "reduced": False, "final": False, "from_step": 0, "time": 1.0,
    }  # fmt: skip
    base |= fields
    trace = TRACE.format(line=fields.get("line", 9), error=base["error"], m=base["message"])
    base.pop("line", None)
    return Fault(**{"traceback": "" if base["error"] == "WorkerDied" else trace, **base})


def died(**fields: Any) -> Fault:
    return fault(error="WorkerDied", message="exit by SIGKILL", **fields)


def decided(*faults: Fault, fallback: bool = True, starts: list[int] | None = None, **retry: int) -> RecoveryDecision:
    origins = starts if starts is not None else list(range(0, 10 * len(faults) + 1, 10))
    return decide(list(faults), retry=RetryConfig(**retry), fallback=fallback, resumed_from=origins)


def test_without_a_fault_the_run_continues() -> None:
    assert decide([], retry=RetryConfig(), fallback=True, resumed_from=[0]).action == "go_on"


@pytest.mark.parametrize(
    ("faults", "action", "words"),
    [
        pytest.param([died()], "go_on", "SIGKILL", id="a lost worker"),
        pytest.param([fault()], "go_on", "restarted from the checkpoint of step 10", id="the first error"),
        pytest.param([fault(final=True, error="InputError")], "stop", "InputError", id="what we explain ourselves"),
        pytest.param([fault(), fault(message="at 0x9999")], "stop", "twice at step 5", id="the same place twice"),
        pytest.param([fault(), fault(line=77)], "go_on", "restarted", id="another line is another error"),
        pytest.param([fault(), fault(error="KeyError")], "go_on", "restarted", id="another type is another error"),
        pytest.param([fault(), fault(step=6)], "go_on", "restarted", id="another step once"),
        pytest.param([fault(), fault(step=6), fault(step=7)], "stop", "three times", id="three steps, one place"),
        pytest.param([died(), died()], "go_on", "restarted", id="deaths leave no traceback to compare"),
        pytest.param([fault(), died(), fault()], "stop", "twice", id="a death between two equal errors"),
        pytest.param([fault(precision="bf16"), fault()], "go_on", "restarted", id="another precision once"),
    ],
)
def test_the_rules(faults: list[Fault], action: str, words: str) -> None:
    decision = decided(*faults)
    assert decision.action == action and words in decision.reason


def test_a_lost_collective_is_described_without_the_code_of_gloo_and_never_counts_as_the_same_error() -> None:
    """Its cause, such as a lost node, may be noticed later than the restart."""
    of_gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [a]:1")
    of_nccl = RuntimeError(
        "[../torch/csrc/NCCL.cpp:9] remote error. This may indicate a possible crash on rank 0.\nAt:"
    )
    assert str(lost_in("a collective of 2 workers", of_gloo)) == (
        "a collective of 2 workers failed: Connection closed by peer [a]:1"
    )
    assert str(lost_in("a collective", of_nccl)) == "a collective failed: remote error"
    assert (
        str(lost_in("a collective", RuntimeError("[timeout] after 5 s"))) == "a collective failed: [timeout] after 5 s"
    )
    failed = fault(error="CollectiveFailed", message="a collective of 2 workers failed: Connection closed by peer")
    decision = decided(failed, fault(**{**vars(failed), "step": 6}), fault(**{**vars(failed), "step": 6}))
    assert (decision.action, decision.reason.partition(";")[0]) == (
        "go_on", "attempt 1 failed at step 6: rank 0 lost the other workers "
        "(a collective of 2 workers failed: Connection closed by peer)",
    )  # fmt: skip


def test_an_error_of_the_users_code_is_compared_by_its_place_whatever_called_it() -> None:
    own, other = "net.py:10 in forward", "net.py:11 in forward"
    measured = fault(line=1, step=None, place=own)
    trained = fault(line=2, step=12, place=own)
    later = fault(line=3, step=30, place=own)
    assert decided(measured, trained).action == "go_on"
    stop = decided(measured, trained, later)
    assert (
        stop.action == "stop" and stop.reason == f"the same error occurred three times: ValueError: at 0x7f01 at {own}"
    )
    assert decided(measured, trained, fault(step=30, place=other)).action == "go_on"
    assert decided(fault(place=own), fault(place=other)).action == "go_on", "the same frames but for the last"
    twice = decided(measured, measured)
    assert twice.action == "stop" and "twice before the first step" in twice.reason


def test_without_a_checkpoint_a_run_restarts_and_reports_no_unknown_step() -> None:
    reason = decided(died(step=None), starts=[0, 0]).reason
    assert reason.startswith("attempt 1 failed: exit by SIGKILL; ")
    assert reason.endswith("restarted from step 0: there is no valid checkpoint yet")


def test_a_restart_names_the_attempt_that_failed() -> None:
    """Rank 0 of the next one tells it, after its own number."""
    after = decided(died(attempt=2, step=301), starts=[276, 286]).reason
    assert after == "attempt 2 failed after step 300: exit by SIGKILL; restarted from the checkpoint of step 286"
    error = decided(fault(attempt=2, rank=1, place="net.py:3 in forward"), starts=[0, 4]).reason
    assert error.startswith("attempt 2 failed at step 5 on rank 1 (ValueError: at 0x7f01 at net.py:3 in forward); ")
    reduced = decided(fault(attempt=2, error="RuntimeError", precision="fp16", reduced=True), starts=[0, 4]).reason
    assert reduced.startswith("attempt 2 failed: fp16 failed at step 5 (RuntimeError: ")
    assert reduced.endswith("; restarted from the checkpoint of step 4 in fp32")
    memory = decided(short(4, attempt=2), starts=[0, 4]).reason
    assert memory.startswith("attempt 2 failed: rank 0 ran out of memory at step 5 (")
    lost = decided(lost_cluster(3, "Ray's process raylet died", time=1.0), starts=[0, 4]).reason
    assert lost == "attempt 3 failed: Ray's process raylet died; restarted from the checkpoint of step 4"


def test_an_operation_that_fails_in_reduced_precision_raises_it_once() -> None:
    broken = fault(error="RuntimeError", message="no kernel for Half", precision="fp16", reduced=True)
    decision = decided(broken)
    assert decision.action == "raise_precision" and decision.precision == "fp32" and "no kernel" in decision.reason
    assert decided(broken, fallback=False).action == "go_on"
    assert decided(fault(error="TypeError", precision="fp16", reduced=True)).action == "go_on"
    # in float32 it is an ordinary error
    after = fault(error="RuntimeError", message="no kernel for Half", precision="fp32")
    assert decided(broken, after).action == "go_on"
    assert decided(broken, after, after).action == "stop"


@pytest.mark.parametrize(
    ("starts", "action"),
    [
        ([0, 0, 0, 0], "stop"),
        ([0, 0, 0, 4], "go_on"),
        ([0, 3, 3, 3], "go_on"),
        ([0, 3, 3, 3, 3], "stop"),
        ([5, 2, 2, 9], "go_on"),
    ],
)
def test_three_restarts_without_progress_are_enough(starts: list[int], action: str) -> None:
    deaths = [died(attempt=number) for number in range(1, len(starts))]
    decision = decided(*deaths, starts=starts)
    assert decision.action == action
    assert action == "go_on" or "3 attempts ended without progress" in decision.reason
    assert decided(*deaths[:1], starts=[0, 0], restarts_without_progress=1).action == "stop"


def test_deaths_before_an_attempt_begins_are_restarts_without_progress() -> None:
    """The fault of a dead worker has no step, and the checkpoint of step 1000 exists every time."""
    rows = [{"kind": "attempt", "attempt": 1, "from_step": 0}, {"kind": "fault", "attempt": 2}]
    deaths = [died(attempt=number) for number in range(1, 51)]
    assert origins(deaths[:3], rows, step=1000) == [0, 1000, 1000, 1000] and origins([], rows, step=7) == [7]

    def actions(*counts: int, rows: list[dict[str, Any]]) -> list[str]:
        return [decided(*deaths[:n], starts=origins(deaths[:n], rows, step=1000)).action for n in counts]

    assert actions(1, 3, 4, 50, rows=rows) == ["go_on", "go_on", "stop", "stop"]
    assert actions(1, 2, 3, 50, rows=[]) == ["go_on", "go_on", "stop", "stop"], "also when a run is resumed"
    starts = [{"kind": "attempt", "attempt": n, "from_step": 100 * n} for n in range(1, 10)]
    assert actions(3, 9, 11, 12, rows=starts) == ["go_on", "go_on", "go_on", "stop"], "all but the last 3 made progress"


@pytest.mark.parametrize("error", ["OSError", "TimeoutError"])
def test_an_error_of_reading_may_pass_and_is_counted_as_a_restart_without_progress(error: str) -> None:
    short = [fault(error=error, message="[Errno 116] Stale file handle", step=0, attempt=n) for n in (1, 2, 3)]
    assert [decided(*short[:n], starts=[0] * (n + 1)).action for n in (1, 2, 3)] == ["go_on", "go_on", "stop"]
    assert "3 attempts ended without progress" in decided(*short, starts=[0] * 4).reason
    missing = [fault(error="FileNotFoundError", step=0, attempt=n) for n in (1, 2)]
    assert "the same error occurred twice" in decided(*missing, starts=[0] * 3).reason


def test_a_fault_survives_json() -> None:
    one = fault(rank=2, step=None)
    assert Fault(**json.loads(json.dumps(one.to_json()))) == one


def short(micro_batch: int | None, **fields: Any) -> Fault:
    return fault(error="OutOfMemoryError", out_of_memory=True, micro_batch=micro_batch, **fields)


def test_out_of_memory_outside_the_passes_halves_the_micro_batch_and_costs_no_restart() -> None:
    faults = [short(size, attempt=number) for number, size in enumerate((16, 8, 4, 2), 1)]
    for count in range(1, 5):
        decision = decided(*faults[:count], starts=[0] * (count + 1))
        assert decision.action == "go_on" and decision.micro_batch == 16 // 2**count
        assert f"with micro-batches of {decision.micro_batch}" in decision.reason
    last = decided(*faults, short(1), starts=[0] * 6)
    assert last.action == "stop" and "loop.micro_batch_size 1" in last.reason


def test_other_faults_count_as_before_and_keep_the_smaller_size() -> None:
    deaths = [short(16), died(), short(8), died()]
    assert decided(*deaths, starts=[0] * 5).micro_batch == 4
    assert decided(*deaths, starts=[0] * 5).action == "go_on"
    third = decided(*deaths, died(), starts=[0] * 6)
    assert third.action == "stop" and "3 attempts ended without progress" in third.reason
    assert decided(died()).micro_batch is None
    grown = [short(8), died(), short(16), died()]
    assert decided(*grown, starts=[0] * 5).micro_batch == 4, "the size that fits, also where it has grown since"


def test_out_of_memory_before_there_are_micro_batches_is_an_error_as_any_other() -> None:
    assert decided(short(None)).action == "go_on"
    assert "twice" in decided(short(None), short(None)).reason
