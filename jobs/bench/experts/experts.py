"""Bench `experts`: a mixture-of-experts layer forward and backward, its experts elsewhere and in one process.

Every layout lives in processes of its own; they take turns, block by block. Workers and hosts have one thread each, the
lone process has `threads`. On a machine where others work too, two threads of one process wait for each other more
than processes do: only rounds in which the lone process is near its own best are compared.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.devices.inventory import local_inventory
from jobs.bench.experts.experts_layers import Case, can_group, product_device
from jobs.bench.experts.experts_train import measure_inflight
from jobs.bench.harness.experts_gang import Gang, GangLayout
from jobs.bench.harness.lines import ADDRESS, Arms
from jobs.bench.harness.measuring import BenchMeasurement, Check, Claim, Goal, Ratio, Say, alternate, compare
from jobs.bench.harness.options import ExpertsOptions
from jobs.bench.training.loop_arms import borrowed_environment
from raytrain.errors import InputError

#: Two hosts of one thread each over the lone process with two, and what no round may exceed.
HOSTS_GOAL, HOSTS_BOUND = Goal(at_most=1.25), 1.4
#: Two workers of one thread each that share the experts and the tokens, over one process of one thread.
COLOCATED_GOAL = Goal(at_most=0.65)
REMOTE, COLOCATED = GangLayout(1, 2), GangLayout(2)
#: A round counts where the lone process is within this factor of its best.
CALM = 1.15
#: Largest difference over the largest value: sums in another order, bf16 with its 8 bits.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = ("fp32", "bf16")


def run(options: ExpertsOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the exchange, by layout and by size, then the ways to compute experts in one process.

    Raises:
        InputError: a layout that is none, or has more members than experts, or tokens that workers cannot share.
        RunError: a process died.
    """
    layouts = _layouts(options)
    found = BenchMeasurement("experts", quick, options.model_dump(), "seconds of one forward and backward pass")
    found.values |= {"exchange": {}, "in_process": {}}
    widths = sorted({options.width, *options.widths})
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder, borrowed_environment(), Arms() as arms:
        os.environ[ADDRESS] = arms.address
        say(f"starting {1 + sum(layout.size for layout in layouts)} processes")
        sizes = {"num_experts": options.experts, "top_k": options.top_k, "seed": options.seed}
        gangs: list[Gang] = []
        done = False
        try:
            for layout in (GangLayout(0), *layouts):
                own = widths if layout in (GangLayout(0), REMOTE) else [options.width]
                gangs.append(Gang(arms, layout, {**sizes, "widths": own}, Path(folder)))
            for gang in gangs:
                gang.await_ready()
            _Rounds(found, options, gangs[0], gangs[1:], say).measure()
            if found.passed:
                measure_inflight(found, options, arms, Path(folder), say)
            done = True
        finally:
            for gang in gangs:
                gang.close(at_once=not done)
    return found


def _layouts(options: ExpertsOptions) -> list[GangLayout]:
    layouts = []
    for text in options.layouts:
        workers, plus, hosts = text.partition("+")
        if not (plus and workers.isdigit() and hosts.isdigit() and int(workers)):
            raise InputError("layouts", seen=text, expected="WORKERS+HOSTS such as 1+2; 2+0 is two workers, colocated")
        layouts.append(GangLayout(int(workers), int(hosts)))
        if (int(hosts) or int(workers)) > options.experts:
            raise InputError("layouts", seen=text, expected=f"at most {options.experts} to hold as many experts")
        for tokens in (options.tokens, *options.token_counts):
            if tokens % int(workers):
                raise InputError("tokens", seen=f"{tokens} for {workers} workers", expected="a multiple of workers")
    return layouts


