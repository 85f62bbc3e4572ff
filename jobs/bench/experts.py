"""Bench `experts`: a mixture-of-experts layer, forward and backward, with remote experts and in one process.

Each layout has separate processes; blocks alternate. Workers and hosts have one thread each, the single process has
`threads`. On a busy machine two threads of one process wait for each other more than two processes do. Therefore only
rounds in which the single process is close to its best time are compared.

Workers and the single process serve requests of the bench, a host serves its workers; waiting uses no CPU. They meet in
a transport group without Ray, which the processes of benches `moves` and `lifecycle` have as well.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.config import Count, Text
from experts.config import ExpertsConfig, LayerShape
from experts.distribute import LoadLog, hand_over
from experts.exchange.dispatch import RemoteExperts
from experts.exchange.host_server import HostServer
from experts.exchange.membership import Membership
from experts.layer import MoELayer
from experts.models import moe_layer
from experts.placement.policy import PlacementRules, first_placement
from experts.placement.values import Placement
from experts.router import LoadTracker
from experts.transport import JointGroup
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer, serve_blocks
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.train.memory.device import keep_freed_memory
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.trainable import LocalStep, Trainable

#: Two hosts of one thread each over the single process with two threads, and the bound of each round.
HOSTS_GOAL, HOSTS_BOUND = Goal(at_most=1.25), 1.4
#: Two workers of one thread each that share the experts and the tokens, over one process of one thread.
COLOCATED_GOAL = Goal(at_most=0.65)
#: A round counts if the time of the single process is within this factor of its best.
CALM = 1.15
#: Largest difference over the largest value: sums in a different order, the precision of bf16.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


class ExpertsOptions(BenchOptions):
    """Options of bench `experts`."""

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
        files = str(server.folder / name)
        self._stem = f"{files}-results"
        settings = {
            **options.model_dump(include={"tokens", "width", "top_k", "seed"}), "num_experts": options.experts,
            "arm": name, "workers": layout.workers, "hosts": layout.hosts, "store": f"{files}.store",
        }  # fmt: skip
        super().__init__(
            server, name, "jobs.bench.experts:run_layer", settings,
            processes=max(1, layout.workers + layout.hosts), connecting=max(1, layout.workers),
        )  # fmt: skip

    def results(self, dtype: str) -> list[dict[str, Tensor]]:
        """The output and gradients of one pass in each worker."""
        self.ask(dtype=dtype, results=self._stem)
        paths = [f"{self._stem}-{rank}.safetensors" for rank in range(max(1, self.layout.workers))]
        results = [load_file(path) for path in paths]
        for path in paths:
            os.unlink(path)
        return results


def run(options: ExpertsOptions, found: BenchMeasurement, say: Say) -> None:
    """Measure the exchange by layout.

    Raises:
        InputError: an invalid layout, more holders than experts, or tokens that are not divisible by the workers.
        RunError: a process died.
    """
    layouts = _layouts(options)
    found.block = "seconds of one forward and backward pass"
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
    threads = options.thread_count
    (reference,) = alone.results(dtype)
    for arm in arms:
        name = f"{dtype}: outputs and gradients of {arm.layout} equal those in one process"
        if not found.gate(equal_tensors(name, join(arm.results(dtype)), reference, tolerance=TOLERANCE[dtype])):
            return False
    ways: dict[str, tuple[ExpertsArm, dict[str, Any]]] = {
        **{_alone(number): (alone, {"dtype": dtype, "threads": number}) for number in (threads, 1)},
        **{str(arm.layout): (arm, {"dtype": dtype}) for arm in arms},
    }
    steps, cpu_s = dict.fromkeys(ways, 1), {name: list[float]() for name in ways}

    def block(name: str) -> float:
        arm, request = ways[name]
        before = arm.cpu_seconds()
        answer = arm.ask(steps=steps[name], **request)
        cpu_s[name].append((arm.cpu_seconds() - before) / steps[name])
        return answer["seconds"] / steps[name]

    for name in ways:
        steps[name] = max(1, min(500, round(options.block_s / block(name))))
    times = alternate({name: partial(block, name) for name in ways}, blocks=options.blocks)
    found.arms |= {f"{dtype}, {name}": values for name, values in times.items()}
    single = times[_alone(threads)]
    calm = [n for n, seconds in enumerate(single) if seconds <= CALM * min(single)]
    times = {name: [values[n] for n in calm] for name, values in times.items()}
    cpu = {name: statistics.median(values[-options.blocks :][n] for n in calm) for name, values in cpu_s.items()}
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
            seen = f"{ratio}, {len(ratio.values)} calm rounds"
            if goal is COLOCATED_GOAL:
                effect = f"{dtype}: two colocated workers take at most 0.65 of the time of one"
                found.claim(effect, bool(ratio.met), seen)
            elif goal is HOSTS_GOAL:
                effect = f"{dtype}: two hosts of one thread each cost at most 1.25 of one process with two"
                found.claim(effect, bool(ratio.met), seen)
                worst = max(ratio.values)
                found.claim(f"{dtype}: never more than {HOSTS_BOUND:g} of it", worst <= HOSTS_BOUND, f"{worst:.3f}")


def _alone(threads: int) -> str:
    return f"in process, {threads} thread(s)"


def join(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all workers as of one process: tokens concatenated, gradients of the router summed, gradients of
    the experts from rank 0."""
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


