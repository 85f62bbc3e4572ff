"""Two micro-batches in flight against one, for bench `experts`: real training steps, each arm a worker with hosts."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.bench.experts.experts import ExpertsLayout
from jobs.bench.experts.experts_processes import ExpertsArm
from jobs.bench.harness.measuring import BenchMeasurement, Say, alternate, compare, equal_series
from jobs.bench.harness.processes import ArmServer

if TYPE_CHECKING:
    from jobs.bench.experts.experts import ExpertsOptions

LAYOUT = ExpertsLayout(1, 2)


def job_of(options: ExpertsOptions, text: Path) -> dict[str, Any]:
    """A small GPT whose step has several micro-batches."""
    return {
        "name": "bench-experts",
        "seed": options.seed,
        "model": {
            "builder": "experts.models:moe_gpt", "layers": options.train_layers, "heads": 2,
            "width": options.train_width, "context": options.train_context,
        },
        "experts": {"num_experts": options.experts, "top_k": options.top_k, "hosts": 0},
        "data": {"source": "text", "path": str(text), "eval_fraction": 0.0},
        "precision": {"dtype": "fp32"},
        "loop": {
            "max_steps": 1_000_000, "global_batch_size": options.train_rows * options.micro_batches,
            "micro_batch_size": options.train_rows, "log_every": 1,
        },
        "scale": {"workers": 1, "mode": "cpu", "threads": 1},
    }  # fmt: skip


def measure_inflight(found: BenchMeasurement, options: ExpertsOptions, server: ArmServer, say: Say) -> None:
    """Start both arms, gate, then alternating blocks.

    Raises:
        RunError: a process died.
    """
    text = server.folder / "text.txt"
    text.write_bytes(bytes(97 + (31 * i * i + 7 * i + i // 97) % 26 for i in range(64 * 1024)))
    settings = {
        "job": job_of(options, text), "num_experts": options.experts, "top_k": options.top_k, "seed": options.seed,
        "widths": [options.train_width] * options.train_layers,
    }  # fmt: skip
    say(f"training, {options.micro_batches} micro-batches a step: one and two in flight")
    one, two = "one in flight", "two in flight"
    arms: dict[str, ExpertsArm] = {}
    losses: dict[str, list[float]] = {one: [], two: []}
    cpu: dict[str, list[float]] = {one: [], two: []}
    done = False
    try:
        for number, name in enumerate((one, two), start=1):
            arms[name] = ExpertsArm(server, LAYOUT, {**settings, "inflight": number}, name=f"inflight-{number}")
        for arm in arms.values():
            arm.await_ready()

        def block(name: str, steps: int) -> float:
            answer = arms[name].run_block(steps=steps)
            losses[name] += answer["losses"]
            cpu[name].append(answer["cpu_s"] / steps)
            return answer["seconds"] / steps

        first = {name: block(name, 2) for name in arms}
        steps = max(1, min(200, round(options.block_s / first[one])))
        times = alternate({name: partial(block, name, steps) for name in arms}, blocks=options.blocks, dropped=1)
        done = True
    finally:
        for arm in arms.values():
            arm.close(kill=not done)
    if not found.gate(equal_series("the losses with two in flight are those with one", losses[two], losses[one])):
        return
    for name, values in times.items():
        found.arms[f"a training step, {name}"] = values
    found.ratios.append(compare(times, of=one, to=two, name="a training step: one in flight / two in flight"))
    found.values["inflight"] = {
        name: {"ms": 1e3 * statistics.median(times[name]), "cpu_s": statistics.median(cpu[name])} for name in times
    }
