"""Real failures inside a run: restarts by Ray, decisions of the failure policy, and the records.

The runs share one local cluster; each breaks in its own way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from raytrain.checkpoint.reader import newest_valid
from raytrain.runs.folder import RunFolder, this_process

Fit = Callable[..., Any]


@pytest.mark.timeout(240)
@pytest.mark.covers("DEV-02")
def test_the_same_error_twice_ends_the_run_with_its_cause(fit: Fit, guest_job: Callable[..., Any]) -> None:
    run = fit(guest_job(model={"fault": "always_raises", "at": 5}, save={"every": 2}, scale={"mode": "multi_gpu"}))
    assert run.result["status"] == "failed"
    assert "KeyError" in run.result["reason"] and "planted at pass 5" in run.result["reason"]
    assert re.search(r"guest_code\.py:\d+ in always_raises$", run.result["reason"]), run.result["reason"]
    assert len(run.events("attempt")) == 2
    faults = run.events("fault")
    assert [(row["error"], row["step"]) for row in faults] == [("KeyError", 5), ("KeyError", 5)]
    assert "in always_raises" in faults[-1]["traceback"]
    assert run.losses()[-1][0] == 4 and run.result["steps"] == 4
    assert run.result["weights"] is None
    assert "planted at pass 5" in (run.path / "report" / "report.html").read_text()
    assert run.plan["mode"]["value"] == "cpu" and "fell back: multi_gpu was asked for" in run.plan["mode"]["reason"]


@pytest.mark.timeout(240)
def test_code_that_exits_is_an_error_with_its_step_and_its_place(fit: Fit, guest_job: Callable[..., Any]) -> None:
    run = fit(guest_job(model={"fault": "exits", "at": 5}, save={"every": 2}))
    assert run.result["status"] == "failed" and len(run.events("attempt")) == 2
    assert re.search(r"twice at step 5: SystemExit: 3 at \S*guest_code\.py:\d+ in exits$", run.result["reason"])
    assert [(row["error"], row["step"]) for row in run.events("fault")] == [("SystemExit", 5), ("SystemExit", 5)]


@pytest.mark.timeout(240)
def test_unreadable_checkpoints_end_the_run_and_are_kept(fit: Fit, guest_job: Callable[..., Any], place: Any) -> None:
    model = {"fault": "shuts_the_store", "at": 5, "note": str(place.folder)}
    run = fit(guest_job(model=model, save={"every": 4}, retry={"restarts_without_progress": 2}))
    assert run.result["status"] == "failed" and run.result["weights"] is None
    assert "2 attempts ended without progress" in run.result["reason"] and "symbolic links" in run.result["reason"]
    assert [row["from_step"] for row in run.events("attempt")] == [0]
    assert [row["error"] for row in run.events("fault")] == ["KeyError", "OSError"]
    assert run.checkpoints() == [4] and run.result["best_checkpoint"] == "step_00000004", "still there"
    (run.checkpoint(4) / "manifest.json").unlink()
    (place.folder / "manifest.json").rename(run.checkpoint(4) / "manifest.json")
    assert newest_valid(RunFolder(str(run.path))).checkpoint.step == 4, "and good, once the disk is"


@pytest.mark.daily
@pytest.mark.timeout(420)
@pytest.mark.covers("TUNE-08")
def test_out_of_memory_halves_the_micro_batch_and_does_not_change_the_losses(
    fit: Fit, guest_job: Callable[..., Any], tmp_path: Path
) -> None:
    """In a pass without a restart; behind a step with one, which no limit counts; among shards always with one."""

    def run_of(name: str, workers: int, strategy: str = "data_parallel") -> Any:
        (tmp_path / name).mkdir()
        return fit(
            guest_job(
                name=name,
                model={"builder": "guest_code:short_net", "note": str(tmp_path / name)},
                precision={"dtype": "fp64"},
                loop={"max_steps": 16},
                save={"every": 5, "asynchronous": False},
                scale={"workers": workers, "strategy": strategy},
                retry={"restarts_without_progress": 0},
            )
        )

    clean, run, shards = run_of("clean", 1), run_of("short", 2), run_of("shards", 2, "fsdp")
    assert clean.events("out_of_memory") == []
    for short in (run, shards):
        assert short.result["status"] == "done"
        assert [step for step, _ in short.losses()] == list(range(1, 17))
        gaps = [abs(ours - theirs) for (_, ours), (_, theirs) in zip(short.losses(), clean.losses(), strict=True)]
        assert max(gaps) < 1e-6, "the guest computes its loss in float32"
    (event,) = run.events("out_of_memory")
    assert (event["step"], event["who"], event["attempt"]) == (7, ["rank 1"], 1)
    assert (event["micro_batch_size_before"], event["micro_batch_size"]) == (6, 3)
    assert "2.00 GiB" in event["reason"]
    assert [row["from_step"] for row in run.events("attempt")] == [0, 10]
    (fault,) = run.events("fault")
    assert (fault["out_of_memory"], fault["micro_batch"], fault["step"]) == (True, 3, 12)
    assert "with micro-batches of 2" in run.events("attempt")[1]["reason"]
    assert (
        "Memory ran out, and steps were retried in smaller micro-batches"
        in (run.path / "report" / "report.html").read_text()
    )
    assert run.plan["effective_batch"]["value"] == clean.plan["effective_batch"]["value"] == 12
    attempts, faults = shards.events("attempt"), shards.events("fault")
    assert [row["from_step"] for row in attempts] == [0, 5, 10] and shards.events("out_of_memory") == []
    assert [(f["out_of_memory"], f["micro_batch"], f["step"], f["rank"]) for f in faults] == [
        (True, 6, 7, 1), (True, 3, 12, 1),
    ]  # fmt: skip
    assert "with micro-batches of 3" in attempts[1]["reason"] and "with micro-batches of 2" in attempts[2]["reason"]
    assert attempts[0]["sharded"]["blocks"] == 2
    assert (
        load_file(shards.path / "weights" / "model.safetensors").keys()
        == load_file(clean.path / "weights" / "model.safetensors").keys()
    )


@pytest.mark.daily
@pytest.mark.timeout(240)
@pytest.mark.covers("PREC-09", "DEV-02")
def test_an_operation_that_autocast_breaks_sends_the_run_to_fp32(fit: Fit, guest_job: Callable[..., Any]) -> None:
    run = fit(
        guest_job(
            model={"fault": "fails_under_autocast", "at": 5},
            precision={"dtype": "bf16"},
            save={"every": 2},
            scale={"mode": "single_gpu"},
        )
    )
    assert run.result["status"] == "done"
    assert [step for step, _ in run.losses()] == [1, 2, 3, 4, 5, 6]
    assert [(row["precision"], row["from_step"]) for row in run.events("attempt")] == [("bf16", 0), ("fp32", 4)]
    (decision,) = run.events("decision")
    assert decision["precision"] == "fp32"
    assert "bf16 failed at step 5" in decision["reason"] and "planted_kernel" in decision["reason"]
    assert run.plan["mode"]["value"] == "cpu" and "fell back: single_gpu was asked for" in run.plan["mode"]["reason"]


@pytest.mark.daily
@pytest.mark.timeout(240)
@pytest.mark.covers("DEV-02")
def test_three_non_finite_steps_roll_back_past_the_data_and_raise_the_precision(
    fit: Fit, guest_job: Callable[..., Any], place: Any
) -> None:
    seen = place.folder / "rows.txt"
    run = fit(
        guest_job(
            model={"fault": "overflows_under_autocast", "at": 7, "note": str(seen)},
            precision={"dtype": "bf16"},
            loop={"max_steps": 10, "micro_batch_size": 12},
            save={"every": 4},
        )
    )
    assert run.result["status"] == "done"
    (decision,) = run.events("decision")
    assert (decision["what"], decision["value"], decision["precision"]) == ("rollback", 8, "fp32")
    assert "3 steps in a row" in decision["reason"] and "row 108" in decision["reason"]
    assert [step for step, _ in run.losses()] == list(range(1, 11))
    assert len(run.events("attempt")) == 1
    passes = [json.loads(line) for line in seen.read_text().splitlines()]
    tried, counted, *windows = [rows for rows in passes if len(rows) == 12]
    assert tried == counted == windows[0], "the driver runs the first micro-batch before anything starts, and counts it"
    assert len(windows) == 9 + 2, "nine steps, the last three of them lost; then two more, on rows not seen before"
    drawn = [row for window in windows for row in window]
    assert len(set(drawn)) == len(drawn)
    (ended,) = run.events("attempt_end")
    weights = load_file(run.path / "weights" / "model.safetensors")
    saved = load_file(run.checkpoint(10) / "model.safetensors")
    assert ended["step"] == 10 and weights.keys() == saved.keys()
    assert all(bool((weights[name] == saved[name]).all()) for name in saved), "not those of the session left behind"
    assert run.plan["mode"]["value"] == "cpu" and run.plan["mode"]["reason"].startswith("there is no GPU")


@pytest.mark.timeout(300)
def test_a_run_taken_over_by_another_command_stops_writing(fit: Fit, guest_job: Callable[..., Any], place: Any) -> None:
    job = guest_job(model={"pause": 0.03}, loop={"max_steps": 1000}, save={"every": 20}, scale={"workers": 2})
    with ThreadPoolExecutor(1) as aside:
        old = aside.submit(fit, job)
        place.wait_for(place.steps_of(1, more_than=5), limit=120)
        folder = RunFolder(str(place.run.path))
        assert folder.next_attempt(this_process()) == 2
        taken_at = place.run.losses()[-1][0]
        old.result(timeout=120)
    run = place.run
    assert run.losses()[-1][0] <= taken_at + 1, "at most the row that was being written"
    assert not (run.path / "result.json").exists() and not (run.path / "weights").exists()
    assert run.events("driver_end") == [] and run.events("fault") == []
    assert [path.name for path in run.path.glob("faults/*") if path.name.startswith("0002")] == []
    assert folder.alive() == folder.owner(), "it belongs to the new owner, and is not over"


@pytest.mark.timeout(240)
def test_memory_that_runs_out_while_the_weights_are_gathered_repeats_no_training(
    fit: Fit, guest_job: Callable[..., Any]
) -> None:
    """The other worker must not wait for it either: the attempt ends, and the next one only says why."""
    run = fit(guest_job(model={"builder": "guest_code:gathered_short"}, scale={"workers": 2}, save={"every": 100}))
    assert (run.result["status"], run.result["steps"], run.result["weights"]) == ("failed", 6, None)
    reason = run.result["reason"]
    assert "the training is complete and its checkpoint of step 6 is kept" in reason
    assert "could not be exported: OutOfMemoryError: planted" in reason and f"`raytrain export {run.path}`" in reason
    assert [row["from_step"] for row in run.events("attempt")] == [0] and len(run.events("fault")) == 1
    assert [step for step, _ in run.losses()] == list(range(1, 7)) and run.checkpoints() == [6]
    assert "weights could not be exported" in (run.path / "report" / "report.html").read_text()
