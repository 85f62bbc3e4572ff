"""Bench `experts`: a mixture-of-experts layer, forward and backward, with remote experts and in one process.

Each layout has separate processes; blocks alternate. Workers and hosts have one thread each, the single process has
`threads`. On a busy machine two threads of one process wait for each other more than two processes do. Therefore only
rounds in which the single process is close to its best time are compared. Last, real training steps of a worker with
hosts are compared with one and with two micro-batches in flight.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, Text
from jobs.bench.experts_processes import ExpertsArm, ExpertsLayout
from jobs.bench.harness.inputs import gpt_model, job_of
from jobs.bench.harness.measuring import BenchMeasurement, Check, Claim, Goal, Ratio, Say, alternate, equal_series
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmServer
from raytrain.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from jobs.bench.experts_layers import Case

#: Two hosts of one thread each over the single process with two threads, and the bound of each round.
HOSTS_GOAL, HOSTS_BOUND = Goal(at_most=1.25), 1.4
#: Two workers of one thread each that share the experts and the tokens, over one process of one thread.
COLOCATED_GOAL = Goal(at_most=0.65)
#: A round counts if the time of the single process is within this factor of its best.
CALM = 1.15
#: Largest difference over the largest value: sums in a different order, the precision of bf16.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = ("fp32", "bf16")
TIMES = ("seconds", "cpu_s", "transport_s", "computing_s")

RunSteps = Callable[[int], dict[str, Any]]
"""Run a number of passes; returns the answer of `ExpertsArm.run_block`."""


REMOTE, COLOCATED = ExpertsLayout(1, 2), ExpertsLayout(2)


class ExpertsOptions(BenchOptions):
    """A mixture-of-experts layer, forward and backward, with remote experts and with all experts in one process."""

    MEASURES: ClassVar[str] = (
        "a layer with its experts on hosts or partitioned across workers, against one process; sorted rows "
        "against masks, grouped product against loop; two micro-batches in flight"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "tokens": 64, "width": 16, "experts": 4, "layouts": ["1+2", "2+0"], "token_counts": [32], "widths": [8],
        "blocks": 3, "table_blocks": 2, "block_s": 0.0, "train_layers": 1, "train_width": 16, "train_context": 16,
        "train_rows": 2,
    }  # fmt: skip

    threads: Count | Literal["auto"] = Field(2, description="threads of the single process; workers and hosts have one")
    tokens: Count = Field(2048, description="tokens of a pass, over all workers")
    width: Count = Field(512, description="of a token; the experts' hidden width is four times that")
    experts: Count = Field(8, description="of the layer")
    top_k: Count = Field(2, description="experts of a token")
    layouts: list[Text] = Field(
        ["1+2", "2+0", "1+0", "1+1", "2+1", "2+2"], description="WORKERS+HOSTS; 0 hosts: partitioned over the workers"
    )
    token_counts: list[Count] = Field([512, 2048, 8192], description="of the table for one worker and two hosts")
    widths: list[Count] = Field([256, 512, 1024], description="of that table")
    table_blocks: Count = Field(5, description="repetitions that are kept, for each size of that table")
    block_s: float = Field(0.5, ge=0, description="seconds that one block should take")
    train_layers: Count = Field(2, description="of the GPT that trains with micro-batches in flight")
    train_width: Count = Field(256, description="of that GPT")
    train_context: Count = Field(128, description="tokens of its window")
    train_rows: Count = Field(4, description="of one of its micro-batches")
    micro_batches: Count = Field(4, description="of one of its steps")


def run(options: ExpertsOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the exchange by layout and size, the kinds of computation in one process, and micro-batches in flight.

    Raises:
        InputError: an invalid layout, more holders than experts, or tokens that are not divisible by the workers.
        RunError: a process died.
    """
    layouts = _layouts(options)
    found = BenchMeasurement("experts", quick, options.model_dump(), "seconds of one forward and backward pass")
    found.values |= {"exchange": {}, "in_process": {}}
    widths = sorted({options.width, *options.widths})
    with ArmServer() as server:
        say(f"starting {1 + sum(layout.processes for layout in layouts)} processes")
        sizes = {"num_experts": options.experts, "top_k": options.top_k, "seed": options.seed}
        arms: list[ExpertsArm] = []
        for layout in (ExpertsLayout(0), *layouts):
            own = widths if layout in (ExpertsLayout(0), REMOTE) else [options.width]
            arms.append(ExpertsArm(server, layout, {**sizes, "widths": own}))
        for arm in arms:
            arm.await_ready()
        _Rounds(found, options, arms[0], arms[1:], say).measure()
        if found.passed:
            _measure_inflight(found, options, server, say)
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
        for tokens in (options.tokens, *options.token_counts):
            if tokens % int(workers):
                raise InputError("tokens", got=f"{tokens} for {workers} workers", expected="a multiple of workers")
    return layouts


