"""The processes of bench `experts`: a worker or a host of a layout, or all experts in one process.

Workers and the single process serve requests of the bench, a host serves its workers; waiting uses no CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from experts.config import ExpertsConfig
from experts.distribute import hand_over
from experts.exchange.dispatch import RemoteExperts
from experts.exchange.interval_log import LoadLog
from experts.exchange.worker import ExpertClient
from experts.member.shard import ExpertShard
from experts.placement.starting import first_placement
from experts.placement.values import Placement
from experts.routing.load import LoadTracker
from jobs.bench.experts_group import FileConnection, serve_host
from jobs.bench.experts_layers import Case, InProcess, balance, build_layers, one_sequence, run_pass
from jobs.bench.harness.processes import serve_blocks
from jobs.bench.harness.sessions import SessionArm
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.trainable import LocalStep, Trainable

#: Plain gradient descent, unclipped: one step at a learning rate of 1 shows every expert's gradient.
OPTIM = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, max_grad_norm=None)


def place(settings: dict[str, Any], experts: list[int]) -> Placement:
    """The fixed placement of layers with these numbers of experts."""
    return first_placement(experts, hosts=settings["hosts"] or settings["workers"])


def connection_of(settings: dict[str, Any], rank: int) -> FileConnection:
    """This worker's connection."""
    return FileConnection(settings, rank, lambda shapes, _rules: place(settings, [one.num_experts for one in shapes]))


class Meter:
    """Writes the seconds computed in experts and the CPU seconds of this process to a file that the bench reads."""

    def __init__(self, path: str) -> None:
        self._file = np.memmap(path, dtype=np.float64, mode="w+", shape=(2,))

    def watch(self) -> None:
        """Start to measure."""
        for name in ("forward", "backward"):
            setattr(ExpertShard, name, self._timed(getattr(ExpertShard, name)))

    def _timed(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(*args: Any, **kwargs: Any) -> Tensor:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._file[:] = self._file[0] + time.perf_counter() - began, time.process_time()

        return timed


class LayerWorker:
    """A worker, with its part of the tokens of each case."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self.seed, self.rank, self.workers = settings["seed"], rank, settings["workers"]
        sizes = {name: settings[name] for name in ("num_experts", "top_k", "seed")}
        layers = build_layers(settings["widths"], **sizes)
        self.first = [{name: one.detach() for name, one in layer.experts.named_parameters()} for layer in layers]
        self.layers = dict(zip(settings["widths"], layers, strict=True))
        trainable = Trainable(torch.nn.ModuleList(layers), loss=_no_loss)
        trainable.interval_log = LoadLog(LoadTracker([layer.router for layer in layers]))
        hand_over(trainable, ExpertsConfig().connected(connection_of(settings, rank)))
        self.client = _client_of(layers[0].experts)
        self.buffers = GradientBuffers(trainable.module.parameters())
        self.restore()

    def restore(self) -> None:
        """Reset the experts to their initial weights."""
        self.client.configure(OPTIM, dtype=torch.float32, device=torch.device("cpu"))

    def prepare(self, case: Case) -> None:
        """Draw the global input, balance its load, keep this worker's part."""
        self.case, self.layer = case, self.layers[case.width]
        x_TD, grad_TD = case.draw(self.seed)
        balance(self.layer, x_TD)
        part = slice(self.rank * case.tokens // self.workers, (self.rank + 1) * case.tokens // self.workers)
        self.x, self.grad = x_TD[part].clone().requires_grad_(), grad_TD[part].clone()

    def once(self) -> Tensor:
        """One forward and backward pass."""
        return run_pass(lambda x: one_sequence(self.layer, x), self.case, self.x, self.grad)

    def block(self, steps: int) -> dict[str, float]:
        """Run `steps` passes; gradients of all processes are zero afterwards."""
        before, cpu = self.client.group.seconds, time.process_time()
        began = time.perf_counter()
        for _ in range(steps):
            self.once()
        seconds = time.perf_counter() - began
        answer = {
            "seconds": seconds,
            "cpu_s": time.process_time() - cpu,
            "transport_s": self.client.group.seconds - before,
        }
        self.client.discard()
        self.buffers.zero_()
        return answer

    def results(self) -> dict[str, Tensor]:
        """The output of one pass with the initial weights, the gradients of input and router, and on rank 0 the
        gradients of the experts: their change in a step at a learning rate of 1."""
        self.restore()
        self.buffers.zero_()
        y = self.once()
        assert self.x.grad is not None and self.layer.router.weight.grad is not None
        results = {"output": y.clone(), "gradient of the input": self.x.grad.clone()}
        results["gradient of router.weight"] = self.layer.router.weight.grad.clone()
        nothing = torch.zeros((), dtype=torch.float64)
        step = self.client.steps + 1
        self.client.agree(LocalStep(step, nothing, torch.tensor(False), lr=1.0))
        number = list(self.layers).index(self.case.width)
        after = self.client.fetch(number)
        for name in ("w1", "w2") if after is not None else ():
            stacked = torch.stack([weights[name] for weights in after or ()])
            results[f"gradient of experts.{name}"] = self.first[number][name].detach() - stacked
        self.restore()
        self.buffers.zero_()
        return results


def _client_of(experts: torch.nn.Module) -> ExpertClient:
    assert isinstance(experts, RemoteExperts)
    return experts.client


def _no_loss(_module: torch.nn.Module, _batch: Any) -> Any:
    raise AssertionError("the bench calls the layers")


def train(settings: dict[str, Any], rank: int) -> None:
    """A worker that trains a model with its experts on the hosts."""
    arm = SessionArm(settings["job"], precision="fp32", connection=connection_of(settings, rank))
    arm.session.step.inflight = settings["inflight"]
    serve_blocks(settings["arm"], rank, lambda request: arm.run_block(request["steps"]))
    arm.session.full_module()  # lets the hosts exit


def work(settings: dict[str, Any], rank: int) -> None:
    """A worker that runs single layers and lets the hosts exit at the end."""
    worker = LayerWorker(settings, rank)

    def run_block(request: dict[str, Any]) -> dict[str, Any]:
        if "prepare" in request:
            worker.prepare(Case(**request["prepare"]))
        if "results" in request:
            save_file(worker.results(), f"{request['results']}-{rank}.safetensors")
        return worker.block(request["steps"])

    serve_blocks(settings["arm"], rank, run_block)
    worker.client.end()


def work_alone(settings: dict[str, Any]) -> None:
    """The single process with all experts."""
    alone = InProcess(settings["widths"], **{name: settings[name] for name in ("num_experts", "top_k", "seed")})

    def run_block(request: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(request["threads"])
        if "prepare" in request:
            alone.prepare(Case(**request["prepare"]))
        if "results" in request:
            save_file(alone.results(request["kind"]), f"{request['results']}-0.safetensors")
        cpu = time.process_time()
        seconds = alone.block(request["kind"], request["steps"])
        return {"seconds": seconds, "cpu_s": time.process_time() - cpu, "counts": alone.counts}

    serve_blocks(settings["arm"], 0, run_block)


def main(settings: dict[str, Any], rank: int) -> None:
    """Run as the process of this rank."""
    keep_freed_memory()
    torch.set_num_threads(1)
    if settings["workers"] == 0:
        work_alone(settings)
        return
    Meter(f"{settings['meters']}-{rank}").watch()
    if rank < settings["workers"]:
        train(settings, rank) if "job" in settings else work(settings, rank)
    else:
        serve_host(settings, rank, place(settings, [settings["num_experts"]] * len(settings["widths"])))
