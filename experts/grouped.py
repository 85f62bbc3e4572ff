"""The experts of one layer as stacked weights: run in a loop, or as one grouped product where it can be trusted, and
the state of one of them by name.

Workers with all experts and hosts with some of them compute with the same class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.config import Activation, weight_shapes
from raytrain.errors import first_line
from raytrain.train.memory.device import is_out_of_memory

# ---------------------------------------------------------------- grouped check
# Whether torch's grouped matrix product can be trusted on a device: it is compared with a loop, once per shape.

KERNELS_FOR = (9, 10)
"""Major compute capabilities. On others torch (2.11 to 2.13) loops, and reads the counts six times a layer."""

ROWS = (24, 0, 40, 0)
"""Rows of the experts in the comparison; two have none."""

TOLERANCE = 0.02
"""Greatest difference, relative to the largest value: bf16 has 8 bits, and both sum in fp32. Wrong results differ by as
much as they are large, or are not finite."""


@dataclass(frozen=True)
class Shape:
    """A grouped product of this process: rows of `inputs` values, weights of `outputs` by `inputs` per expert."""

    device: torch.device
    dtype: torch.dtype
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs} to {self.outputs} in {str(self.dtype).removeprefix('torch.')}"


_VERDICTS: dict[Shape, str] = {}
"""What was found in this process: why a shape is computed in a loop; "" if the grouped product is right."""
_UNREPORTED: list[str] = []


def use_grouped(device: torch.device, dtype: torch.dtype, *, width: int, hidden: int) -> bool:
    """Whether experts of this size are computed as grouped products; compares them first if that was not done yet.

    Raises:
        RuntimeError: memory ran out in the comparison, which decides nothing.
    """
    found = ""
    for shape in (Shape(device, dtype, width, hidden), Shape(device, dtype, hidden, width)):
        if shape not in _VERDICTS:
            _VERDICTS[shape] = problem = why_not(shape)
            if problem:
                _UNREPORTED.append(f"experts compute in a loop instead of as a grouped product ({shape}): {problem}")
        found = found or _VERDICTS[shape]
    return not found


def take_fallbacks() -> list[str]:
    """What fell back to the loop in this process since the last call, one sentence each."""
    fresh, _UNREPORTED[:] = list(_UNREPORTED), []
    return fresh


def why_not(shape: Shape) -> str:
    """Why the grouped product of a shape cannot be used; "" if it equals the loop, its gradients included."""
    if shape.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(shape.device)
        if capability[0] not in KERNELS_FOR:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}, and torch's kernel needs 9 or 10"
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(shape.device.type, enabled=False):
        try:
            return _difference(shape)
        except RuntimeError as error:  # no kernel for this GPU, or one that refuses the shape
            if is_out_of_memory(error, device=shape.device):
                raise
            return first_line(error)


def _difference(shape: Shape) -> str:
    """Compare result and gradients, expert by expert, so that only one of them exists in fp32."""
    generator = torch.Generator().manual_seed(0)  # on the CPU: the run's own generators stay as they are
    sizes = (sum(ROWS), shape.inputs), (len(ROWS), shape.outputs, shape.inputs), (sum(ROWS), shape.outputs)
    x, weight, upstream = (torch.randn(one, generator=generator).to(shape.device, shape.dtype) for one in sizes)
    x.requires_grad_()
    weight.requires_grad_()
    ends = torch.tensor(ROWS, device=shape.device).cumsum(0).to(torch.int32)
    # a kernel that leaves out the experts without rows returns what stood in memory: let that be no zeros
    torch.full_like(weight, math.nan)
    grouped = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    of_rows, of_weights = torch.autograd.grad(grouped, (x, weight), upstream)
    with torch.no_grad():
        first = 0
        for expert, number in enumerate(ROWS):
            if not number:
                if bool(of_weights[expert].ne(0).any()):
                    return "the gradient of an expert without rows is not zero"
                continue
            own = slice(first, first + number)
            first += number
            rows, matrix, above = x[own].float(), weight[expert].float(), upstream[own].float()
            pairs = {
                "the result": (grouped[own], rows @ matrix.T),
                "the gradient of the rows": (of_rows[own], above @ matrix),
                "the gradient of the weights": (of_weights[expert], above.T @ rows),
            }
            for name, (ours, looped) in pairs.items():
                if not bool((ours.float() - looped).abs().max() <= TOLERANCE * looped.abs().max()):
                    return f"{name} differs from the loop's"
    return ""


# ---------------------------------------------------------------- grouped

INIT_STD = 0.02
#: Above this many rows, an expert's rows are padded where each number of rows costs generated code (`padded_rows`).
PADDED_FROM = 64


class GroupedExperts(nn.Module):
    """E feed-forward experts of one size.

    Args:
        num_experts, width, hidden: E, D, F.
        activation: gelu: w2 gelu(w1 x); relu: w2 relu(w1 x); swiglu: w2 (silu(w1 x) * (w3 x)).
        bias: each linear map adds a vector, initially zero. With relu this is a perceptron with one hidden layer.
        residual_scale: scales the initial w2, which writes into the residual stream.
        frozen: names of the weights that do not require gradients.

    Every expert has a gradient after backward, zero if it received no token; frozen weights have none.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None
    b1: Tensor | None
    b2: Tensor | None
    b3: Tensor | None

    stacked_matrices = ("w1", "w2", "w3")
    stacked_vectors = ("b1", "b2", "b3")
    """Parameters that stack one matrix, or one vector, per expert; optimizers and parameter groups read these."""

    never_compiled = ("_compare_grouped",)
    """Runs once; torch's compiler would trace it as a part of the experts."""
    grouped_is_right = False
    grouped_on: tuple[torch.device, torch.dtype] | None = None
    """The device and format of the comparison that `grouped_is_right` is the result of."""

    def __init__(
        self, num_experts: int, width: int, hidden: int, *, activation: Activation = "gelu", bias: bool = False,
        residual_scale: float = 1.0, frozen: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        if min(num_experts, width, hidden) < 1:
            raise ValueError(f"{num_experts} experts of {width} x {hidden}: each must be at least 1")
        self.width, self.bias = width, bias
        self.activation: Activation = activation
        self.hidden_E = (hidden,) * num_experts
        shapes = weight_shapes(width, hidden, activation=activation, bias=bias)
        self.names = tuple(shapes)
        for name in ("w1", "w2", "w3", *self.stacked_vectors):
            shape, trained = shapes.get(name), name not in frozen
            made = nn.Parameter(torch.zeros(num_experts, *shape), requires_grad=trained) if shape else None
            self.register_parameter(name, made)
        for name in [name for name in shapes if name not in self.stacked_vectors]:
            nn.init.normal_(getattr(self, name), std=INIT_STD * (residual_scale if name == "w2" else 1.0))

    def weights_of(self, expert: int) -> dict[str, Tensor]:
        """Weights of the expert at this position, by name; detached views."""
        return {name: getattr(self, name).detach()[expert] for name in self.names}

    def slot(self, expert: int) -> tuple[GroupedExperts, int]:
        """(the stack that holds an expert, its position in that stack)."""
        return self, expert

    def forward(self, x_RD: Tensor, counts_E: Tensor, splits: list[int] | None = None) -> Tensor:
        """Run each row through its expert.

        Args:
            x_RD: rows sorted by expert.
            counts_E: int64, rows of each expert; sums to R.
            splits: `counts_E` as a list, if it is already known. Otherwise the loop reads it once per call: the one
                device read of a layer that is allowed (ARCHITECTURE.md, 11); only for bf16 has torch a kernel that
                takes them from the device. The grouped product reads nothing; rows behind those of the last expert are
                undefined.

        Returns:
            (R, D), in the dtype of the products (autocast's if it is on).
        """
        if self.groups(x_RD):
            dtype = compute_dtype(x_RD)
            return self._grouped(x_RD.to(dtype), counts_E, dtype)
        return self._looped(x_RD, counts_E.tolist() if splits is None else splits)

    def groups(self, x_RD: Tensor) -> bool:
        """Whether these rows are computed as grouped products."""
        return len(x_RD) > 0 and self.compare_kernels(x_RD.device, compute_dtype(x_RD))

    def compare_kernels(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether rows of this format are computed as grouped products on this device.

        The first call compares them with the loop; before training starts, where it is called for all modules that have
        it, or else at the first rows.
        """
        if not _can_group(device, dtype, self.width, self.hidden_E[0]):
            return False
        if self.grouped_on != (device, dtype):
            self.grouped_is_right = self._compare_grouped(device, dtype)
            self.grouped_on = (device, dtype)
        return self.grouped_is_right

    def _compare_grouped(self, device: torch.device, dtype: torch.dtype) -> bool:
        return use_grouped(device, dtype, width=self.width, hidden=self.hidden_E[0])

    def take_fallbacks(self) -> list[str]:
        """What fell back to the loop in this process since the last call."""
        return take_fallbacks()

    def _looped(self, x_RD: Tensor, splits: list[int]) -> Tensor:
        # without any row the first expert runs on an empty one, so that every weight still gets a zero gradient
        runs = [e for e, n in enumerate(splits) if n] or [0]
        rows = x_RD.split(splits)
        # one unbind per weight: its backward fills the full stack, with zeros where an expert did not run
        weights = {name: getattr(self, name).unbind(0) for name in self.names}
        each = [{name: stack[e] for name, stack in weights.items()} for e in runs]
        return torch.cat([run_expert(rows[e], own, self.activation) for e, own in zip(runs, each, strict=True)])

    def _grouped(self, x_RD: Tensor, counts_E: Tensor, dtype: torch.dtype) -> Tensor:
        ends = counts_E.cumsum(0).to(torch.int32)
        rows = torch.arange(len(x_RD), dtype=torch.int32, device=ends.device)
        expert_R = torch.searchsorted(ends, rows, right=True) if self.bias else None

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = F.grouped_mm(x, weight.to(dtype).transpose(1, 2), offs=ends)
            if bias is None or expert_R is None:
                return y
            # rows of no expert have a bias of their own, so that their undefined gradients reach no other
            return y + F.pad(bias.to(dtype), (0, 0, 0, 1)).index_select(0, expert_R)

        inner = activate(linear(x_RD, self.w1, self.b1), self.activation)
        if self.w3 is not None:
            inner = inner * linear(x_RD, self.w3, self.b3)
        return linear(inner, self.w2, self.b2)


class UnevenExperts(nn.Module):
    """E feed-forward experts, each with its own hidden width; same calls and attributes as GroupedExperts.

    Neighbours of equal width, with the same weights frozen, are stacked and run together, so list experts by size.

    Args:
        hidden_E: the width of each expert.
        frozen_E: `frozen` of each expert; empty if all weights are trained.
        kind: activation, bias and residual_scale, as GroupedExperts.
    """

    def __init__(
        self, width: int, hidden_E: Sequence[int], *, frozen_E: Sequence[tuple[str, ...]] = (), **kind: Any
    ) -> None:
        super().__init__()
        runs = [(*alike, len(list(same))) for alike, same in groupby(_alike(hidden_E, frozen_E))]
        self.runs = nn.ModuleList(
            GroupedExperts(number, width, hidden, **kind, frozen=frozen) for hidden, frozen, number in runs
        )
        self.sizes = [number for *_, number in runs]
        self.hidden_E, self.width = tuple(hidden_E), width
        self.bias: bool = kind.get("bias", False)
        self.activation: Activation = kind.get("activation", "gelu")

    def weights_of(self, expert: int) -> dict[str, Tensor]:
        """Weights of the expert at this position, by name; detached views."""
        stack, place = self.slot(expert)
        return stack.weights_of(place)

    def slot(self, expert: int) -> tuple[GroupedExperts, int]:
        """(the stack that holds an expert, its position in that stack)."""
        place = expert
        for run, number in zip(self.runs, self.sizes, strict=True):
            if place < number:
                assert isinstance(run, GroupedExperts)
                return run, place
            place -= number
        raise IndexError(f"expert {expert} of {len(self.hidden_E)}")

    def forward(self, x_RD: Tensor, counts_E: Tensor, splits: list[int] | None = None) -> Tensor:
        """As `GroupedExperts.forward`; reads the counts once per call if `splits` is not given: without them, each
        stack would have to take all rows, and to keep inner values for as many."""
        splits = counts_E.tolist() if splits is None else splits
        parts, begin, row = [], 0, 0
        for run, number in zip(self.runs, self.sizes, strict=True):
            own = splits[begin : begin + number]
            parts.append(run(x_RD[row : row + sum(own)], counts_E[begin : begin + number], own))
            begin, row = begin + number, row + sum(own)
        return torch.cat(parts)


def build_experts(
    width: int, hidden_E: Sequence[int], *, frozen_E: Sequence[tuple[str, ...]] = (), **kind: Any
) -> GroupedExperts | UnevenExperts:
    """Build the experts of one layer, one for each width; arguments as UnevenExperts."""
    kinds = set(_alike(hidden_E, frozen_E))
    if len(kinds) == 1:
        ((hidden, frozen),) = kinds
        return GroupedExperts(len(hidden_E), width, hidden, **kind, frozen=frozen)
    return UnevenExperts(width, hidden_E, **kind, frozen_E=frozen_E)


def _alike(hidden_E: Sequence[int], frozen_E: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
    """What experts of one stack have in common, of each expert."""
    return list(zip(hidden_E, frozen_E or ((),) * len(hidden_E), strict=True))


class SharedExpert(nn.Module):
    """An expert that every token visits, (T, D) -> (T, D); same activations as GroupedExperts.

    Args:
        gate: multiply the result by sigmoid(gate x), one number per token, as Qwen2-MoE does.
    """

    def __init__(
        self, width: int, hidden: int, *, activation: Activation = "gelu", bias: bool = False,
        residual_scale: float = 1.0, gate: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation, self.bias, self.hidden = activation, bias, hidden
        shapes = weight_shapes(width, hidden, activation=activation, bias=bias)
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        for name in [name for name, shape in shapes.items() if len(shape) == 2]:
            nn.init.normal_(getattr(self, name), std=INIT_STD * (residual_scale if name == "w2" else 1.0))
        self.gate = nn.Linear(width, 1, bias=False) if gate else None
        if self.gate is not None:
            nn.init.normal_(self.gate.weight, std=INIT_STD)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = run_expert(x_TD, {name: getattr(self, name) for name in self.names}, self.activation)
        return y_TD if self.gate is None else y_TD * self.gate(x_TD).sigmoid()


def run_expert(x: Tensor, weights: Mapping[str, Tensor], activation: str) -> Tensor:
    """Run rows through one expert; `weights` under the names of `weight_shapes`."""
    rows = len(x)
    on_onednn = x.device.type == "cpu" and compute_dtype(x) in (torch.bfloat16, torch.float16)
    added = padded_rows(rows) - rows if on_onednn else 0
    if added:
        x = F.pad(x, (0, 0, 0, added))
    inner = activate(F.linear(x, weights["w1"], weights.get("b1")), activation)
    if "w3" in weights:
        inner = inner * F.linear(x, weights["w3"], weights.get("b3"))
    y = F.linear(inner, weights["w2"], weights.get("b2"))
    return y[:rows] if added else y


def padded_rows(rows: int) -> int:
    """The rows that a CPU computes for an expert in half precision: a few distinct numbers, at most 64 or 1/16 more.

    There, torch's products are oneDNN's, which generates code for each new shape and keeps it. Routing gives an expert
    another number of rows in each step: measured with 1,024 of 128 features on a CPU with AMX, a product took 2.2 ms
    instead of 0.13, and the process grew by half a megabyte with each shape. The added rows are zero and have no
    gradient.
    """
    if rows <= PADDED_FROM:
        return rows
    step = PADDED_FROM
    while 32 * step < rows:
        step *= 2
    return -(-rows // step) * step


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply the nonlinearity after w1; for swiglu the SiLU, before the multiplication with w3 x."""
    return {"gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}[activation](x)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with `x`: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _can_group(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """The grouped product needs bf16 on CUDA, and rows aligned to 16 bytes."""
    return device.type == "cuda" and dtype == torch.bfloat16 and width % 8 == 0 and hidden % 8 == 0


# ---------------------------------------------------------------- state of one expert
# Its part of stacked weights, and of the optimizers' state of them.


Optimizers = Sequence[torch.optim.Optimizer]
State = Mapping[str, Tensor]
"""Weights by name, such as "w1", and the optimizer's tensors of them, such as "w1.exp_avg"."""


def state_of(stack: GroupedExperts, place: int, optimizers: Optimizers) -> dict[str, Tensor]:
    """Weights and optimizer state of the expert at this position of a stack; mostly views, so clone what you keep."""
    state: dict[str, Tensor] = {}
    for name in stack.names:
        state |= {f"{name}{part}": value for part, value in row_of(getattr(stack, name), place, optimizers).items()}
    return state


def load_state(stack: GroupedExperts, place: int, optimizers: Optimizers, state: State) -> None:
    """The inverse of `state_of`."""
    for name in stack.names:
        own = {key.removeprefix(name): value for key, value in state.items() if key.partition(".")[0] == name}
        load_row(getattr(stack, name), place, optimizers, own)


def row_of(parameter: nn.Parameter, place: int, optimizers: Optimizers) -> dict[str, Tensor]:
    """One row of a parameter as "", and the optimizer state of it as ".exp_avg" and so on; mostly views."""
    state = {"": parameter.detach()[place]}
    for optimizer in optimizers:
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f".{name}"] = value[place] if value.shape == parameter.shape else value
    return state


def load_row(parameter: nn.Parameter, place: int, optimizers: Optimizers, state: State) -> None:
    """The inverse of `row_of`; a parameter that is not trained has no optimizer state."""
    parameter.detach()[place].copy_(state[""])
    for key, value in state.items() if parameter.requires_grad else ():
        if not key:
            continue
        name = key.removeprefix(".")
        groups = ((own, group) for own in optimizers for group in own.param_groups)
        optimizer, group = next(pair for pair in groups if any(parameter is one for one in pair[1]["params"]))
        held = optimizer.state[parameter]
        if value.ndim:
            if name not in held:
                held[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            held[name][place].copy_(value)
        elif group.get("fused") or group.get("capturable"):
            # A scalar such as the step count comes from a checkpoint or another host, whose device may differ. Fused
            # kernels read it on the parameter's device, always in float32; other kernels read it on the CPU.
            # `load_state_dict` of torch has the same rule.
            held[name] = value.detach().to(dtype=torch.float32, device=parameter.device, copy=True)
        else:
            held[name] = value.detach().to(device="cpu", copy=True)