class _Rounds:
    """The measurements of single layers, with their processes."""

    def __init__(
        self, found: BenchMeasurement, options: ExpertsOptions, alone: ExpertsArm, arms: list[ExpertsArm], say: Say
    ) -> None:
        self.found, self.options, self.alone, self.arms, self.say = found, options, alone, arms, say
        self.threads = options.thread_count

    def measure(self) -> None:
        """Run all measurements; stops early if the gate fails."""
        from jobs.bench.experts_layers import Case

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
        """Check the gate, then run blocks in turn; False if the gate failed."""
        self.say(f"{case}: {', '.join(str(arm.layout) for arm in arms)}")
        (reference,) = self.alone.results(case, kind="sorted", threads=1)
        for arm in arms:
            joined = join(arm.results(case))
            name = f"{case}: outputs and gradients of {arm.layout} equal those in one process"
            if not self.found.gate(equal_tensors(name, joined, reference, tolerance=TOLERANCE[case.dtype])):
                return False
        answers: dict[str, list[dict[str, Any]]] = {}

        def block_of(name: str, run: RunSteps) -> Callable[[], float]:
            steps = self._steps(run)
            kept = answers.setdefault(name, [])

            def block() -> float:
                answer = run(steps)
                kept.append({key: answer[key] / steps for key in TIMES if key in answer})
                return kept[-1]["seconds"]

            return block

        runs = {self._alone(threads): self._run_alone(case, "sorted", threads) for threads in (self.threads, 1)}
        runs |= {str(arm.layout): _run_arm(arm, case) for arm in arms}
        times = alternate({name: block_of(name, run) for name, run in runs.items()}, blocks=blocks, dropped=1)
        for name, values in times.items():
            self.found.arms[f"{case}, {name}"] = values
        shown = {name: kept[-blocks:] for name, kept in answers.items()}
        self._add_ratios(case, shown, arms)
        return True

    def _add_ratios(self, case: Case, shown: dict[str, list[dict[str, float]]], arms: list[ExpertsArm]) -> None:
        """Add ratios over the calm rounds, CPU seconds, and the fraction of the time spent in the exchange."""
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
            # while hosts compute, the worker waits: their computation is not part of the transport
            hidden = [row["computing_s"] if arm.layout.hosts else 0.0 for row in rows]
            shares = [(row["transport_s"] - own) / row["seconds"] for row, own in zip(rows, hidden, strict=True)]
            counts["layouts"][name]["share_of_transport"] = statistics.median(shares)
            for threads in (self.threads, 1):
                goal = None
                if case.tokens == self.options.tokens and case.width == self.options.width:
                    goal = HOSTS_GOAL if (arm.layout, threads) == (REMOTE, 2) else goal
                    goal = COLOCATED_GOAL if (arm.layout, threads) == (COLOCATED, 1) else goal
                label = f"{case}: {name} / {self._alone(threads)}"
                self.found.compare(times, of=name, to=self._alone(threads), name=label, goal=goal)

    def _goals(self, case: Case) -> None:
        """Add the claims about one size."""
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
        """Compare sorted rows with a mask for each expert, and the grouped matrix product with a loop."""
        from jobs.bench.experts_layers import can_group, product_device

        medians: dict[str, Any] = {}
        self.found.values["in_process"][str(case)] = medians
        for ours, other in (("sorted", "masks"), ("grouped", "loop")):
            if ours == "grouped" and not can_group(case.torch_dtype):
                effect = f"{case.dtype}: the grouped product against the loop"
                self.found.claims.append(Claim(effect, "not measurable here", f"{product_device().type} has none"))
                continue
            results = [self.alone.results(case, kind=kind, threads=self.threads)[0] for kind in (ours, other)]
            name = f"{case}: {ours} and {other} compute the same"
            if not self.found.gate(equal_tensors(name, *results, tolerance=TOLERANCE[case.dtype])):
                return False
            blocks = {kind: self._block_alone(case, kind) for kind in (ours, other)}
            times = alternate(blocks, blocks=self.options.blocks, dropped=1)
            for kind, values in times.items():
                self.found.arms[f"{case}, {kind}"] = values
            ratio = self.found.compare(times, of=other, to=ours, name=f"{case}: {other} / {ours}")
            medians[f"{other} / {ours}"] = ratio.median
        return True

    def _alone(self, threads: int) -> str:
        return f"in process, {threads} thread(s)"

    def _block_alone(self, case: Case, kind: str) -> Callable[[], float]:
        run = self._run_alone(case, kind, self.threads)
        steps = self._steps(run)
        return lambda: run(steps)["seconds"] / steps

    def _run_alone(self, case: Case, kind: str, threads: int) -> RunSteps:
        return lambda steps: self.alone.run_case(case, steps=steps, kind=kind, threads=threads)

    def _steps(self, run: RunSteps) -> int:
        """The number of passes in a block of `block_s` seconds."""
        return max(1, min(500, round(self.options.block_s / run(1)["seconds"])))


