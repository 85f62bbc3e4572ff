"""The processes of bench `experts`, and what those of bench `moves` have as well: a transport group without Ray.

Workers and the single process serve requests of the bench, a host serves its workers; waiting uses no CPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

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
from jobs.bench.harness.processes import serve_blocks
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.device import keep_freed_memory
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.trainable import LocalStep, Trainable

#: Longest wait of an arm while the others run their blocks, which can take long on a busy machine.
TIMEOUT_S = 4 * 3600.0
#: Updates of the loss-free bias before the measurements, after which all experts have nearly the same load.
BALANCING_ROUNDS = 200
#: Of the gradients of the layer's output: at a learning rate of 1 the experts' weights change by about their own size.
GRADIENT_STD = 1e-2
#: Plain gradient descent, unclipped: one step at a learning rate of 1 shows every expert's gradient.
OPTIM = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, max_grad_norm=None)


# -- the group, without Ray -----------------------------------------------------------------------


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


# -- the layer ------------------------------------------------------------------------------------


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

    serve_blocks(settings["arm"], rank, run_block)
    if runner.client is not None:
        runner.client.end()  # lets the hosts exit
