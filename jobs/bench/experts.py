"""Bench `experts`: a mixture-of-experts layer, forward and backward, with remote experts and in one process.

Each layout has separate processes; blocks alternate. Workers and hosts have one thread each, the single process has
`threads`. On a busy machine two threads of one process wait for each other more than two processes do. Therefore only
rounds in which the single process is close to its best time are compared.

Workers and the single process serve requests of the bench, a host serves its workers; waiting uses no CPU. They meet in
a transport group without Ray, which the processes of benches `moves` and `lifecycle` have as well.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cluster.config import Count, Text
from experts.config import ExpertsConfig, LayerShape
from experts.distribute import LoadLog, hand_over
from experts.exchange.dispatch import RemoteExperts
from experts.exchange.host_server import HostServer
from experts.exchange.membership import Membership
from experts.layer import MoELayer
from experts.models import moe_layer
from experts.placement.policy import PlacementRules, starting_placement
from experts.placement.values import Placement, equal_hosts
from experts.router import LoadTracker
from experts.sizes import hidden_widths
from experts.transport import JointGroup
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal
from jobs.bench.harness.options import BenchOptions, key
from jobs.bench.harness.processes import ArmProcesses, Arms, serve_blocks
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.train.memory.device import keep_freed_memory
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.trainable import Trainable

#: Two hosts of one thread each over the single process with two threads, and the bound of each round.
HOSTS_GOAL, HOSTS_BOUND = Goal(at_most=1.25), 1.4
#: Two workers of one thread each that share the experts and the tokens, over one process of one thread.
COLOCATED_GOAL = Goal(at_most=0.65)
#: A round counts if the time of the single process is within this factor of its best.
CALM = 1.15
#: Largest difference over the largest value: sums in a different order, the precision of bf16.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


class ExpertsOptions(BenchOptions):
    threads: Count | Literal["auto"] = key(2, "threads of the single process; workers and hosts have one")
    tokens: Count = key(2048, "tokens of a pass, over all workers", quick=64)
    width: Count = key(512, "of a token; the experts' hidden width is four times that", quick=16)
    experts: Count = key(8, "of the layer", quick=4)
    top_k: Count = key(2, "experts of a token")
    layouts: list[Text] = key(
        ["1+2", "2+0", "1+0", "1+1", "2+1", "2+2"],
        "WORKERS+HOSTS; 0 hosts: partitioned over the workers",
        quick=["1+2", "2+0"],
    )
    block_s: float = key(0.5, "seconds that one block should take", quick=0.0, ge=0)


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


def run(options: ExpertsOptions, found: BenchMeasurement) -> None:
    layouts = [ALONE, *_layouts(options)]
    found.block = "seconds of one forward and backward pass"
    found.values["exchange"] = {}
    with Arms() as started:
        found.say("starting the processes")
        arms = {layout: _start(started, layout, options) for layout in layouts}
        started.await_ready()
        for dtype in TOLERANCE:
            found.say(f"{dtype}: {', '.join(map(str, layouts))}")
            if not _measure(options, found, arms, dtype=dtype):
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


def _start(arms: Arms, layout: ExpertsLayout, options: ExpertsOptions) -> ArmProcesses:
    name = str(layout).replace(" ", "")
    section = {"num_experts": options.experts, "top_k": options.top_k, "balance": "bias"}
    model = {"width": options.width, "layers": 1}
    settings = group_settings(arms, name, section, model, workers=layout.workers, hosts=layout.hosts)
    settings |= {"tokens": options.tokens, "seed": options.seed}
    return ArmProcesses(
        arms, name, "jobs.bench.experts:run_layer", settings,
        processes=max(1, layout.workers + layout.hosts), connecting=max(1, layout.workers),
    )  # fmt: skip


def _measure(
    options: ExpertsOptions, found: BenchMeasurement, arms: dict[ExpertsLayout, ArmProcesses], *, dtype: str
) -> bool:
    """Check the gate, then run blocks in turn; False if the gate failed."""
    threads = options.thread_count
    results = {layout: joined(arm.ask_all(dtype=dtype, results=True)) for layout, arm in arms.items()}
    remote = [layout for layout in arms if layout is not ALONE]
    for layout in remote:
        name = f"{dtype}: output and gradient of {layout} equal those in one process"
        if not found.gate(equal_arrays(name, results[layout], results[ALONE], tolerance=TOLERANCE[dtype])):
            return False
    ways: dict[str, tuple[ArmProcesses, dict[str, Any]]] = {
        **{_alone(number): (arms[ALONE], {"dtype": dtype, "threads": number}) for number in (threads, 1)},
        **{str(layout): (arms[layout], {"dtype": dtype}) for layout in remote},
    }
    steps = dict.fromkeys(ways, 1)

    def block(name: str) -> float:
        arm, request = ways[name]
        return arm.ask(steps=steps[name], **request)["seconds"] / steps[name]

    for name in ways:
        steps[name] = max(1, min(500, round(options.block_s / block(name))))
    blocks = {name: partial(block, name) for name in ways}
    times = found.alternate(blocks, blocks=options.blocks, named=f"{dtype}, {{}}")
    single = times[_alone(threads)]
    calm = [n for n, seconds in enumerate(single) if seconds <= CALM * min(single)]
    times = {name: [values[n] for n in calm] for name, values in times.items()}
    found.values["exchange"][dtype] = {
        "calm_rounds": calm,
        "ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
    }
    goals = {(REMOTE, 2): HOSTS_GOAL, (COLOCATED, 1): COLOCATED_GOAL}
    for layout in remote:
        for number in (threads, 1):
            goal = goals.get((layout, number))
            name = f"{dtype}: {layout} / {_alone(number)}"
            ratio = found.compare(times, of=str(layout), to=_alone(number), name=name, goal=goal)
            if goal is HOSTS_GOAL:
                worst = max(ratio.values)
                found.claim(f"{name}: never more than {HOSTS_BOUND:g}", worst <= HOSTS_BOUND, f"{worst:.3f}")
    return True


def _alone(threads: int) -> str:
    return f"in process, {threads} thread(s)"


Arrays = dict[str, np.ndarray]


def joined(answers: list[dict[str, Any]]) -> Arrays:
    """The results of all workers as of one process: the rows of one after those of the other."""
    parts = [answer["results"] for answer in sorted(answers, key=lambda answer: answer["rank"])]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def equal_arrays(name: str, ours: Arrays, theirs: Arrays, *, tolerance: float) -> Check:
    """Whether arrays agree: the largest difference over the largest value of each."""
    worst = {key: float(np.abs(ours[key] - value).max() / np.abs(value).max()) for key, value in theirs.items()}
    detail = ", ".join(f"{key} {value:.2g}" for key, value in worst.items())
    agree = all(value <= tolerance for value in worst.values())
    return Check(name, agree, f"largest difference: {detail}; wanted {tolerance:g}")


# ---------------------------------------------------------------- in the processes: a group without Ray

#: Longest wait of an arm while the others run their blocks, which can take long on a busy machine.
TIMEOUT_S = 4 * 3600.0


def group_settings(
    arms: Arms, name: str, section: dict[str, Any], model: dict[str, Any], *, workers: int, hosts: int
) -> dict[str, Any]:
    """What the processes of an arm need to meet: the section `experts`, "width" and "layers" of the model, and so many
    workers and hosts (0: the workers hold the experts)."""
    return {
        "experts": section, "width": model["width"], "layers": model["layers"], "workers": workers, "hosts": hosts,
        "store": str(arms.folder / f"{name}.store"),
    }  # fmt: skip


@dataclass(frozen=True)
class FileConnection:
    """A worker's connection to its hosts, with a fixed set of members that meet through a file."""

    settings: dict[str, Any]
    rank: int

    def close(self) -> None: ...

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[JointGroup, Membership]:
        membership = Membership(
            generation=1, rank=self.rank, workers=self.settings["workers"],
            placement=first_placement(self.settings, shapes, rules), run_path="unused",
            host=None if self.settings["hosts"] else self.rank,
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


def first_placement(settings: dict[str, Any], shapes: list[LayerShape], rules: PlacementRules) -> Placement:
    """The placement in all processes, before the hosts' speeds are known."""
    return starting_placement(rules, shapes, equal_hosts(settings["hosts"] or settings["workers"]))


def serve_host(settings: dict[str, Any], rank: int) -> None:
    """Run as a host until the workers let it exit."""
    section = ExpertsConfig.model_validate(settings["experts"])
    shape = LayerShape(settings["width"], hidden_widths(section, settings["width"]), "gelu")
    placement = first_placement(settings, [shape] * settings["layers"], PlacementRules.of(section))
    HostServer(
        joint_group(settings, rank), host=rank - settings["workers"], generation=1, placement=placement,
        device=torch.device("cpu"),
    ).serve()  # fmt: skip


# ---------------------------------------------------------------- in the processes: the layer

#: Updates of the loss-free bias before the measurements, after which all experts have nearly the same load.
BALANCING_ROUNDS = 200


class LayerRunner:
    """The layer with this process's part of the tokens: all of them and all experts in the single process (0 workers),
    else with the experts where the layout has them."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        workers, tokens, width = max(1, settings["workers"]), settings["tokens"], settings["width"]
        self.rank = rank
        torch.manual_seed(settings["seed"])
        self.layer = moe_layer(width, ExpertsConfig.model_validate(settings["experts"]))
        draw = torch.Generator().manual_seed(settings["seed"])
        x_TD, grad_TD = (torch.randn(tokens, width, generator=draw) for _ in range(2))
        self.counts = balance(self.layer, x_TD)
        part = slice(rank * tokens // workers, (rank + 1) * tokens // workers)
        self.x, self.grad = x_TD[part].clone().requires_grad_(), grad_TD[part].clone()
        self.client: Any = None
        if settings["workers"]:
            trainable = Trainable(torch.nn.ModuleList([self.layer]), loss=lambda module, batch: module(batch))  # unused
            trainable.interval_log = LoadLog(LoadTracker([self.layer.router]))
            hand_over(trainable, ExpertsConfig().connected(FileConnection(settings, rank)))
            assert isinstance(self.layer.experts, RemoteExperts)
            self.client = self.layer.experts.client
            self.client.configure(OptimConfig(), dtype=torch.float32, device=torch.device("cpu"))
        self.buffers = GradientBuffers(self.layer.parameters())

    def run_block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run "steps" passes; with "results" also the output of the last one, and the gradient of its input. The
        gradients of all processes are zero afterwards."""
        torch.set_num_threads(request.get("threads", 1))
        y_TD = torch.empty(0)
        began = time.perf_counter()
        for _ in range(request["steps"]):
            self.x.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=request["dtype"] == "bf16"):
                y_TD = self.layer(self.x.unsqueeze(0))[0].squeeze(0)
            y_TD.backward(self.grad)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "rank": self.rank}
        if self.client is not None:
            self.client.discard()
        self.buffers.zero_()
        if request.get("results"):
            assert self.x.grad is not None
            answer["results"] = {"output": y_TD.detach().float().numpy(), "gradient": self.x.grad.numpy()}
        return answer


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


def run_layer(settings: dict[str, Any], rank: int) -> None:
    """Run as the process of this rank: a worker, the single process, or a host."""
    keep_freed_memory()
    torch.set_num_threads(1)
    if settings["workers"] and rank >= settings["workers"]:
        serve_host(settings, rank)
        return
    runner = LayerRunner(settings, rank)
    serve_blocks(runner.run_block)
    if runner.client is not None:
        runner.client.end()  # lets the hosts exit
