"""Bench `experts`: a mixture-of-experts layer forward and backward, its experts elsewhere and in one process.

Every layout lives in processes of its own; they take turns, block by block. Workers and hosts have one thread each, the
lone process has `threads`. On a machine where others work too, two threads of one process wait for each other more
than processes do: only rounds in which the lone process is near its own best are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, Text
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.measuring import BenchMeasurement, Check, Claim, Goal, Ratio, Say, alternate, compare
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmServer
from raytrain.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from jobs.bench.experts.experts_layers import Case
    from jobs.bench.experts.experts_processes import ExpertsArm

#: Two hosts of one thread each over the lone process with two, and what no round may exceed.
HOSTS_GOAL, HOSTS_BOUND = Goal(at_most=1.25), 1.4
#: Two workers of one thread each that share the experts and the tokens, over one process of one thread.
COLOCATED_GOAL = Goal(at_most=0.65)
#: A round counts where the lone process is within this factor of its best.
CALM = 1.15
#: Largest difference over the largest value: sums in another order, bf16 with its 8 bits.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class ExpertsLayout:
    """Where the experts are: in `hosts` hosts of `workers` workers, or (hosts 0) inside the workers; no workers is one
    process without any exchange."""

    workers: int
    hosts: int = 0

    @property
    def processes(self) -> int:
        """How many there are; each has one thread, but for a single one."""
        return max(1, self.workers + self.hosts)

    def __str__(self) -> str:
        if not self.workers:
            return "in process"
        return f"{self.workers} + {self.hosts}" if self.hosts else f"{self.workers} colocated"


REMOTE, COLOCATED = ExpertsLayout(1, 2), ExpertsLayout(2)


class ExpertsOptions(BenchOptions):
    """One mixture-of-experts layer, forward and backward, with its experts elsewhere and in one process."""

    MEASURES: ClassVar[str] = (
        "a layer with its experts on expert hosts or partitioned across workers, against one process; sorted rows "
        "against masks, grouped product against loop; two micro-batches in flight"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "tokens": 64, "width": 16, "experts": 4, "layouts": ["1+2", "2+0"], "token_counts": [32], "widths": [8],
        "blocks": 3, "table_blocks": 2, "block_s": 0.0, "train_layers": 1, "train_width": 16, "train_context": 16,
        "train_rows": 2,
    }  # fmt: skip

    threads: Count | Literal["auto"] = Field(2, description="threads of the lone process; workers and hosts have one")
    tokens: Count = Field(2048, description="of a pass, over all workers")
    width: Count = Field(512, description="of a token; the experts' hidden width is four times that")
    experts: Count = Field(8, description="of the layer")
    top_k: Count = Field(2, description="experts of a token")
    layouts: list[Text] = Field(
        ["1+2", "2+0", "1+0", "1+1", "2+1", "2+2"], description="WORKERS+HOSTS; no hosts: shared out over the workers"
    )
    token_counts: list[Count] = Field([512, 2048, 8192], description="of the table for one worker and two hosts")
    widths: list[Count] = Field([256, 512, 1024], description="of that table")
    table_blocks: Count = Field(5, description="repetitions that are kept, for each size of that table")
    block_s: float = Field(0.5, ge=0, description="seconds that one block should take")
    train_layers: Count = Field(2, description="of the GPT that trains with one and with two micro-batches in flight")
    train_width: Count = Field(256, description="of that GPT")
    train_context: Count = Field(128, description="tokens of its window")
    train_rows: Count = Field(4, description="of one of its micro-batches")
    micro_batches: Count = Field(4, description="of one of its steps")


def run(options: ExpertsOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the exchange, by layout and by size, then the ways to compute experts in one process.

    Raises:
        InputError: a layout that is none, or has more members than experts, or tokens that workers cannot share.
        RunError: a process died.
    """
    from jobs.bench.experts.experts_processes import ExpertsArm
    from jobs.bench.experts.experts_train import measure_inflight

    layouts = _layouts(options)
    found = BenchMeasurement("experts", quick, options.model_dump(), "seconds of one forward and backward pass")
    found.values |= {"exchange": {}, "in_process": {}}
    widths = sorted({options.width, *options.widths})
    with ArmServer() as server:
        say(f"starting {1 + sum(layout.processes for layout in layouts)} processes")
        sizes = {"num_experts": options.experts, "top_k": options.top_k, "seed": options.seed}
        arms: list[ExpertsArm] = []
        done = False
        try:
            for layout in (ExpertsLayout(0), *layouts):
                own = widths if layout in (ExpertsLayout(0), REMOTE) else [options.width]
                arms.append(ExpertsArm(server, layout, {**sizes, "widths": own}))
            for arm in arms:
                arm.await_ready()
            _Rounds(found, options, arms[0], arms[1:], say).measure()
            if found.passed:
                measure_inflight(found, options, server, say)
            done = True
        finally:
            for arm in arms:
                arm.close(kill=not done)
    return found


