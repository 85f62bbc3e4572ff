"""Fault records: what is kept of an exception, and which of an attempt's faults decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import MLP, class_rows, make_job
from torch import nn

from raytrain.config.sections import RetryConfig
from raytrain.errors import CollectiveFailed, DevicePlacementError, InputError, OutOfMemory, RunError
from raytrain.execution.recovery import decide
from raytrain.execution.worker import Worker, fault_of
from raytrain.runs.faults import Fault, fallen_precision, read_faults, write_fault
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path), "test")


def of(error: Exception, *, attempt: int = 1, rank: int = 0, time: float = 0.0, precision: str = "fp32") -> Fault:
    try:
        raise error
    except Exception as caught:
        made = fault_of(caught, attempt=attempt, rank=rank, step=7, precision=precision, from_step=3)
    return Fault(**{**made.to_json(), "time": time or made.time})


def test_an_exception_is_recorded_with_type_first_line_and_location() -> None:
    made = of(ValueError("first line\nsecond line"))
    assert (made.error, made.message, made.step, made.from_step) == ("ValueError", "first line", 7, 3)
    assert "in of\n    raise error" in made.traceback and made.time > 1e9
    assert of(KeyError()).message == "KeyError" and of(ValueError("\n \n  the message")).message == "  the message"


def test_a_message_of_any_kind_is_a_line_that_can_be_written_and_shown() -> None:
    made = of(ValueError("red \x1b[31mX\x1b[2J \x9b1m nul\x00 tab\t \ud800 end"))
    assert made.message == "red \\x1b[31mX\\x1b[2J \\x9b1m nul\\x00 tab\t \\ud800 end"
    assert "\x1b" not in made.traceback and made.traceback.encode() and "\n" in made.traceback
    long = of(ValueError("a" * 600 + "b" * 10**6)).message
    assert long.startswith("a" * 500 + "... (") and long.endswith("1,000,600 characters)") and len(long) < 540
    assert of(ValueError("a" * 500)).message == "a" * 500


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (InputError("data.source", got="x", expected="y"), True),
        (DevicePlacementError("w is on meta"), True),
        (RunError("a full disk"), True),
        (OutOfMemory("a smaller micro-batch may fit"), False),
        (CollectiveFailed("a peer is gone"), False),
        (RuntimeError("somebody's"), False),
    ],
)
def test_warnings_that_we_suppress_stay_suppressed(error: Exception, final: bool) -> None:
    assert of(error).final is final


def test_a_fault_records_out_of_memory_and_the_size() -> None:
    assert of(torch.OutOfMemoryError("x")).out_of_memory and of(MemoryError()).out_of_memory
    assert of(OutOfMemory("x")).out_of_memory and not of(RuntimeError("CUDA out of memory")).out_of_memory
    made = fault_of(MemoryError(), attempt=1, rank=0, step=7, precision="fp32", from_step=3, micro_batch=8)
    assert made.micro_batch == 8 and of(MemoryError()).micro_batch is None


@pytest.mark.parametrize(("precision", "reduced"), [("fp32", False), ("fp64", False), ("tf32", True), ("bf16", True)])
def test_a_fault_records_whether_the_precision_was_reduced(precision: str, reduced: bool) -> None:
    assert of(RuntimeError("x"), precision=precision).reduced is reduced


def test_each_attempt_has_one_decisive_fault_the_cause_before_its_echo(run: RunFolder) -> None:
    write_fault(run, of(CollectiveFailed("peer gone"), attempt=1, rank=1, time=1.0))
    write_fault(run, of(ValueError("the cause"), attempt=1, rank=0, time=2.0))
    write_fault(run, of(RuntimeError("later"), attempt=1, rank=2, time=3.0))
    write_fault(run, of(RuntimeError("early"), attempt=2, rank=1, time=4.0))
    dead = of(RuntimeError("x"), attempt=2, rank=0, time=5.0)
    write_fault(run, Fault(**{**dead.to_json(), "error": "WorkerDied", "traceback": ""}))
    write_fault(run, of(CollectiveFailed("alone"), attempt=3, rank=0, time=6.0))
    write_fault(run, of(RuntimeError("its peer in a pass"), attempt=4, rank=0, time=7.0))
    write_fault(run, of(OutOfMemory("short"), attempt=4, rank=1, time=8.0))
    found = read_faults(run, since=1)
    assert [(f.attempt, f.error, f.message) for f in found] == [
        (1, "ValueError", "the cause"),
        (2, "WorkerDied", "x"),
        (3, "CollectiveFailed", "alone"),
        (4, "OutOfMemory", "short"),
    ]
    assert [f.attempt for f in read_faults(run, since=2)] == [2, 3, 4]  # what an earlier command met is history


def test_no_fault_no_record(run: RunFolder) -> None:
    assert read_faults(run, since=0) == [] and fallen_precision(run) is None


def test_the_precision_a_run_fell_to_is_the_last_one_decided(run: RunFolder) -> None:
    for row in (
        {"kind": "decision", "what": "checkpoint_every", "value": 3},
        {"kind": "decision", "what": "recovery", "precision": "bf16"},
        {"kind": "decision", "what": "rollback", "precision": "fp32"},
        {"kind": "decision", "what": "recovery", "precision": None},
        {"kind": "attempt", "precision": "fp16"},
    ):
        run.append_event(row)
    assert fallen_precision(run) == "fp32"


def test_a_failure_before_the_first_batch_is_recorded_with_its_kind(run: RunFolder) -> None:
    job, source = make_job(MLP, {"train": class_rows(32), "eval_fraction": 0.0}, run=run)
    worker = Worker(replace(job, run_path=run.path), workers=Workers(), local_rank=0, channel=None)
    worker.attempt = 1
    worker.session = session = Session(worker.job, workers=worker.workers, source=source)
    session.trainable.module.register_parameter("empty", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(DevicePlacementError) as caught:
        session.prepare("fp32")
    worker._record_fault(caught.value)
    (fault,) = read_faults(run, since=0)
    assert (fault.error, fault.final, fault.micro_batch) == ("DevicePlacementError", True, None)


@pytest.mark.parametrize(("size", "action"), [("whole", "stop"), (16, "go_on")])
def test_an_out_of_memory_that_ends_an_attempt_halves_no_whole_batch(run: RunFolder, size: Any, action: str) -> None:
    loop = {"micro_batch_size": size}
    job, source = make_job(MLP, {"train": class_rows(32), "eval_fraction": 0.0}, run=run, loop=loop)
    worker = Worker(replace(job, run_path=run.path), workers=Workers(), local_rank=0, channel=None)
    worker.attempt = 1
    worker.session = Session(worker.job, workers=worker.workers, source=source)
    worker.session.prepare("fp32")
    worker._record_fault(torch.OutOfMemoryError("planted"))
    made = decide(read_faults(run, since=0), retry=RetryConfig(), fallback=True, resumed_from=[0, 0])
    assert made.action == action and ("loop.micro_batch_size whole" in made.reason) == (size == "whole")
    assert made.micro_batch == (None if size == "whole" else 8)
