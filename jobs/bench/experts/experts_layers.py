"""The layer that bench `experts` measures, its input, and the other ways of computing it."""

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

#: Times that the loss-free bias moves before anything is measured: every expert then has nearly the same load.
EVENING_ROUNDS = 200
#: Of the gradients that the layer gets: experts then change by about their own size at a learning rate of 1.
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
        """Of the products."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What the loop sets around a forward pass."""
        return torch.autocast("cpu", torch.bfloat16) if self.dtype == "bf16" else contextlib.nullcontext()

    def draw(self, seed: int) -> tuple[Tensor, Tensor]:
        """The whole input and the gradient of the whole output, (T, D) each; the same in every process."""
        source = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(self.tokens, self.width, generator=source)
        return x_TD, GRADIENT_STD * torch.randn(self.tokens, self.width, generator=source)


def build_layers(widths: list[int], *, num_experts: int, top_k: int, seed: int) -> list[MoELayer]:
    """One layer for each width, feed-forward experts of four times that; the same weights in every process."""
    section = ExpertsConfig(num_experts=num_experts, top_k=top_k, balance="bias")
    layers = []
    for width in widths:
        torch.manual_seed(seed)
        layers.append(moe_layer(width, section, residual_scale=1.0))
    return layers


@torch.no_grad()
def even_out(layer: MoELayer, x_TD: Tensor) -> list[int]:
    """Let the router's own bias balance the load of this input, from zero; rows of each expert afterwards."""
    router = layer.router
    router.bias_E.zero_()
    for _ in range(EVENING_ROUNDS):
        router.pending_counts.zero_()
        router(x_TD.unsqueeze(0))
        router.commit(router.pending_counts.clone(), skipped=False)
    return router(x_TD.unsqueeze(0)).counts_E.tolist()


def run_pass(forward: Callable[[Tensor], tuple[Tensor, Tensor | None]], case: Case, x: Tensor, grad: Tensor) -> Tensor:
    """Forward and backward once; the output. `x.grad` is the input's gradient afterwards.

    The auxiliary loss is a mean over these tokens: it weighs as their part of the case's.
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
    """Experts in this process, in every way in which they can be computed here.

    `kinds`: "sorted" is the layer as it is; "masks" runs each expert on the tokens that a mask picks; "loop" and
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
        self.counts = even_out(self.layer, x_TD)
        self.x = x_TD.requires_grad_()
        rows = case.tokens * self.layer.router.top_k
        draw = torch.Generator().manual_seed(self.seed)
        rows_RD = torch.randn(rows, case.width, generator=draw)
        self.rows = rows_RD.to(self.device, case.torch_dtype).requires_grad_()
        grads_RD = GRADIENT_STD * torch.randn(rows, case.width, generator=draw)
        self.row_grads = grads_RD.to(self.device, case.torch_dtype)
        self.experts = copy.deepcopy(self.layer.experts).to(self.device)

    def once(self, kind: str) -> Tensor:
        """One forward and backward."""
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
        """Seconds of so many passes; gradients are zero afterwards."""
        began = time.perf_counter()
        for _ in range(steps):
            self.once(kind)
        seconds = time.perf_counter() - began
        self._forget()
        return seconds

    def results(self, kind: str) -> dict[str, Tensor]:
        """Of one pass: output, gradients of the input and of every weight."""
        self._forget()
        y = self.once(kind)
        alone = kind in ("loop", "grouped")
        x, module = (self.rows, self.experts) if alone else (self.x, self.layer)
        made = {"output": y, "gradient of the input": x.grad}
        made |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
        made = {name: value.clone().cpu() for name, value in made.items() if value is not None}
        self._forget()
        return made

    def _forget(self) -> None:
        self.buffers[self.case.width].zero_()
        self.experts.zero_grad(set_to_none=False)


def product_device() -> torch.device:
    """Where the grouped product is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def can_group(dtype: torch.dtype) -> bool:
    """Whether that device has a grouped product of this dtype, forward and backward."""
    x = torch.ones(16, 16, dtype=dtype, device=product_device(), requires_grad=True)
    weight = torch.ones(2, 16, 16, dtype=dtype, device=x.device, requires_grad=True)
    ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
    try:
        y = torch.nn.functional.grouped_mm(x, weight, offs=ends)
        y.backward(torch.ones_like(y))
    except RuntimeError:  # what torch says of a kernel that it does not have
        return False
    return True


def one_sequence(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """(T, D) through the layer as one sequence."""
    y, aux = layer(x_TD.unsqueeze(0))
    return y.squeeze(0), aux


def by_masks(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """The layer as it is often written: for each expert, look for its tokens, run it, add what it says."""
    routing = layer.router(x_TD.unsqueeze(0))
    experts, y_TD = layer.experts, torch.zeros_like(x_TD)
    assert isinstance(experts, GroupedExperts)
    for expert in range(layer.router.num_experts):
        tokens, choices = torch.where(routing.indices_TK == expert)
        inner = torch.nn.functional.gelu(torch.nn.functional.linear(x_TD[tokens], experts.w1[expert]))
        said = torch.nn.functional.linear(inner, experts.w2[expert])
        y_TD = y_TD.index_add(0, tokens, said * routing.weights_TK[tokens, choices].unsqueeze(-1))
    return y_TD, routing.aux