def _run_arm(arm: ExpertsArm, case: Case) -> RunSteps:
    return lambda steps: arm.run_case(case, steps=steps)


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


# -- micro-batches in flight ----------------------------------------------------------------------


def _training_job(options: ExpertsOptions, text: Path) -> dict[str, Any]:
    """A small GPT whose steps have several micro-batches."""
    model = gpt_model(
        options, builder="experts.models:moe_gpt", layers=options.train_layers, heads=2, width=options.train_width,
        context=options.train_context,
    )  # fmt: skip
    loop = {
        "global_batch_size": options.train_rows * options.micro_batches, "micro_batch_size": options.train_rows,
        "log_every": 1,
    }  # fmt: skip
    experts = {"num_experts": options.experts, "top_k": options.top_k, "hosts": 0}
    return job_of(options, model, text, name="experts", loop=loop, precision={"dtype": "fp32"}, experts=experts)


def _measure_inflight(found: BenchMeasurement, options: ExpertsOptions, server: ArmServer, say: Say) -> None:
    """Start both arms, run alternating blocks, check the gate."""
    text = server.folder / "text.txt"
    text.write_bytes(bytes(97 + (31 * i * i + 7 * i + i // 97) % 26 for i in range(64 * 1024)))
    settings = {
        "job": _training_job(options, text), "num_experts": options.experts, "top_k": options.top_k,
        "seed": options.seed,
        "widths": [options.train_width] * options.train_layers,
    }  # fmt: skip
    say(f"training, {options.micro_batches} micro-batches a step: one and two in flight")
    one, two = "one in flight", "two in flight"
    losses: dict[str, list[float]] = {one: [], two: []}
    cpu: dict[str, list[float]] = {one: [], two: []}
    arms = {
        name: ExpertsArm(server, REMOTE, {**settings, "inflight": number}, name=f"inflight-{number}")
        for number, name in enumerate((one, two), start=1)
    }
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
    if not found.gate(equal_series("the losses with two in flight equal those with one", losses[two], losses[one])):
        return
    for name, values in times.items():
        found.arms[f"a training step, {name}"] = values
    found.compare(times, of=one, to=two, name="a training step: one in flight / two in flight")
    found.values["inflight"] = {
        name: {"ms": 1e3 * statistics.median(times[name]), "cpu_s": statistics.median(cpu[name])} for name in times
    }
