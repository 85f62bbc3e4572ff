"""Two micro-batches in flight against one, for bench `experts`: real training steps, each arm a worker with hosts."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.bench.harness.experts_gang import Gang, GangLayout
from jobs.bench.harness.lines import Arms
from jobs.bench.harness.measuring import BenchMeasurement, Say, alternate, compare, equal_series
from jobs.bench.harness.options import ExpertsOptions
from jobs.bench.harness.sessions import Losses, session_of

LAYOUT = GangLayout(1, 2)


class HostsTrainer:
    """The worker: a real session of `job`, its experts wherever `connection` has them.

    Args:
        inflight: micro-batches in flight.
    """

    def __init__(self, job: dict[str, Any], connection: Any, *, inflight: int) -> None:
        self.session, _ = session_of(job, connection=connection)
        self.session.prepare("fp32")
        self.session.step.inflight = inflight
        self._rows = Losses()
        self._loop = self.session.loop(reporter=self._rows, should_stop=_never)

    def block(self, steps: int) -> dict[str, Any]:
        """So many more steps."""
        self._rows.losses.clear()
        self._loop.limits = replace(self._loop.limits, max_steps=self.session.state.step + steps)
        cpu, began = time.process_time(), time.perf_counter()
        self._loop.run(self.session.state)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cpu_s": time.process_time() - cpu, "losses": list(self._rows.losses)}

    def end(self) -> None:
        """The hosts may go."""
        self.session.full_module()


def _never() -> bool:
    return False


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


def measure_inflight(found: BenchMeasurement, options: ExpertsOptions, arms: Arms, folder: Path, say: Say) -> None:
    """Start both arms, gate, then blocks in turn.

    Raises:
        RunError: a process died.
    """
    text = folder / "text.txt"
    text.write_bytes(bytes(97 + (31 * i * i + 7 * i + i // 97) % 26 for i in range(64 * 1024)))
    settings = {
        "job": job_of(options, text), "num_experts": options.experts, "top_k": options.top_k, "seed": options.seed,
        "widths": [options.train_width] * options.train_layers,
    }  # fmt: skip
    say(f"training, {options.micro_batches} micro-batches a step: one and two in flight")
    names = {"one in flight": 1, "two in flight": 2}
    gangs: dict[str, Gang] = {}
    losses: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    done = False
    try:
        for name, number in names.items():
            gangs[name] = Gang(arms, LAYOUT, {**settings, "inflight": number}, folder, name=f"inflight-{number}")
        for gang in gangs.values():
            gang.await_ready()

        def block(name: str, steps: int) -> float:
            answer = gangs[name].obey({"steps": steps})
            losses[name] += answer["losses"]
            cpu[name].append(answer["cpu_s"] / steps)
            return answer["seconds"] / steps

        first = {name: block(name, 2) for name in names}
        steps = max(1, min(200, round(options.block_s / first["one in flight"])))
        turns = {name: (lambda name=name: block(name, steps)) for name in names}
        times = alternate(turns, blocks=options.blocks, dropped=1)
        done = True
    finally:
        for gang in gangs.values():
            gang.close(at_once=not done)
    one, two = names
    if not found.gate(equal_series("the losses with two in flight are those with one", losses[two], losses[one])):
        return
    for name, values in times.items():
        found.arms[f"a training step, {name}"] = values
    found.ratios.append(compare(times, of=one, to=two, name="a training step: one in flight / two in flight"))
    found.values["inflight"] = {
        name: {"ms": 1e3 * statistics.median(times[name]), "cpu_s": statistics.median(cpu[name])} for name in names
    }
