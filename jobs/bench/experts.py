"""Bench `experts`: a mixture-of-experts layer, forward and backward, with remote experts and in one process.

Each layout has separate processes; blocks alternate. Workers and hosts have one thread each, the single process has
`threads`. On a busy machine two threads of one process wait for each other more than two processes do. Therefore only
rounds in which the single process is close to its best time are compared.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, Text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Ratio, Say, alternate
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer
from raytrain.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

#: Two hosts of one thread each over the single process with two threads, and the bound of each round.
HOSTS_GOAL, HOSTS_BOUND = Goal(at_most=1.25), 1.4
#: Two workers of one thread each that share the experts and the tokens, over one process of one thread.
COLOCATED_GOAL = Goal(at_most=0.65)
#: A round counts if the time of the single process is within this factor of its best.
CALM = 1.15
#: Largest difference over the largest value: sums in a different order, the precision of bf16.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}

RunSteps = Callable[[int], dict[str, Any]]
"""Run a number of passes; returns the answer of `ExpertsArm.run_passes`."""


class ExpertsOptions(BenchOptions):
    """A layer with experts on hosts or partitioned across workers, against one process."""

    QUICK: ClassVar[dict[str, Any]] = {
        "tokens": 64, "width": 16, "experts": 4, "layouts": ["1+2", "2+0"], "blocks": 3, "block_s": 0.0
    }  # fmt: skip

    threads: Count | Literal["auto"] = Field(2, description="threads of the single process; workers and hosts have one")
    tokens: Count = Field(2048, description="tokens of a pass, over all workers")
    width: Count = Field(512, description="of a token; the experts' hidden width is four times that")
    experts: Count = Field(8, description="of the layer")
    top_k: Count = Field(2, description="experts of a token")
    layouts: list[Text] = Field(
        ["1+2", "2+0", "1+0", "1+1", "2+1", "2+2"], description="WORKERS+HOSTS; 0 hosts: partitioned over the workers"
    )
    block_s: float = Field(0.5, ge=0, description="seconds that one block should take")


@dataclass(frozen=True)
class ExpertsLayout:
    """Where the experts are: on `hosts` hosts of `workers` workers, or with 0 hosts in the workers. 0 workers means one
    process without any exchange."""

    workers: int
    hosts: int = 0

    def __str__(self) -> str:
        if not self.workers:
            return "in process"
        return f"{self.workers} + {self.hosts}" if self.hosts else f"{self.workers} colocated"


ALONE, REMOTE, COLOCATED = ExpertsLayout(0), ExpertsLayout(1, 2), ExpertsLayout(2)


class ExpertsArm(ArmProcesses):
    """The processes of one layout; each has one thread, except a single process."""

    def __init__(self, server: ArmServer, layout: ExpertsLayout, options: ExpertsOptions) -> None:
        self.layout, name = layout, str(layout).replace(" ", "")
        self._files = server.folder / name
        settings = {
            **options.model_dump(include={"tokens", "width", "top_k", "seed"}), "num_experts": options.experts,
            "arm": name, "workers": layout.workers, "hosts": layout.hosts, "store": f"{self._files}.store",
        }  # fmt: skip
        super().__init__(
            server, name, "jobs.bench.experts_arms:run_layer", settings,
            processes=max(1, layout.workers + layout.hosts), connecting=max(1, layout.workers),
        )  # fmt: skip

    def run_passes(self, *, steps: int, **more: Any) -> dict[str, Any]:
        """Run a block; returns the answer of the slowest worker, with the CPU seconds of all processes.

        Raises:
            RunError: a process died.
        """
        before = self.cpu_seconds()
        answer = self.ask_slowest(steps=steps, **more)
        return {**answer, "cpu_s": self.cpu_seconds() - before}

    def results(self, dtype: str) -> list[dict[str, Tensor]]:
        """The output and gradients of one pass in each worker."""
        from safetensors.torch import load_file

        stem = f"{self._files}-results"
        self.run_passes(steps=1, dtype=dtype, results=stem)
        paths = [f"{stem}-{rank}.safetensors" for rank in range(max(1, self.layout.workers))]
        results = [load_file(path) for path in paths]
        for path in paths:
            os.unlink(path)
        return results


def run(options: ExpertsOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the exchange by layout.

    Raises:
        InputError: an invalid layout, more holders than experts, or tokens that are not divisible by the workers.
        RunError: a process died.
    """
    layouts = _layouts(options)
    found = BenchMeasurement("experts", quick, options.model_dump(), "seconds of one forward and backward pass")
    found.values |= {"exchange": {}}
    with ArmServer() as server:
        say("starting the processes")
        alone, *arms = [ExpertsArm(server, layout, options) for layout in (ALONE, *layouts)]
        for arm in (alone, *arms):
            arm.await_ready()
        for dtype in TOLERANCE:
            say(f"{dtype}: {', '.join(str(arm.layout) for arm in arms)}")
            if not _measure(options, found, alone, arms, dtype=dtype):
                break
    return found