class _Rounds:
    """The measurements, with the processes they take."""

    def __init__(
        self, found: BenchMeasurement, options: ExpertsOptions, alone: Gang, gangs: list[Gang], say: Say
    ) -> None:
        self.found, self.options, self.alone, self.gangs, self.say = found, options, alone, gangs, say
        threads = options.threads
        self.threads = threads if isinstance(threads, int) else local_inventory().cpus

    def measure(self) -> None:
        """All of them; ends early where the gate fails."""
        options = self.options
        for dtype in DTYPES:
            case = Case(options.tokens, options.width, dtype)
            if not self._exchange(case, self.gangs, blocks=options.blocks) or not self._in_process(case):
                return
            self._goals(case)
        remote = [gang for gang in self.gangs if gang.layout == REMOTE]
        sizes = [(tokens, width) for tokens in options.token_counts for width in options.widths]
        for tokens, width in sizes if remote else []:
            for dtype in DTYPES:
                case = Case(tokens, width, dtype)
                if str(case) not in self.found.values["exchange"] and not self._exchange(
                    case, remote, blocks=options.table_blocks
                ):
                    return

    # -- the exchange -----------------------------------------------------------------------------

    def _exchange(self, case: Case, gangs: list[Gang], *, blocks: int) -> bool:
        """Gate, then blocks in turn; False where the gate failed."""
        self.say(f"{case}: {', '.join(str(gang.layout) for gang in gangs)}")
        (reference,) = self.alone.results(case, kind="sorted", threads=1)
        for gang in gangs:
            whole = join(gang.results(case))
            name = f"{case}: outputs and gradients of {gang.layout} equal those in one process"
            if not self.found.gate(equal_tensors(name, whole, reference, tolerance=TOLERANCE[case.dtype])):
                return False
        answers: dict[str, list[dict[str, Any]]] = {}

        def turn(name: str, order: Callable[[int], dict[str, Any]]) -> Callable[[], float]:
            steps = self._steps(order)
            kept = answers.setdefault(name, [])

            def block() -> float:
                answer = order(steps)
                kept.append({key: answer[key] / steps for key in TIMES if key in answer})
                return kept[-1]["seconds"]

            return block

        names = {self._alone(threads): self._lone_order(case, "sorted", threads) for threads in (self.threads, 1)}
        names |= {str(gang.layout): _gang_order(gang, case) for gang in gangs}
        times = alternate({name: turn(name, order) for name, order in names.items()}, blocks=blocks, dropped=1)
        for name, values in times.items():
            self.found.arms[f"{case}, {name}"] = values
        shown = {name: kept[-blocks:] for name, kept in answers.items()}
        self._note(case, shown, gangs)
        return True

    def _note(self, case: Case, shown: dict[str, list[dict[str, float]]], gangs: list[Gang]) -> None:
        """Ratios over the calm rounds, CPU seconds, and the share of the exchange itself."""
        best = min(answer["seconds"] for answer in shown[self._alone(self.threads)])
        calm = [n for n, row in enumerate(shown[self._alone(self.threads)]) if row["seconds"] <= CALM * best]
        times = {name: [rows[n]["seconds"] for n in calm] for name, rows in shown.items()}
        counts = self.found.values["exchange"][str(case)] = {"calm_rounds": calm, "layouts": {}}
        for name, rows in shown.items():
            counts["layouts"][name] = {
                "ms": 1e3 * statistics.median(times[name]),
                "cpu_s": statistics.median(rows[n]["cpu_s"] for n in calm),
            }
        for gang in gangs:
            name, rows = str(gang.layout), [shown[str(gang.layout)][n] for n in calm]
            hidden = [row["computing_s"] if gang.layout.hosts else 0.0 for row in rows]  # the hosts', while one waits
            shares = [(row["transport_s"] - own) / row["seconds"] for row, own in zip(rows, hidden, strict=True)]
            counts["layouts"][name]["share_of_transport"] = statistics.median(shares)
            for threads in (self.threads, 1):
                goal = None
                if case.tokens == self.options.tokens and case.width == self.options.width:
                    goal = HOSTS_GOAL if (gang.layout, threads) == (REMOTE, 2) else goal
                    goal = COLOCATED_GOAL if (gang.layout, threads) == (COLOCATED, 1) else goal
                label = f"{case}: {name} / {self._alone(threads)}"
                self.found.ratios.append(compare(times, of=name, to=self._alone(threads), name=label, goal=goal))

    def _goals(self, case: Case) -> None:
        """What is promised of one size."""
        for ratio in self.found.ratios:
            if not ratio.name.startswith(f"{case}: ") or ratio.goal is None:
                continue
            if ratio.goal is COLOCATED_GOAL:
                effect = "two colocated workers take at most 0.65 of the time of one"
                self.found.claim(f"{case.dtype}: {effect}", bool(ratio.met), _seen(ratio))
                continue
            effect = "two hosts of one thread each cost at most 1.25 of one process with two"
            self.found.claim(f"{case.dtype}: {effect}", bool(ratio.met), _seen(ratio))
            effect = f"never more than {HOSTS_BOUND:g} of it"
            self.found.claim(f"{case.dtype}: {effect}", max(ratio.values) <= HOSTS_BOUND, f"{max(ratio.values):.3f}")

    # -- in one process ---------------------------------------------------------------------------

    def _in_process(self, case: Case) -> bool:
        """Sorted rows against a mask for each expert; the grouped product against the loop."""
        noted: dict[str, Any] = {}
        self.found.values["in_process"][str(case)] = noted
        for ours, other in (("sorted", "masks"), ("grouped", "loop")):
            if ours == "grouped" and not can_group(case.torch_dtype):
                effect = f"{case.dtype}: the grouped product against the loop"
                self.found.claims.append(Claim(effect, "not measurable here", f"{product_device().type} has none"))
                continue
            made = [self.alone.results(case, kind=kind, threads=self.threads)[0] for kind in (ours, other)]
            name = f"{case}: {ours} and {other} compute the same"
            if not self.found.gate(equal_tensors(name, *made, tolerance=TOLERANCE[case.dtype])):
                return False
            turns = {kind: self._lone_turn(case, kind) for kind in (ours, other)}
            times = alternate(turns, blocks=self.options.blocks, dropped=1)
            for kind, values in times.items():
                self.found.arms[f"{case}, {kind}"] = values
            ratio = compare(times, of=other, to=ours, name=f"{case}: {other} / {ours}")
            self.found.ratios.append(ratio)
            noted[f"{other} / {ours}"] = ratio.median
        return True

    def _alone(self, threads: int) -> str:
        return f"in process, {threads} thread(s)"

    def _lone_turn(self, case: Case, kind: str) -> Callable[[], float]:
        order = self._lone_order(case, kind, self.threads)
        steps = self._steps(order)
        return lambda: order(steps)["seconds"] / steps

    def _lone_order(self, case: Case, kind: str, threads: int) -> Callable[[int], dict[str, Any]]:
        return lambda steps: self.alone.order(case, steps=steps, kind=kind, threads=threads)

    def _steps(self, order: Callable[[int], dict[str, Any]]) -> int:
        """So many passes that a block takes its time."""
        return max(1, min(500, round(self.options.block_s / order(1)["seconds"])))


