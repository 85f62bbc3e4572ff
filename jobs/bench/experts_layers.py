"""The layer of bench `experts`, its input, and alternative implementations of it."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.config import ExpertsConfig
from experts.layer import MoELayer
from experts.models import moe_layer
from experts.routing.grouped import GroupedExperts
from raytrain.train.parallel.flat_gradients import GradientBuffers

#: Updates of the loss-free bias before the measurements, after which all experts have nearly the same load.
BALANCING_ROUNDS = 200
#: Of the gradients of the layer's output: at a learning rate of 1 the experts' weights change by about their own size.
GRADIENT_STD = 1e-2


@dataclass(frozen=True)
class Case:
    """One size of the layer: T tokens of width D, in "fp32" or "bf16"."""

    tokens: int
    width: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.tokens} x {self.width}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of a forward pass."""
        return torch.autocast("cpu", torch.bfloat16) if self.dtype == "bf16" else contextlib.nullcontext()

    def draw(self, seed: int) -> tuple[Tensor, Tensor]:
        """The global input and the gradient of the global output, (T, D) each; the same in every process."""
        source = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(self.tokens, self.width, generator=source)
        return x_TD, GRADIENT_STD * torch.randn(self.tokens, self.width, generator=source)


def build_layers(widths: list[int], *, num_experts: int, top_k: int, seed: int) -> list[MoELayer]:
    """A layer for each width, with feed-forward experts four times as wide; the same weights in every process."""
    section = ExpertsConfig(num_experts=num_experts, top_k=top_k, balance="bias")
    layers = []
    for width in widths:
        torch.manual_seed(seed)
        layers.append(moe_layer(width, section, residual_scale=1.0))
    return layers


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


def run_pass(forward: Callable[[Tensor], tuple[Tensor, Tensor | None]], case: Case, x: Tensor, grad: Tensor) -> Tensor:
    """Run forward and backward once; returns the output and leaves the gradient of the input in `x.grad`.

    The auxiliary loss is a mean over these tokens, weighted with their fraction of the case's tokens.
    """
    x.grad = None
    with case.autocast():
        y, aux = forward(x)
    outputs, grads = [y], [grad]
    if aux is not None:
        outputs.append(aux)
        grads.append(torch.full_like(aux, len(x) / case.tokens))
    torch.autograd.backward(outputs, grads)
    return y.detach()


class InProcess:
    """Experts in this process, in all available implementations.

    `kind`: "sorted" is the layer itself; "masks" runs each expert on the tokens that a mask selects; "loop" and
    "grouped" are the experts alone, on sorted rows.
    """

    def __init__(self, widths: list[int], *, num_experts: int, top_k: int, seed: int) -> None:
        layers = build_layers(widths, num_experts=num_experts, top_k=top_k, seed=seed)
        self.layers, self.seed = dict(zip(widths, layers, strict=True)), seed
        self.buffers = {width: GradientBuffers(layer.parameters()) for width, layer in self.layers.items()}
        self.device = product_device()

    def prepare(self, case: Case) -> None:
        """Draw this case's input and balance its load."""
        self.case, self.layer = case, self.layers[case.width]
        x_TD, self.grad = case.draw(self.seed)
        self.counts = balance(self.layer, x_TD)
        self.x = x_TD.requires_grad_()
        rows = case.tokens * self.layer.router.top_k
        draw = torch.Generator().manual_seed(self.seed)
        rows_RD = torch.randn(rows, case.width, generator=draw)
        self.rows = rows_RD.to(self.device, case.torch_dtype).requires_grad_()
        grads_RD = GRADIENT_STD * torch.randn(rows, case.width, generator=draw)
        self.row_grads = grads_RD.to(self.device, case.torch_dtype)
        self.experts = copy.deepcopy(self.layer.experts).to(self.device)

    def once(self, kind: str) -> Tensor:
        """One forward and backward pass."""
        if kind == "sorted":
            return run_pass(lambda x: one_sequence(self.layer, x), self.case, self.x, self.grad)
        if kind == "masks":
            return run_pass(lambda x: by_masks(self.layer, x), self.case, self.x, self.grad)
        y = run_pass(lambda x: (self._experts_alone(kind, x), None), self.case, self.rows, self.row_grads)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return y

    def _experts_alone(self, kind: str, rows_RD: Tensor) -> Tensor:
        assert isinstance(self.experts, GroupedExperts)
        if kind == "loop":
            return self.experts._looped(rows_RD, self.counts)
        return self.experts._grouped(rows_RD, torch.tensor(self.counts, device=self.device), rows_RD.dtype)

    def block(self, kind: str, steps: int) -> float:
        """The seconds of `steps` passes; gradients are zero afterwards."""
        began = time.perf_counter()
        for _ in range(steps):
            self.once(kind)
        seconds = time.perf_counter() - began
        self._zero_gradients()
        return seconds

    def results(self, kind: str) -> dict[str, Tensor]:
        """The output of one pass, and the gradients of the input and of all weights."""
        self._zero_gradients()
        y = self.once(kind)
        alone = kind in ("loop", "grouped")
        x, module = (self.rows, self.experts) if alone else (self.x, self.layer)
        results = {"output": y, "gradient of the input": x.grad}
        results |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
        results = {name: value.clone().cpu() for name, value in results.items() if value is not None}
        self._zero_gradients()
        return results

    def _zero_gradients(self) -> None:
        self.buffers[self.case.width].zero_()
        self.experts.zero_grad(set_to_none=False)


def product_device() -> torch.device:
    """The device on which the grouped matrix product is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def can_group(dtype: torch.dtype) -> bool:
    """Whether that device has a grouped matrix product of this dtype, forward and backward."""
    x = torch.ones(16, 16, dtype=dtype, device=product_device(), requires_grad=True)
    weight = torch.ones(2, 16, 16, dtype=dtype, device=x.device, requires_grad=True)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
    try:
        y = torch.nn.functional.grouped_mm(x, weight, offs=ends)
        y.backward(torch.ones_like(y))
    except RuntimeError:  # torch has no such kernel
        return False
    return True


def one_sequence(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """(T, D) through the layer as one sequence."""
    y, aux = layer(x_TD.unsqueeze(0))
    return y.squeeze(0), aux


def by_masks(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """The layer as it is often written: for each expert, select its tokens, run it, add its output."""
    routing = layer.router(x_TD.unsqueeze(0))
    experts, y_TD = layer.experts, torch.zeros_like(x_TD)
    assert isinstance(experts, GroupedExperts)
    for expert in range(layer.router.num_experts):
        tokens, choices = torch.where(routing.indices_TK == expert)
        inner = torch.nn.functional.gelu(torch.nn.functional.linear(x_TD[tokens], experts.w1[expert]))
        output = torch.nn.functional.linear(inner, experts.w2[expert])
        y_TD = y_TD.index_add(0, tokens, output * routing.weights_TK[tokens, choices].unsqueeze(-1))
    return y_TD, routing.aux
