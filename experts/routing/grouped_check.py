"""Whether torch's grouped matrix product can be trusted on a device: it is compared with a loop, once per shape.

On some GPUs the gradients of the weights of experts without rows were wrong (B200 and ROCm, pytorch #172439), and many
have no such kernel. What fails the comparison computes in a loop, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.errors import first_line
from raytrain.train.memory.device import is_out_of_memory

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
    draw = partial(_drawn, generator=generator, shape=shape)
    x, weight = (
        draw(sum(ROWS), shape.inputs).requires_grad_(),
        draw(len(ROWS), shape.outputs, shape.inputs).requires_grad_(),
    )
    upstream = draw(sum(ROWS), shape.outputs)
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
                if _unlike(ours, looped):
                    return f"{name} differs from the loop's"
    return ""


def _drawn(*sizes: int, generator: torch.Generator, shape: Shape) -> Tensor:
    return torch.randn(sizes, generator=generator).to(shape.device, shape.dtype)


def _unlike(one: Tensor, other: Tensor) -> bool:
    return not bool((one.float() - other).abs().max() <= TOLERANCE * other.abs().max())