TIMES = ("seconds", "cpu_s", "transport_s", "computing_s")


def _gang_order(gang: Gang, case: Case) -> Callable[[int], dict[str, Any]]:
    return lambda steps: gang.order(case, steps=steps)


def _seen(ratio: Ratio) -> str:
    calm = f"{len(ratio.values)} calm rounds"
    return f"{ratio.median:.3f}, interval [{ratio.low:.3f}, {ratio.high:.3f}], {calm}"


def join(made: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the workers made, as one process would have: tokens one after the other, gradients of weights added up,
    and those of the experts from rank 0."""
    whole = dict(made[0])
    for name in ("output", "gradient of the input"):
        whole[name] = torch.cat([part[name] for part in made])
    whole["gradient of router.weight"] = torch.stack([part["gradient of router.weight"] for part in made]).sum(0)
    return whole


def equal_tensors(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float) -> Check:
    """Whether tensors agree by name: the largest difference, over the largest value of each."""
    if ours.keys() != theirs.keys() or not ours:
        return Check(name, False, f"{', '.join(ours)} against {', '.join(theirs)}")
    apart = {
        key: float((ours[key].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-30))
        for key, value in theirs.items()
    }
    worst = max(apart, key=lambda key: apart[key])
    detail = f"{len(apart)} tensors, largest difference {apart[worst]:.2g} of {worst}, wanted {tolerance:g}"
    return Check(name, all(value <= tolerance for value in apart.values()), detail)