# ---------------------------------------------------------------- in the processes: a group without Ray

#: Longest wait of an arm while the others run their blocks, which can take long on a busy machine.
TIMEOUT_S = 4 * 3600.0


@dataclass(frozen=True)
class FileConnection:
    """A worker's connection to its hosts, with a fixed set of members that meet through a file.

    Args:
        settings: with "store", "workers" and "hosts" (0: the workers hold the experts).
        place: returns the initial placement of the layers of a model.
    """

    settings: dict[str, Any]
    rank: int
    place: Callable[[list[LayerShape], PlacementRules], Placement]

    def close(self) -> None:
        """Does nothing."""

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[JointGroup, Membership]:
        """Join the group of all processes."""
        membership = Membership(
            generation=1, rank=self.rank, workers=self.settings["workers"], placement=self.place(shapes, rules),
            run_path="unused", host=None if self.settings["hosts"] else self.rank,
        )  # fmt: skip
        return joint_group(self.settings, self.rank), membership


def joint_group(settings: dict[str, Any], rank: int) -> JointGroup:
    """This process's end of the group: workers first, then hosts."""
    workers, hosts = settings["workers"], settings["hosts"]
    size = workers + hosts
    return JointGroup(
        dist.FileStore(settings["store"], size),  # pyright: ignore[reportPrivateImportUsage]
        name="bench-experts", rank=rank, size=size, workers=workers,
        holders=list(range(workers, size)) if hosts else list(range(workers)), device=torch.device("cpu"),
        interface="lo", timeout_s=TIMEOUT_S,
    )  # fmt: skip


def serve_host(settings: dict[str, Any], rank: int, placement: Placement) -> None:
    """Run as a host until the workers let it exit."""
    group, device = joint_group(settings, rank), torch.device("cpu")
    HostServer(group, host=rank - settings["workers"], generation=1, placement=placement, device=device).serve()


# ---------------------------------------------------------------- in the processes: the layer

#: Updates of the loss-free bias before the measurements, after which all experts have nearly the same load.
BALANCING_ROUNDS = 200
#: Of the gradients of the layer's output: at a learning rate of 1 the experts' weights change by about their own size.
GRADIENT_STD = 1e-2
#: Plain gradient descent, unclipped: one step at a learning rate of 1 shows every expert's gradient.
OPTIM = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, max_grad_norm=None)


