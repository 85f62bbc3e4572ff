"""The rules of the findings: each fires on its sign, and is silent without it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain.report.figures import outcome
from raytrain.report.findings import diagnose, finding_lines
from raytrain.report.records import ConfigRow, PlanRow, RunRecords
from raytrain.runs.folder import RunFolder


def rows(losses: list[Any], **columns: Any) -> list[dict[str, Any]]:
    """Train rows of the given losses; a column is a constant or one value a step."""
    return [
        {"step": n + 1, "epoch": 0, "loss": loss}
        | {key: seen[n] if isinstance(seen, list) else seen for key, seen in columns.items()}
        for n, loss in enumerate(losses)
    ]


def evals(*losses: float) -> list[dict[str, Any]]:
    return [{"step": 10 * (n + 1), "loss": loss} for n, loss in enumerate(losses)]


def records(**fields: Any) -> RunRecords:
    fields.setdefault("result", {"status": "done", "steps": 40, "wall_s": 100.0})
    return RunRecords(name="run", path="run", **fields)


def titles(run: RunRecords) -> dict[str, str]:
    return {finding.title: finding.severity for finding in diagnose(run)}


def test_a_gpu_that_could_not_be_used_is_a_warning_unless_cpus_were_asked_for() -> None:
    lost, on_cpu = ["GPU 0 cannot be read"], [PlanRow("device", "cpu", "")]
    title = "Trained on the CPU although there is a GPU"
    assert titles(records(unusable=lost, plan=on_cpu)).get(title) == "warning"
    asked = [ConfigRow("scale.mode", "cpu", "file")]
    assert title not in titles(records(unusable=lost, plan=on_cpu, config=asked)) | titles(records(plan=on_cpu))
    on_gpu = [PlanRow("device", "cuda", "")]
    assert titles(records(unusable=lost, plan=on_gpu)).get("Some GPUs were not used") == "warning"


@pytest.mark.covers("TRB-39")
def test_gpus_without_a_worker_are_named_with_the_workers_that_were_asked_for_and_those_that_ran() -> None:
    def found(
        workers: int, gpus: int, hosts: Any = "none", asked: Any = 1, device: str = "cuda", kind: str | None = None
    ) -> list[Any]:
        run = records(
            gpus=gpus, plan=[PlanRow("device", device, ""), PlanRow("hosts", hosts, "")],
            config=[ConfigRow("scale.workers", asked, "file"), ConfigRow("scale.mode", "auto", "default"),
                    ConfigRow("scale.accelerator", kind, "file")],
            events=[{"kind": "attempt", "attempt": 1, "from_step": 0, "workers": workers}],
        )  # fmt: skip
        return [finding for finding in diagnose(run) if "GPUs did nothing" in finding.title]

    (one,) = found(workers=1, gpus=4)
    assert one.severity == "info" and one.title == "3 of 4 GPUs did nothing"
    assert one.evidence == "scale.workers 1, scale.mode auto: 1 worker ran on 4 GPUs"
    assert one.remedy.startswith("Set scale.workers: auto or raise loop.global_batch_size")
    (shrunk,) = found(workers=3, gpus=4, asked=[2, 4])
    assert (
        shrunk.severity == "warning"
        and shrunk.evidence.startswith("scale.workers [2, 4]")
        and "3 workers ran on 4 GPUs" in shrunk.evidence
    )
    assert "auto" not in found(workers=2, gpus=3, asked="auto")[0].remedy
    assert found(4, 4) == found(2, 4, hosts=2) == found(1, 4, hosts={"T4": 3}) == found(1, 4, device="cpu") == []
    assert found(1, 4, kind="H100") == []
    assert "2 of 4" in found(1, 4, hosts=1)[0].title


@pytest.mark.covers("TRB-38")
def test_idle_gpus_are_shown_with_what_each_worker_sees_of_them() -> None:
    ranks = [{"node": "10.0.0.1", "device": f"cuda:{n}", "pid": n, "visible": "0,1"} for n in range(2)]
    run = records(
        gpus=4, plan=[PlanRow("device", "cuda", ""), PlanRow("hosts", 0, "")],
        config=[ConfigRow("scale.workers", "auto", "default")],
        events=[{"kind": "attempt", "attempt": 1, "from_step": 0, "workers": 2, "ranks": ranks}],
    )  # fmt: skip
    (one,) = [finding for finding in diagnose(run) if "GPUs did nothing" in finding.title]
    assert "(rank 0 on cuda:0 of 10.0.0.1, rank 1 on cuda:1 of 10.0.0.1)" in one.evidence
    assert one.evidence.endswith("the workers see CUDA_VISIBLE_DEVICES=0,1")


@pytest.mark.covers("VER-08")
def test_the_utilisation_of_gpus_is_judged_except_where_steps_are_too_short() -> None:
    def found(*used: float, step_s: float = 0.2, kind: str = "cuda", run: int = 1 << 30) -> list[Any]:
        devices = [
            {"kind": kind, "device": f"cuda:{n}", "utilisation": share, "memory_run": run}
            for n, share in enumerate(used)
        ]
        rows_of_node = [{"node": "a", "step": n, "devices": devices} for n in range(20)]
        plan = [PlanRow("accumulation", 1, "")]
        seen = records(
            train=rows([3.0 - 0.05 * n for n in range(40)], step_time_s=step_s), telemetry=rows_of_node, plan=plan
        )
        return [one for one in diagnose(seen) if "GPU" in one.title]

    (low,) = found(35.0, 90.0)
    assert (low.severity, low.title) == ("info", "The GPUs are not fully used")
    assert low.evidence == "median utilisation: cuda:0 of a 35 %, cuda:1 of a 90 %, with steps of 0.2 s"
    assert (
        low.remedy.startswith("Raise loop.global_batch_size, set loop.compile: reduce-overhead")
        and "micro_batch" not in low.remedy
    )
    (used,) = found(81.0, 95.0)
    assert (used.severity, used.title) == ("good", "The GPUs are used")
    (short,) = found(35.0, step_s=0.004)
    assert short.title == "Steps are too short to fill a GPU" and "4 ms" in short.evidence
    assert found(35.0, kind="cpu") == found(35.0, run=0) == [], "a CPU, and a GPU that this run does not use"


FALLING = [3.0 - 0.05 * n for n in range(40)]


def account(**parts: float) -> dict[str, Any]:
    return {"status": "done", "wall_s": sum(parts.values()), "time": parts}


def test_a_healthy_run_has_only_good_findings():
    seen = titles(records(train=rows(FALLING, grad_norm=0.5, step_time_s=0.1), evals=evals(2.5, 2.2, 2.0, 1.9)))
    assert seen == {"The training loss fell": "good"}


def test_a_rising_loss_and_a_constant_loss():
    assert titles(records(train=rows([2.0 + 0.1 * n for n in range(40)])))["The training loss diverged"] == "error"
    noisy = [0.1, 0.02, 0.2, 0.05, 0.3, 0.02, 0.04, 0.25, 0.3]
    assert not any("diverged" in title for title in titles(records(train=rows(noisy)))), "nine rows say little"
    assert titles(records(train=rows([0.1, 0.1, 0.1, 5.0, 5.0, 5.0])))["The training loss diverged"] == "error"
    assert titles(records(train=rows([2.0] * 40)))["The training loss is not falling"] == "warning"
    assert titles(records(train=rows([2.0]))) == {}
    assert titles(records(train=rows([2.0] * 9))) == {}, "too few to tell"
    assert "The training loss is not falling" in titles(records(train=rows([2.0] * 10)))


def test_overfitting_needs_a_falling_training_loss():
    name = "Overfitting: eval loss rises while training loss falls"
    rising = evals(2.0, 2.2, 2.4, 2.6)
    assert titles(records(train=rows(FALLING), evals=rising))[name] == "warning"
    assert name not in titles(records(train=rows([2.0] * 40), evals=rising))
    assert name not in titles(records(train=rows(FALLING), evals=evals(2.6, 2.4, 2.2, 2.205)))


def test_a_training_loss_that_turns_with_the_eval_loss_is_no_overfitting() -> None:
    """It fell before the best evaluation, and is below its start at the end: it diverges all the same."""
    title = "Overfitting: eval loss rises while training loss falls"
    turns = [3.0 - 0.1 * n for n in range(20)] + [1.1 + 0.04 * n for n in range(20)]
    late = evals(2.0, 1.2, 1.6, 1.9)
    assert title not in titles(records(train=rows(turns), evals=late))
    falls_on = [*turns[:20], *(1.1 - 0.01 * n for n in range(20))]
    assert titles(records(train=rows(falls_on), evals=late))[title] == "warning"


def test_skipped_steps_are_counted_from_losses_and_counters():
    counted = [0] * 20 + [4] * 20
    run = records(train=rows(["nan" if n == 7 else loss for n, loss in enumerate(FALLING)], skipped_steps=counted))
    found = next(f for f in diagnose(run) if f.title == "Non-finite steps were skipped")
    assert found.severity == "warning"
    assert found.evidence == "4 steps; the run has 40; in the log rows of step 8, 21"
    undone = [{"kind": "decision", "what": "rollback", "skipped": 5}] * 3
    (rolled,) = [one for one in diagnose(records(train=rows(FALLING), events=undone)) if "skipped" in one.title]
    assert rolled.evidence == "15 steps; the run has 40; 15 of them in front of 3 roll-backs"
    assert rolled.severity == "warning"
    fp16 = records(train=run.train, plan=[PlanRow("precision", "fp16", "asked for")])
    assert titles(fp16)["Non-finite steps were skipped"] == "info"


@pytest.mark.parametrize("error", ["WorkerDied", "ClusterLost"])
def test_restarts_name_the_death_and_not_the_errors_it_caused(error: str):
    run = records(
        events=[
            {"kind": "attempt", "attempt": 1, "from_step": 0},
            {"kind": "fault", "attempt": 1, "error": "RuntimeError", "message": "peer gone"},
            {"kind": "fault", "attempt": 1, "error": error, "message": "signal 9"},
            {"kind": "attempt", "attempt": 2, "from_step": 30},
        ]
    )
    found = next(f for f in diagnose(run) if f.title == "2 attempts")
    assert found.evidence == f"resumed from step 30: {error}: signal 9"


def test_the_causes_of_restarts_are_joined_without_the_stops_of_their_sentences():
    died = {"kind": "fault", "attempt": 2, "error": "WorkerDied", "message": "A worker health check failed."}
    stopped = {"kind": "attempt_end", "attempt": 1, "step": 276, "outcome": "interrupted", "reason": "a stop was asked"}
    begun = [{"kind": "attempt", "attempt": n, "from_step": step} for n, step in ((1, 0), (2, 276), (3, 1286))]
    found = next(f for f in diagnose(records(events=[begun[0], stopped, begun[1], died, begun[2]])) if "3" in f.title)
    assert found.evidence == (
        "resumed from steps 276 and 1,286; 1 of the earlier attempts failed: "
        "WorkerDied: A worker health check failed; a stop was asked (step 276)"
    )


def test_fall_backs_of_the_run_and_warnings_of_the_plan():
    decision = {"kind": "decision", "what": "recovery", "value": "raise_precision", "reason": "bf16 failed"}
    seen = diagnose(records(events=[decision, {**decision, "value": "go_on"}], warnings=["one worker only"]))
    assert [(f.severity, f.evidence) for f in seen] == [("warning", "bf16 failed"), ("info", "one worker only")]


@pytest.mark.covers("TRB-34")
def test_recompilations_are_reported_with_their_number_their_cost_and_the_parts():
    parts = [{"name": "blocks.0", "recompiles": 5}, {"name": "head", "recompiles": 0}]
    event = {"kind": "compile", "recompiles": 5, "seconds": 21.0, "parts": parts}
    (found,) = [one for one in diagnose(records(events=[event])) if one.severity == "warning"]
    assert found.title == "Compiled code was compiled again and again" and "loop.compile_parts" in found.remedy
    assert found.evidence == "5 times, 21.0 s of compilation in all: blocks.0"
    assert titles(records(events=[{**event, "recompiles": 4}])) == {}
    for graphs, recompiles, many in ((16, 8, False), (10, 8, False), (9, 8, True)):  # 8, 2 and 1 pieces of code
        assert bool(titles(records(events=[{**event, "graphs": graphs, "recompiles": recompiles}]))) is many


def compiled_run(*, step_s: float, steps: int = 40, eager_s: float | None = 0.02, **event: Any) -> RunRecords:
    """A run of 10 s in the compiler whose steps read data for 1 ms."""
    train = rows([1.0] * steps, step_time_s=[9.0, *[step_s + 0.001] * (steps - 1)], data_time_s=0.001)
    events = [{"kind": "compile", "achieved": "2 of 2 parts", "seconds": 10.0, **event}]
    events += [] if eager_s is None else [{"kind": "eager_step", "seconds": eager_s}]
    spent = {"compute": 60.0, "compile": 10.0, "startup": 30.0}
    return records(
        train=train, events=events, result={"status": "done", "steps": steps, "wall_s": 100.0, "time": spent}
    )


@pytest.mark.covers("TRB-19")
def test_compilation_is_judged_by_the_eager_step_and_by_the_step_where_it_pays():
    def found(run: RunRecords) -> list[tuple[str, str, str]]:
        about = [one for one in diagnose(run) if one.title.startswith("Compil")]
        return [(one.severity, one.title, one.evidence) for one in about]

    took = "compilation took 10.0 s of 1 min 40 s"
    slow = [("warning", "Compiled is slower", f"compiled 25 ms, eager 20 ms a step: 1.25 times; {took}")]
    assert found(compiled_run(step_s=0.025)) == slow
    same = f"compiled 19.8 ms, eager 20 ms a step: 0.99 times; {took}"
    assert found(compiled_run(step_s=0.0198)) == [("warning", "Compilation gains nothing", same)]
    short = f"compiled 15 ms, eager 20 ms a step: 0.75 times; {took}; it pays after step 2,000, this run has 40"
    assert found(compiled_run(step_s=0.015)) == [("warning", "Compilation did not pay", short)]
    (pays,) = found(compiled_run(step_s=0.015, steps=2000))
    assert pays[:2] == ("good", "Compilation pays") and pays[2].endswith("; it pays after step 2,000 of 2,000")
    assert [title for _, title, _ in found(compiled_run(step_s=0.015, steps=1999))] == ["Compilation did not pay"]

    without = compiled_run(step_s=0.015, eager_s=None)
    assert found(without) == [], "nothing is guessed"
    assert found(compiled_run(step_s=0.015, achieved="0 of 2 parts")) == []
    spent = {**(without.result or {}), "time": {"compute": 60.0, "compile": 40.0}}
    part = "Compilation takes much of the time"
    assert part in titles(records(train=without.train, events=without.events, result=spent))
    known = compiled_run(step_s=0.015)
    assert part not in titles(records(train=known.train, events=known.events, result=spent)), "one finding says it"


@pytest.mark.covers("TRB-01")
def test_an_out_of_memory_error_is_reported_with_the_size_that_fitted():
    def shortage(step: int, size: int, **more: Any) -> dict[str, Any]:
        told = {"kind": "out_of_memory", "step": step, "who": ["rank 1"], "micro_batch_size": size, "seconds": 0.5}
        return {**told, "equal": "within rounding", **more}

    name = "Memory ran out, and steps were retried in smaller micro-batches"
    found = {one.title: one for one in diagnose(records(events=[shortage(7, 16), shortage(7, 8), shortage(90, 16)]))}
    assert found[name].severity == "warning" and "loop.micro_batch_size: 8" in found[name].remedy
    assert "3 times, on rank 1, in step 7, 90; micro-batches down to 8, 1.5 s" in found[name].evidence
    drawn = shortage(7, 4, who=["expert host 0", "rank 1"], equal="in distribution only")
    (one,) = [one for one in diagnose(records(events=[shortage(5, 8), drawn, shortage(9, 8)])) if one.title == name]
    assert "3 times, on rank 1, expert host 0, in step 5, 7, 9; micro-batches down to 4, 1.5 s" in one.evidence
    assert "in distribution only" in one.evidence
    assert name not in titles(records(events=[{"kind": "attempt", "attempt": 1}]))


@pytest.mark.covers("BP-12")
@pytest.mark.parametrize(
    ("part", "title"),
    [
        ("eval", "Evaluation takes much of the time"),
        ("save", "Checkpoints cost more than their budget of 3 %"),
        ("startup", "Start-up takes much of the time"),
        ("compile", "Compilation takes much of the time"),
        ("export", "Writing the weights and a sample takes much of the time"),
        ("restart", "Restarts take much of the time"),
        ("lost", "Work was lost between a checkpoint and a fault"),
    ],
)
def test_the_part_of_time_that_limits(part: str, title: str):
    train = rows(FALLING)
    assert titles(records(train=train, result=account(compute=600.0, **{part: 400.0})))[title] == "warning"
    short = titles(records(train=train, result=account(compute=60.0, **{part: 40.0})))[title]
    assert short == ("info" if part in ("startup", "lost") else "warning")
    busy = {one.title: one for one in diagnose(records(train=train, result=account(compute=990.0, **{part: 10.0})))}
    assert title not in busy and busy["Limited by compute"].severity == "good"
    assert busy["Limited by compute"].evidence.startswith("99% of"), "the share of the time that is computation"


@pytest.mark.covers("TRB-18", "TRB-21")
def test_a_run_limited_by_compute_is_told_of_bf16_and_of_larger_batches_unless_it_has_tried_them() -> None:
    def told(**keys: Any) -> str:
        config = [ConfigRow(key.replace("__", "."), value, "file") for key, value in keys.items()]
        done = records(train=rows(FALLING), result=account(compute=990.0), config=config)
        return remedy_of(done, "Limited by compute")

    batch = "`raytrain tune` find the batch size that computes the most rows per second."
    dtype = "Set precision.dtype: auto, which compares bf16 with fp32 on this model"
    assert told(precision__dtype="fp32") == f"{dtype} or let {batch}"
    assert told(precision__dtype="auto") == told(precision__dtype="bf16") == f"Let {batch}", "measured, or in force"
    assert told(precision__dtype="auto", loop__micro_batch_size=8) == "", "the search has found its batch"


STEP = {"step_time_s": 1.0, "data_time_s": 0.02, "wait_time_s": 0.1, "data_cpu_share": 0.0, "slowest_data_time_s": 0.02,
        "work_time_s_median": 0.9, "work_time_s_max": 0.92, "slowest_rank": 1}  # fmt: skip


def limits(**columns: Any) -> dict[str, Any]:
    """Findings about what a step waits for, by title."""
    found = diagnose(records(train=rows(FALLING, **{**STEP, **columns})))
    return {one.title: one for one in found if one.severity == "warning"}


@pytest.mark.covers("MON-09", "MON-10")
def test_a_step_that_waits_for_data_is_input_bound_and_the_number_is_that_of_the_later_half() -> None:
    assert limits(data_time_s=[0.9] * 20 + [0.14] * 20) == {}, "the warm-up does not count"
    (title, found), *others = limits(data_time_s=[0.01] * 20 + [0.4] * 20, data_cpu_share=0.3).items()
    assert (title, others) == ("Input-bound: steps wait for data", [])
    assert "40% of a step of 1.0 s" in found.evidence and "training process itself computes 75%" in found.evidence
    assert "data.loader_workers" in found.remedy


COPIES = {"kind": "transfers", "device": "cuda", "tensors": 80, "bytes": 5e8, "pinned": 0, "non_blocking": 0,
          "pageable": 80, "other_device": 0}  # fmt: skip


@pytest.mark.covers("TRB-23", "TRB-24")
@pytest.mark.parametrize(
    ("copies", "cpu_share", "transfers"),
    [
        ({}, 0.0, True),
        ({"pinned": 30, "non_blocking": 30, "pageable": 50}, 0.0, True),
        ({"pinned": 50, "non_blocking": 50, "pageable": 30}, 0.0, False),
        ({"device": "cpu", "pageable": 0, "other_device": 80}, 0.0, False),
        ({}, 0.3, False),
    ],
    ids=["no copy was pinned", "most were not", "most were", "no GPU", "rows are computed in the process"],
)
def test_a_wait_for_data_is_one_for_copies_where_most_of_them_block(
    copies: dict[str, Any], cpu_share: float, transfers: bool
) -> None:
    train = rows(FALLING, **{**STEP, "data_time_s": 0.4, "data_cpu_share": cpu_share})
    run = records(train=train, events=[{**COPIES, "tensors": 8}, {**COPIES, **copies}], plan=plan(storage="stream"))
    (found,) = [one for one in diagnose(run) if one.severity == "warning"]
    assert found.title.partition(":")[0] == ("Transfer-bound" if transfers else "Input-bound")
    if transfers:
        blocking = {**COPIES, **copies}["pageable"]
        assert "40% of a step of 1.0 s is spent waiting for data" in found.evidence
        assert f"the host waited for {blocking} of 80 copied tensors (500.0 MB in all)" in found.evidence
        assert "data.storage: resident if the split fits, or pinned" in found.remedy and "CPU" not in found.remedy


def test_copies_from_another_device_are_the_datasets() -> None:
    train = rows(FALLING, **{**STEP, "data_time_s": 0.4})
    copies = {**COPIES, "pageable": 0, "other_device": 80}
    run = records(train=train, events=[copies], plan=plan(storage="pinned"))
    assert remedy_of(run, "Transfer-bound") == "Return tensors on the CPU from the dataset."


def test_a_step_that_waits_for_other_workers_is_sync_bound_unless_one_of_them_is_slow() -> None:
    assert limits(wait_time_s=0.24) == {}
    (title, found), *others = limits(wait_time_s=0.4).items()
    assert (title, others) == ("Sync-bound: steps wait for other workers", []) and "40% of a step" in found.evidence
    assert "loop.global_batch_size" in found.remedy
    slow = {"work_time_s_max": 0.9, "work_time_s_median": 0.5, "wait_time_s": 0.4, "slowest_rank": 3}
    (title, found), *others = limits(**slow).items()
    assert (title, others) == ("Rank 3 holds the others up", [])
    assert "rank 3 works 0.9 s of each step, 1.80 times the median" in found.evidence.replace("0.90 s", "0.9 s")
    assert "slowest in 20 of 20 rows" in found.evidence and "scale.shares: auto" in found.remedy
    (found,) = limits(**slow, slowest_data_time_s=0.5).values()
    assert "0.5 s of it are spent on its data" in found.evidence and "data.loader_workers" in found.remedy


def test_the_slowest_worker_is_no_straggler_if_it_changes_or_is_hardly_slower() -> None:
    slow = {"work_time_s_max": 0.9, "work_time_s_median": 0.5}
    assert limits(**slow, slowest_rank=[n % 3 for n in range(40)]) == {}
    assert limits(work_time_s_max=0.62, work_time_s_median=0.5) == {}
    assert "Rank 1 holds the others up" in limits(work_time_s_max=0.63, work_time_s_median=0.5)
    few = records(train=rows(FALLING[:8], **{**STEP, **slow}))
    assert [one for one in diagnose(few) if one.severity == "warning"] == []


def test_where_rows_differ_their_medians_count_and_of_a_slow_worker_those_in_which_it_is_the_slowest() -> None:
    """A step that was interrupted once is no rule."""
    once = [0.02] * 20 + [0.9] + [0.02] * 19
    assert limits(data_time_s=once) == limits(wait_time_s=once) == {}
    assert limits(work_time_s_max=[0.92] * 39 + [9.0]) == {}
    later = [(3, 0.8, 0.01)] * 9 + [(3, 1.0, 0.01)] * 8 + [(5, 9.0, 8.0)] * 3
    ranks, works, data = (list(column) for column in zip(*[(3, 0.8, 0.01)] * 20, *later, strict=True))
    slow = {"slowest_rank": ranks, "work_time_s_max": works, "slowest_data_time_s": data, "work_time_s_median": 0.5}
    ((title, found),) = limits(**slow).items()
    assert title == "Rank 3 holds the others up" and "slowest in 17 of 20 rows" in found.evidence
    assert re.search(r"rank 3 works 0.80? s of each step, 2.00 times", found.evidence), found.evidence


@pytest.mark.covers("TRB-03")
def test_warnings_of_telemetry_are_findings() -> None:
    text = "the memory of worker (pid 7) on n grows by 5 MiB a minute: look for tensors that are kept"
    grows = {"kind": "warning", "what": "memory_growth", "reason": text}
    (found,) = [one for one in diagnose(records(events=[grows])) if one.title == "Memory grows without end"]
    assert found.evidence == text.partition(": ")[0] and found.remedy == "Look for tensors that are kept."


HOT = {"kind": "cuda", "device": "cuda:0", "utilisation": 20.0, "memory_run": 1 << 30}
COOL = {**HOT, "utilisation": 95.0}


@pytest.mark.parametrize(
    ("title", "bad", "good"),
    [
        ("Experts are loaded unevenly", {"load_imbalance": 4.0}, {"load_imbalance": 1.2}),
        ("Tokens are dropped", {"dropped_fraction": 0.3}, {"dropped_fraction": 0.0}),
        ("The GPUs are not fully used", {"devices": [HOT]}, {"devices": [COOL]}),
    ],
)
def test_findings_are_of_the_second_half_of_a_run(title: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
    """The first has warm-up, and experts that are not balanced yet."""

    def found(first: dict[str, Any], second: dict[str, Any]) -> bool:
        halves = [first] * 40 + [second] * 40
        falling = [3.0 - 0.02 * n for n in range(80)]
        train = [row | {"step_time_s": 0.1} | half for row, half in zip(rows(falling), halves, strict=True)]
        telemetry = [{"node": "a", "step": n, "devices": half.get("devices", [])} for n, half in enumerate(halves)]
        return title in titles(records(train=train, telemetry=telemetry))

    assert found(bad, bad) and found(good, bad) and not found(bad, good)


def test_uneven_experts_and_dropped_tokens():
    seen = titles(records(train=rows(FALLING, load_imbalance=3.0, dropped_fraction=0.1)))
    assert seen["Experts are loaded unevenly"] == seen["Tokens are dropped"] == "warning"


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("OutOfMemory: 2 GiB asked for", "loop.micro_batch_size"),
        ("RunError: save.dir: No space left on device", "save.keep"),
        ("the data holds NaNs in column age", "the data"),
        ("DevicePlacementError: `mask` is on cpu", "device of the batch"),
        (
            "the training is complete and its checkpoint of step 9 is kept, but its weights could not be exported: "
            "s3://b: cannot be written: No space left on device",
            "`raytrain export run` writes",
        ),
    ],
)
def test_a_known_failure_has_a_remedy(reason: str, remedy: str):
    found = diagnose(records(result={"status": "failed", "reason": reason}))[0]
    assert (found.severity, found.title, found.evidence) == ("error", "The run failed", reason)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    "reason",
    [
        "ClusterLost: the head of the cluster at 10.0.0.1:6379 does not answer",
        "3 attempts ended without progress, and ...; the last fault was ClusterLost: Ray's process raylet died",
        "Ray failed during the command (RaySystemError: no checkpoint of the GCS). Resume the run",
    ],
)
def test_a_run_that_lost_its_cluster_says_so_and_how_it_continues(reason: str):
    run = records(result={"status": "failed", "reason": reason, "steps": 40})
    found = diagnose(run)[0]
    assert (found.severity, found.title, found.evidence) == ("error", "Ray itself was lost", reason)
    assert "`raytrain train --resume run`" in found.remedy
    assert outcome(run).sentence == f"Failed after step 40, as Ray itself was lost: {reason}"


def test_a_run_without_a_result_is_resumed_from_where_its_objects_are(tmp_path: Path) -> None:
    """Its line has one full stop between its sentences."""
    run = RunFolder(str(tmp_path))
    lost = replace(records(result=None), path=run.path)
    (line,) = [line for line in finding_lines(diagnose(lost)) if "no result" in line]
    assert f"step is 0. `raytrain train --resume {run.path}` resumes from the latest" in line
    run.write_text(run.job, "model: {module: <object Net>}\n")
    (line,) = [line for line in finding_lines(diagnose(lost)) if "no result" in line]
    assert f'step is 0. `train(..., resume="{run.path}")` resumes' in line


def test_a_failure_without_a_reason_in_the_result_uses_the_reason_of_the_fault():
    fault = {"kind": "fault", "error": "ValueError", "message": "bad batch", "remedy": "mend data.source"}
    found = diagnose(records(result={"status": "failed"}, events=[fault]))[0]
    assert (found.evidence, found.remedy) == ("ValueError: bad batch", "mend data.source")


def test_a_failed_run_says_where_the_code_is_wrong_and_nothing_of_speed_in_the_terminal() -> None:
    fault = {"kind": "fault", "error": "KeyError", "message": "'x'", "place": "net.py:10 in forward"}
    result = {"status": "failed", "reason": "the same error occurred twice at step 3", "steps": 40, "wall_s": 100.0}
    costs = {"compute": 40.0, "restart": 40.0, "lost": 20.0}
    train = rows(FALLING, **{**STEP, "data_time_s": 0.4})
    failed = records(train=train, events=[fault], result={**result, "time": costs})
    found = {one.title: one for one in diagnose(failed)}
    assert found["The run failed"].remedy == (
        "Correct the code at net.py:10 in forward; then `raytrain train --resume run` continues."
    )
    assert "Input-bound: steps wait for data" in found and not [
        one for one in found if "Restarts" in one or "lost" in one
    ]
    (line,) = finding_lines(list(found.values()))
    assert line.startswith("finding: The run failed")
    done = records(train=train, events=[fault], result={**result, "status": "done", "time": costs})
    lines = finding_lines(diagnose(done))
    assert len(lines) == 2 and any("Restarts take much" in one for one in lines), "the lost work is of a short run"


def test_a_run_without_a_result_is_a_warning():
    assert titles(RunRecords(name="run", path="run"))["The run has no result"] == "warning"


def test_the_worst_comes_first():
    run = records(
        train=rows(FALLING, load_imbalance=3.0), warnings=["noted"], result={"status": "failed", "reason": "broken"}
    )
    assert [f.severity for f in diagnose(run)] == ["error", "warning", "info", "good"]


def plan(**choices: Any) -> list[PlanRow]:
    return [PlanRow(name, value, "because") for name, value in choices.items()]


def config(**keys: Any) -> list[ConfigRow]:
    return [ConfigRow(key.replace("__", "."), value, "file") for key, value in keys.items()]


def remedy_of(run: RunRecords, title: str) -> str:
    (found,) = [finding for finding in diagnose(run) if title in finding.title]
    return found.remedy


FAILED = {"status": "failed", "reason": "3 steps in a row were not finite"}
SKIPPED = rows(FALLING, skipped_steps=[min(n, 5) for n in range(40)])
SHORT = [{"kind": "out_of_memory", "step": 3, "who": ["rank 0"], "micro_batch_size": 4, "seconds": 1.0,
          "equal": "within rounding"}]  # fmt: skip
RISING = {"train": rows(FALLING), "evals": evals(2.0, 2.2, 2.4, 2.6)}
UNEVEN = rows(FALLING, load_imbalance=3.0)


@pytest.mark.parametrize(
    ("title", "fields", "key", "in_force", "otherwise", "advice"),
    [
        ("The run failed", {"result": FAILED}, "precision", "fp32", "bf16", "precision.dtype: fp32"),
        ("The run failed", {"result": FAILED}, "precision", "fp64", "tf32", "precision.dtype: fp32"),
        ("steps were skipped", {"train": SKIPPED}, "precision", "fp32", "bf16", "raise precision.dtype"),
        ("steps were skipped", {"train": SKIPPED}, "optim.max_grad_norm", 1.0, None, "set optim.max_grad_norm"),
        ("Overfitting", RISING, "loop.patience", 3, None, "set loop.patience"),
        ("Overfitting", RISING, "export", "best", "last", "se the best checkpoint"),
        ("Memory ran out", {"events": SHORT}, "loop.micro_batch_size", "auto", 8, "auto measure it"),
        ("loaded unevenly", {"train": UNEVEN}, "experts.balance", "both", "loss", "experts.balance: both"),
        ("Input-bound", {"train": rows(FALLING, step_time_s=1.0, data_time_s=0.5)}, "storage", "resident", "stream",
         "data.storage: resident"),
    ],
)  # fmt: skip
def test_nothing_is_advised_that_is_in_force_already(
    title: str, fields: dict[str, Any], key: str, in_force: Any, otherwise: Any, advice: str
) -> None:
    def remedy(value: Any) -> str:
        made = {"config": [ConfigRow(key, value, "file")]} if "." in key else {"plan": plan(**{key: value})}
        return remedy_of(records(**fields, **made), title)

    assert advice in remedy(otherwise) and advice not in remedy(in_force) and remedy(in_force).endswith(".")


def test_a_ray_that_did_not_start_is_no_matter_of_the_micro_batch() -> None:
    reason = "Ray did not start on this machine in two attempts (1: a 2: b): it may be overloaded, or out of memory"
    (found,) = diagnose(records(result={"status": "failed", "reason": reason}, plan=plan(micro_batch_size=8)))
    assert found.title == "Ray did not start" and found.evidence == reason
    assert found.remedy == "`raytrain train --resume run` starts it again."


def test_out_of_memory_with_single_rows_is_not_mended_by_a_smaller_micro_batch() -> None:
    failed = {"status": "failed", "reason": "out of memory in step 3"}
    some = remedy_of(records(result=failed, plan=plan(micro_batch_size=8)), "The run failed")
    none = remedy_of(
        records(
            result=failed,
            plan=plan(micro_batch_size=1, precision="bf16"),
            config=config(loop__activation_checkpointing=2),
        ),
        "The run failed",
    )
    assert "Lower loop.micro_batch_size" in some
    fault = {"kind": "fault", "attempt": 1, "error": "OutOfMemory", "out_of_memory": True, "micro_batch": 1}
    reduced = records(result=failed, plan=plan(micro_batch_size=8), events=[fault])
    assert "micro_batch_size" not in remedy_of(reduced, "The run failed"), "it was halved down to 1 before"
    not_memory = records(result=failed, plan=plan(micro_batch_size=8), events=[{**fault, "out_of_memory": False}])
    assert remedy_of(not_memory, "The run failed") == some
    assert none == "Set data.storage: stream, set optim.name: sgd or use a smaller model or shorter samples."
