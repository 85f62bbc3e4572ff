"""A run that memory ended: what it lists at its end, with the bytes that the plan predicts for each change."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.devices.gpus import Device
from cluster.devices.inventory import inventory_from_json, local_inventory
from jobs.driver.planning import plan_job
from jobs.driver.result import close_run
from jobs.job.spec import load_spec
from raytrain.execution.driver_channel import AttemptResult
from raytrain.plan.plan import Plan
from raytrain.runs.faults import Fault, write_fault
from raytrain.runs.folder import RunFolder, this_process
from raytrain.runs.records import event

MODEL = {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 4, "width": 256, "context": 128}
JOB: dict[str, Any] = {
    "name": "short", "model": {**MODEL, "vocab_size": 256}, "data": {"source": "stdlib", "max_bytes": 200000},
    "precision": {"dtype": "fp32"}, "loop": {"max_steps": 4, "global_batch_size": 32, "micro_batch_size": 16},
    "experts": {"num_experts": 8, "hosts": 0, "hidden": 1024}, "scale": {"workers": 2, "threads": 1},
}  # fmt: skip
REASON = "out of memory in step 3 with loop.micro_batch_size 1: rank 0: OutOfMemoryError: no room"


def planned(*changes: str) -> Plan:
    return plan_job(load_spec(mapping=JOB, overrides=changes), inventory=local_inventory())


def ended(
    folder: str, plan: Plan, *, micro: int = 16, reason: str = REASON, rows: list[dict[str, Any]] | None = None
) -> tuple[RunFolder, str]:
    """The run folder after its end, and what the terminal shows."""
    run = RunFolder.create(folder, "short", job=JOB)
    attempt = run.next_attempt(this_process())
    run.append_event(event("driver_start", process_start=0.0, last_sign_of_life=None))
    run.write_json(run.plan, plan.to_json())
    run.append_event(event("attempt", attempt=attempt, from_step=0, workers=2, precision="fp32", device="cpu"))
    for row in rows or []:
        run.writer(run.metrics).write(row)
    fault = Fault(
        attempt=attempt, rank=0, step=3, error="RunError", message=reason, traceback="", precision="fp32",
        reduced=False, final=True, from_step=0, time=1.0, out_of_memory=True, micro_batch=micro,
    )  # fmt: skip
    write_fault(run, fault)
    out = io.StringIO()
    close_run(run, AttemptResult("failed", reason), console=Console(file=out, width=300))
    return run, out.getvalue()


def options(text: str) -> dict[str, str]:
    """Setting -> the rest of its line, in the order of the terminal."""
    found = re.findall(r"^  (\d+)\. (\S+): (.*)$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in found] == list(range(1, len(found) + 1))
    return {setting: rest for _, setting, rest in found}


def recorded(run: RunFolder) -> dict[str, int]:
    (row,) = [row for row in run.read_rows(run.events) if row["kind"] == "memory_remedies"]
    return {one["setting"]: one["saved_bytes"] for one in row["remedies"]}


def memory(plan: Plan) -> int:
    return plan.value("memory", 0)


@pytest.mark.covers("TRB-02", "TRB-04", "TRB-05")
def test_the_bytes_of_each_change_are_those_of_the_plan_with_it(tmp_path: Any) -> None:
    plan = planned()
    run, text = ended(str(tmp_path), plan)
    saved, shown = recorded(run), options(text)
    for setting in ("loop.micro_batch_size=8", "loop.activation_checkpointing=true", "precision.dtype=bf16"):
        assert saved[setting] == memory(plan) - memory(planned(setting)) > 0
    for setting, size in saved.items():
        assert shown[setting].startswith(f"{size / 2**20:.3g} MiB less ({size / memory(plan):.0%}), ")
    assert "The run failed: memory ran out" in text and f"{memory(plan) / 2**20:.3g} MiB for a worker" in text
    assert "2 micro-batches are accumulated, so that an update still has 32 rows" in shown["loop.micro_batch_size=8"]
    assert "with train --resume" in shown["loop.micro_batch_size=8"]
    assert "in a new run" in shown["loop.activation_checkpointing=true"]
    exact = [name for name in saved if name.split("=")[0] in (
        "loop.micro_batch_size", "loop.activation_checkpointing", "scale.strategy", "experts.hosts")]  # fmt: skip
    assert list(saved)[: len(exact)] == exact, "what computes the same update comes first"
    page = (tmp_path / run.path / "report" / "report.html").read_text()
    assert "<li>loop.activation_checkpointing=true: " in page


def test_what_is_in_force_or_impossible_is_not_listed(tmp_path: Any) -> None:
    plan = planned(
        "optim.name=sgd", "loop.activation_checkpointing=true", "loop.micro_batch_size=1", "scale.workers=1",
        "experts.top_k=5",
    )  # fmt: skip
    _, text = ended(str(tmp_path), plan, micro=1)
    keys = {setting.split("=")[0] for setting in options(text)}
    absent = {"loop.micro_batch_size", "loop.activation_checkpointing", "optim.name", "scale.strategy"}
    assert not keys & absent and "experts.num_experts" not in keys, "eight experts cannot become four with top_k 5"
    assert "experts.hidden" in keys and "experts.hosts=colocated" not in options(text)


@pytest.mark.covers("TRB-07", "TRB-08", "TRB-09")
def test_fewer_smaller_and_spread_experts_are_listed_with_the_bytes_of_one(tmp_path: Any) -> None:
    plan = planned()
    run, text = ended(str(tmp_path), plan)
    saved, shown = recorded(run), options(text)
    one = 2 * 256 * 1024 * 4 * 4 / 2**20  # two matrices; weights, gradients and two moments in fp32
    assert saved["experts.num_experts=4"] == memory(plan) - memory(planned("experts.num_experts=4")) > 8 * one * 2**20
    assert saved["experts.hidden=512"] == memory(plan) - memory(planned("experts.hidden=512")) > 8 * one * 2**20
    assert f"8 in every worker, each {one:.0f} MiB" in shown["experts.num_experts=4"]
    assert f"16 in every worker, each {one / 2:.0f} MiB" in shown["experts.hidden=512"]
    assert saved["experts.hosts=2"] == memory(plan) - memory(planned("experts.hosts=2")) > 15 * one * 2**20
    assert f"host 0: 8, {8 * one:.0f} MiB; host 1: 8, {8 * one:.0f} MiB" in shown["experts.hosts=2"]
    assert "in a new run" in shown["experts.hosts=2"], "checkpoints hold the experts inside the model"
    assert saved["experts.hosts=colocated"] == memory(plan) - memory(planned("experts.hosts=colocated"))


@pytest.mark.covers("TRB-12", "TRB-13")
def test_a_shorter_context_is_listed_and_the_masks_that_are_kept_come_first(tmp_path: Any) -> None:
    row = {"kind": "train", "step": 2, "epoch": 0, "loss": 1.0, "mask_cache": {"entries": 3, "bytes": 49152}}
    plan = planned()
    run, text = ended(str(tmp_path), plan, rows=[row])
    changed = planned("model.context=64")
    assert recorded(run)["model.context=64"] == memory(plan) - memory(changed) > 0
    first = text.index("attention masks that are kept take 48 KiB (loop.mask_cache_mb)")
    assert first < text.index("  1. ")


@pytest.mark.covers("TRB-06")
@pytest.mark.parametrize(("free", "advised"), [("9.50 GiB", True), ("900.00 MiB", False), ("0 bytes", None)])
def test_pieces_that_the_allocator_cannot_use_are_listed_if_they_are_many(
    tmp_path: Path, free: str, advised: bool | None
) -> None:
    torch_says = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.2 GiB is "
        f"free. Of the allocated memory 28.50 GiB is allocated by PyTorch, and {free} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
    )
    _, text = ended(str(tmp_path), planned(), reason=torch_says if advised is not None else REASON)
    first = (
        "  1. PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: up to 9.5 GiB less, in a new process; 25%"
    )
    assert (first in text) == (advised is True)
    explained = "clearing the allocator's cache more often would not help, 3% of what it holds is unused"
    assert (explained in text) == (advised is False)


def test_memory_of_an_expert_host_asks_for_more_hosts(tmp_path: Any) -> None:
    plan = planned("experts.hosts=2")
    run, text = ended(str(tmp_path), plan, reason="out of memory in step 3: expert host 1: OutOfMemoryError: no room")
    wider = planned("experts.hosts=4")
    saved = plan.value("host_memory", 0) - wider.value("host_memory", 0)
    assert recorded(run)["experts.hosts=4"] == saved > 0 and "for an expert host" in text
    assert "with train --resume" in options(text)["experts.hosts=4"]
    assert "scale.strategy=fsdp" not in options(text)


def test_a_run_that_something_else_ended_lists_nothing(tmp_path: Any) -> None:
    run, _ = ended(str(tmp_path), planned())
    run.append_event(event("driver_start", process_start=0.0, last_sign_of_life=None))  # it is resumed, and fails
    for name in run.store.entries("faults"):
        run.store.delete(f"faults/{name.name}")
    out = io.StringIO()
    close_run(run, AttemptResult("failed", "rank 0 failed: KeyError"), console=Console(file=out, width=300))
    assert "The run failed: rank 0 failed: KeyError" in out.getvalue() and not options(out.getvalue())


def test_an_inventory_survives_json() -> None:
    here = local_inventory()
    gpu = Device("cuda", "NVIDIA H200", 141 << 30, (9, 0), "GPU-1", 0, free_bytes=1 << 30)
    node = replace(here.nodes[0], devices=(gpu,), accelerator="H200", more_accelerators=("H200-141G",), gpu_slots=1)
    for inventory in (here, replace(here, nodes=(node, node), notes=("one",), unusable=("GPU 3: lost",))):
        assert inventory_from_json(json.loads(json.dumps(inventory.to_json()))) == inventory