def _layouts(options: ExpertsOptions) -> list[ExpertsLayout]:

    layouts = []
    for text in options.layouts:
        workers, plus, hosts = text.partition("+")
        if not (plus and workers.isdigit() and hosts.isdigit() and int(workers)):
            raise InputError("layouts", seen=text, expected="WORKERS+HOSTS such as 1+2; 2+0 is two workers, colocated")
        layouts.append(ExpertsLayout(int(workers), int(hosts)))
        if (int(hosts) or int(workers)) > options.experts:
            raise InputError("layouts", seen=text, expected=f"at most {options.experts} to hold as many experts")
        for tokens in (options.tokens, *options.token_counts):
            if tokens % int(workers):
                raise InputError("tokens", seen=f"{tokens} for {workers} workers", expected="a multiple of workers")
    return layouts


class _Rounds:
    """The measurements, with the processes they take."""

    def __init__(
        self, found: BenchMeasurement, options: ExpertsOptions, alone: ExpertsArm, arms: list[ExpertsArm], say: Say
    ) -> None:
        self.found, self.options, self.alone, self.arms, self.say = found, options, alone, arms, say
        threads = options.threads
        self.threads = threads if isinstance(threads, int) else local_inventory().cpus

    def measure(self) -> None:
        """All of them; ends early where the gate fails."""
        from jobs.bench.experts.experts_layers import Case

        options = self.options
        for dtype in DTYPES:
            case = Case(options.tokens, options.width, dtype)
            if not self._exchange(case, self.arms, blocks=options.blocks) or not self._in_process(case):
                return
            self._goals(case)
        remote = [arm for arm in self.arms if arm.layout == REMOTE]
        sizes = [(tokens, width) for tokens in options.token_counts for width in options.widths]
        for tokens, width in sizes if remote else []:
            for dtype in DTYPES:
                case = Case(tokens, width, dtype)
                if str(case) not in self.found.values["exchange"] and not self._exchange(
                    case, remote, blocks=options.table_blocks
                ):
                    return

    # -- the exchange -----------------------------------------------------------------------------

    def _exchange(self, case: Case, arms: list[ExpertsArm], *, blocks: int) -> bool:
        """Gate, then blocks in turn; False where the gate failed."""
        self.say(f"{case}: {', '.join(str(arm.layout) for arm in arms)}")
        (reference,) = self.alone.results(case, kind="sorted", threads=1)
        for arm in arms:
            whole = join(arm.results(case))
            name = f"{case}: outputs and gradients of {arm.layout} equal those in one process"
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
        names |= {str(arm.layout): _arm_order(arm, case) for arm in arms}
        times = alternate({name: turn(name, order) for name, order in names.items()}, blocks=blocks, dropped=1)
        for name, values in times.items():
            self.found.arms[f"{case}, {name}"] = values
        shown = {name: kept[-blocks:] for name, kept in answers.items()}
        self._note(case, shown, arms)
        return True

    def _note(self, case: Case, shown: dict[str, list[dict[str, float]]], arms: list[ExpertsArm]) -> None:
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
        for arm in arms:
            name, rows = str(arm.layout), [shown[str(arm.layout)][n] for n in calm]
            hidden = [row["computing_s"] if arm.layout.hosts else 0.0 for row in rows]  # the hosts', while one waits
            shares = [(row["transport_s"] - own) / row["seconds"] for row, own in zip(rows, hidden, strict=True)]
            counts["layouts"][name]["share_of_transport"] = statistics.median(shares)
            for threads in (self.threads, 1):
                goal = None
                if case.tokens == self.options.tokens and case.width == self.options.width:
                    goal = HOSTS_GOAL if (arm.layout, threads) == (REMOTE, 2) else goal
                    goal = COLOCATED_GOAL if (arm.layout, threads) == (COLOCATED, 1) else goal
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
        from jobs.bench.experts.experts_layers import can_group, product_device

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
        return lambda steps: self.alone.run_case(case, steps=steps, kind=kind, threads=threads)

    def _steps(self, order: Callable[[int], dict[str, Any]]) -> int:
        """So many passes that a block takes its time."""
        return max(1, min(500, round(self.options.block_s / order(1)["seconds"])))


TIMES = ("seconds", "cpu_s", "transport_s", "computing_s")


def _arm_order(arm: ExpertsArm, case: Case) -> Callable[[int], dict[str, Any]]:
    return lambda steps: arm.run_case(case, steps=steps)


def _seen(ratio: Ratio) -> str:
    calm = f"{len(ratio.values)} calm rounds"
    return f"{ratio.median:.3f}, interval [{ratio.low:.3f}, {ratio.high:.3f}], {calm}"


def join(made: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the workers made, as one process would have: tokens one after the other, gradients of weights added up,
    and those of the experts from rank 0."""
    import torch

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