class LayerRunner:
    """The layer with this process's part of the tokens: all of them and all experts in the single process (0 workers),
    else with the experts where the layout has them."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        workers, tokens, width = max(1, settings["workers"]), settings["tokens"], settings["width"]
        section = ExpertsConfig(num_experts=settings["num_experts"], top_k=settings["top_k"], balance="bias")
        torch.manual_seed(settings["seed"])
        self.layer = moe_layer(width, section, residual_scale=1.0)
        draw = torch.Generator().manual_seed(settings["seed"])
        x_TD = torch.randn(tokens, width, generator=draw)
        grad_TD = GRADIENT_STD * torch.randn(tokens, width, generator=draw)
        self.counts = balance(self.layer, x_TD)
        part = slice(rank * tokens // workers, (rank + 1) * tokens // workers)
        self.x, self.grad = x_TD[part].clone().requires_grad_(), grad_TD[part].clone()
        self.client: Any = None
        if settings["workers"]:
            self._hand_over(settings, rank)
        self.buffers = GradientBuffers(self.layer.parameters())

    def _hand_over(self, settings: dict[str, Any], rank: int) -> None:
        self.first = {name: one.detach() for name, one in self.layer.experts.named_parameters()}
        trainable = Trainable(torch.nn.ModuleList([self.layer]), loss=_no_loss)
        trainable.interval_log = LoadLog(LoadTracker([self.layer.router]))
        connection = FileConnection(settings, rank, lambda _shapes, _rules: place(settings))
        hand_over(trainable, ExpertsConfig().connected(connection))
        assert isinstance(self.layer.experts, RemoteExperts)
        self.client = self.layer.experts.client
        self._restore()

    def _restore(self) -> None:
        """Reset remote experts to their initial weights."""
        self.client.configure(OPTIM, dtype=torch.float32, device=torch.device("cpu"))

    def once(self, dtype: str) -> Tensor:
        """Run forward and backward once; returns the output and leaves the gradient of the input in `x.grad`."""
        self.x.grad = None
        lower = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()
        with lower:
            y = self.layer(self.x.unsqueeze(0))[0].squeeze(0)
        y.backward(self.grad)
        return y.detach()

    def run_block(self, request: dict[str, Any]) -> dict[str, float]:
        """Run "steps" passes; the gradients of all processes are zero afterwards."""
        torch.set_num_threads(request.get("threads", 1))
        began = time.perf_counter()
        for _ in range(request["steps"]):
            self.once(request["dtype"])
        seconds = time.perf_counter() - began
        if self.client is not None:
            self.client.discard()
        self.buffers.zero_()
        return {"seconds": seconds}

    def results(self, dtype: str) -> dict[str, Tensor]:
        """The output of one pass with the initial weights, the gradients of input and router, and those of the experts:
        of remote ones on rank 0, their change in a step at a learning rate of 1."""
        self.buffers.zero_()
        y = self.once(dtype)
        gradients = {name: parameter.grad for name, parameter in self.layer.named_parameters()}
        results = {"output": y, "gradient of the input": self.x.grad}
        results |= {f"gradient of {name}": value for name, value in gradients.items()}
        kept = {name: value.clone() for name, value in results.items() if value is not None}
        if self.client is not None:
            nothing = torch.zeros((), dtype=torch.float64)
            self.client.agree(LocalStep(self.client.steps + 1, nothing, torch.tensor(False), lr=1.0))
            after = self.client.fetch(0)
            for name in self.first if after is not None else ():
                stacked = torch.stack([weights[name] for weights in after or ()])
                kept[f"gradient of experts.{name}"] = self.first[name] - stacked
            self._restore()
        self.buffers.zero_()
        return kept


@torch.no_grad()
def balance(layer: MoELayer, x_TD: Tensor) -> list[int]:
    """Train the router's bias from zero until it balances the load of this input; returns the rows of each expert."""
    router = layer.router
    router.bias_E.zero_()
    for _ in range(BALANCING_ROUNDS):
        router.pending_counts.zero_()
        router(x_TD.unsqueeze(0))
        router.commit(router.pending_counts.clone(), skipped=False)
    return router(x_TD.unsqueeze(0)).counts_E.tolist()


def place(settings: dict[str, Any]) -> Placement:
    """The fixed placement of the layer."""
    return first_placement([settings["num_experts"]], hosts=settings["hosts"] or settings["workers"])


def _no_loss(_module: torch.nn.Module, _batch: Any) -> Any:
    raise AssertionError("the bench calls the layer")


def run_layer(settings: dict[str, Any], rank: int) -> None:
    """Run as the process of this rank: a worker, the single process, or a host."""
    keep_freed_memory()
    torch.set_num_threads(1)
    if settings["workers"] and rank >= settings["workers"]:
        serve_host(settings, rank, place(settings))
        return
    runner = LayerRunner(settings, rank)

    def run_block(request: dict[str, Any]) -> dict[str, Any]:
        if "results" in request:
            save_file(runner.results(request["dtype"]), f"{request['results']}-{rank}.safetensors")
        return runner.run_block(request)

    serve_blocks(settings["arm"], run_block)
    if runner.client is not None:
        runner.client.end()  # lets the hosts exit