def _layouts(options: ExpertsOptions) -> list[ExpertsLayout]:
    layouts = []
    for text in options.layouts:
        workers, plus, hosts = text.partition("+")
        if not (plus and workers.isdigit() and hosts.isdigit() and int(workers)):
            raise InputError("layouts", got=text, expected="WORKERS+HOSTS such as 1+2; 2+0 is two workers, colocated")
        layouts.append(ExpertsLayout(int(workers), int(hosts)))
        if (int(hosts) or int(workers)) > options.experts:
            raise InputError("layouts", got=text, expected=f"at most {options.experts} to hold as many experts")
        if options.tokens % int(workers):
            raise InputError("tokens", got=f"{options.tokens} for {workers} workers", expected="a multiple of workers")
    return layouts


def _measure(
    options: ExpertsOptions, found: BenchMeasurement, alone: ExpertsArm, arms: list[ExpertsArm], *, dtype: str
) -> bool:
    """Check the gate, then run blocks in turn; False if the gate failed."""
    threads, blocks = options.thread_count, options.blocks
    (reference,) = alone.results(dtype)
    for arm in arms:
        name = f"{dtype}: outputs and gradients of {arm.layout} equal those in one process"
        if not found.gate(equal_tensors(name, join(arm.results(dtype)), reference, tolerance=TOLERANCE[dtype])):
            return False
    answers: dict[str, list[dict[str, Any]]] = {}

    def block_of(name: str, run: RunSteps) -> Callable[[], float]:
        steps = max(1, min(500, round(options.block_s / run(1)["seconds"])))
        kept = answers.setdefault(name, [])

        def block() -> float:
            answer = run(steps)
            kept.append({key: answer[key] / steps for key in ("seconds", "cpu_s")})
            return kept[-1]["seconds"]

        return block

    def run_arm(arm: ExpertsArm, **more: Any) -> RunSteps:
        return lambda steps: arm.run_passes(steps=steps, dtype=dtype, **more)

    runs = {_alone(number): run_arm(alone, threads=number) for number in (threads, 1)}
    runs |= {str(arm.layout): run_arm(arm) for arm in arms}
    times = alternate({name: block_of(name, run) for name, run in runs.items()}, blocks=blocks)
    found.arms |= {f"{dtype}, {name}": values for name, values in times.items()}
    single = times[_alone(threads)]
    calm = [n for n, seconds in enumerate(single) if seconds <= CALM * min(single)]
    times = {name: [values[n] for n in calm] for name, values in times.items()}
    cpu = {name: statistics.median(kept[-blocks:][n]["cpu_s"] for n in calm) for name, kept in answers.items()}
    found.values["exchange"][dtype] = {
        "calm_rounds": calm,
        "layouts": {name: {"ms": 1e3 * statistics.median(times[name]), "cpu_s": cpu[name]} for name in times},
    }
    _judge(options, found, times, arms, dtype=dtype)
    return True


def _judge(
    options: ExpertsOptions, found: BenchMeasurement, times: dict[str, list[float]], arms: list[ExpertsArm], *,
    dtype: str,
) -> None:  # fmt: skip
    """The ratio of every layout to the single process, over the calm rounds, and the claims about two of them."""
    goals = {(REMOTE, 2): HOSTS_GOAL, (COLOCATED, 1): COLOCATED_GOAL}
    for arm in arms:
        for threads in (options.thread_count, 1):
            goal = goals.get((arm.layout, threads))
            name = f"{dtype}: {arm.layout} / {_alone(threads)}"
            ratio = found.compare(times, of=str(arm.layout), to=_alone(threads), name=name, goal=goal)
            if goal is COLOCATED_GOAL:
                effect = f"{dtype}: two colocated workers take at most 0.65 of the time of one"
                found.claim(effect, bool(ratio.met), _seen(ratio))
            elif goal is HOSTS_GOAL:
                effect = f"{dtype}: two hosts of one thread each cost at most 1.25 of one process with two"
                found.claim(effect, bool(ratio.met), _seen(ratio))
                worst = max(ratio.values)
                found.claim(f"{dtype}: never more than {HOSTS_BOUND:g} of it", worst <= HOSTS_BOUND, f"{worst:.3f}")


def _alone(threads: int) -> str:
    return f"in process, {threads} thread(s)"


def _seen(ratio: Ratio) -> str:
    return f"{ratio}, {len(ratio.values)} calm rounds"


def join(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all workers as of one process: tokens concatenated, gradients of the router summed, gradients of
    the experts from rank 0."""
    import torch

    joined = dict(results[0])
    for name in ("output", "gradient of the input"):
        joined[name] = torch.cat([part[name] for part in results])
    joined["gradient of router.weight"] = torch.stack([part["gradient of router.weight"] for part in results]).sum(0)
    return joined


def equal_tensors(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float) -> Check:
    """Whether tensors of the same names agree: the largest difference over the largest value of each."""
    if ours.keys() != theirs.keys() or not ours:
        return Check(name, False, f"{', '.join(ours)} against {', '.join(theirs)}")
    differences = {
        key: float((ours[key].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-30))
        for key, value in theirs.items()
    }
    worst = max(differences, key=lambda key: differences[key])
    detail = f"{len(differences)} tensors, largest difference {differences[worst]:.2g} of {worst}, wanted {tolerance:g}"
    return Check(name, all(value <= tolerance for value in differences.values()), detail)
